"""Plans from Python: a GPT-2 step's useful share and predicted time, refusals, time to make one."""

import time

import pytest
from gpt2_step import gpt2_step

from jax_xdna import _ffi

ARCHS = [("npu1", "bf16"), ("npu2", "bfp16"), ("npu2", "bf16")]


def plans_of_step(arch, numerics, tokens, result="f32", resident=False):
    """Plans of one design, the best for the step, each with its number of calls."""
    shapes = gpt2_step(tokens)
    tile = _ffi.best_tile(arch, shapes, numerics, result, resident)
    return [
        (_ffi.plan(arch, m, k, n, numerics, tile, result, resident), calls)
        for m, k, n, calls in shapes
    ]


def useful_share(plans):
    """Averaged over the products, weighted by their FLOPs."""
    weighted = [(plan["m"] * plan["k"] * plan["n"] * calls, plan) for plan, calls in plans]
    flops = sum(weight for weight, _ in weighted)
    return sum(weight * plan["useful_share"] for weight, plan in weighted) / flops


@pytest.mark.parametrize(("arch", "numerics"), ARCHS)
@pytest.mark.parametrize(("tokens", "share"), [(64, 0.5), (128, 0.98), (256, 0.98), (1024, 0.98)])
def test_useful_share_of_a_gpt2_step(arch, numerics, tokens, share):
    plans = plans_of_step(arch, numerics, tokens)
    assert sum(calls for _, calls in plans) == 147
    assert useful_share(plans) >= share


# Milliseconds of all 147 products of a step of 256 tokens, dispatches included.
@pytest.mark.parametrize(
    ("arch", "numerics", "result", "resident", "milliseconds"),
    [
        ("npu1", "bf16", "f32", False, 135),
        ("npu1", "bf16", "f32", True, 115),
        ("npu1", "bf16", "bf16", False, 115),
        ("npu2", "bfp16", "f32", False, 41),
        ("npu2", "bfp16", "f32", True, 39),
        ("npu2", "bfp16", "bf16", False, 34),
        ("npu2", "bfp16", "bf16", True, 32.1),
    ],
)
def test_predicted_time_of_a_gpt2_step(arch, numerics, result, resident, milliseconds):
    plans = plans_of_step(arch, numerics, 256, result, resident)
    total = 1e3 * sum(plan["seconds"]["total"] * calls for plan, calls in plans)
    assert 0.97 * milliseconds < total <= milliseconds


def test_the_search_takes_the_least_predicted_time():
    """Against each tile by itself, for products of many proportions."""
    tiles = [(64, 32, 96, 1), (64, 64, 48, 2), (32, 64, 96, 2)]
    chosen = set()
    for arch, numerics in ARCHS:
        for m in (16, 100, 256, 3000):
            for n in (16, 200, 768, 5000):
                plan = _ffi.plan(arch, m, 700, n, numerics)
                times = {
                    tile: _ffi.plan(arch, m, 700, n, numerics, tile)["seconds"]["total"]
                    for tile in tiles
                }
                assert plan["seconds"]["total"] == min(times.values())
                chosen.add((plan["tile"], plan["transposed"]))
    assert len(chosen) >= 4


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(256, 768, 2304), (2304, 256, 768), (5, 3, 7)])
def test_prediction_adds_up(m, k, n, resident):
    """DRAM bytes counted from the stream's own transfers, and the parts of the total."""
    plan = _ffi.plan("npu1", m, k, n, "bf16", (64, 64, 48, 2), "f32", resident)
    moved = sum(s["bytes"] * s["repeats"] for s in plan["steps"] if s["kind"] == "push")
    assert moved == plan["dram_bytes"]
    seconds = plan["seconds"]
    longest = max(seconds["compute"], seconds["dram"], seconds["lanes"])
    assert seconds["total"] == pytest.approx(seconds["dispatch"] + seconds["edges"] + longest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("npu3", 1, 1, 1), 'arch must be "npu1" or "npu2", got "npu3"'),
        (("npu1", 1, 1, 1, "fp8"), 'numerics must be "bf16" or "bfp16", got "fp8"'),
        (("npu1", 64, 64, 64, "bfp16"), "bfp16 needs npu2.*the limit of npu1's cores.* is bf16"),
        (("npu1", 4, 0, 4), "M, K and N must be at least 1, got 4, 0, 4"),
        (("npu1", 64, 64, 64, "bf16", (64, 64, 64, 2)), "L1 needs 68884 bytes, the limit is 65536"),
        (("npu1", 200000, 64, 200000), "packed C.*the limit is"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        _ffi.plan(*arguments)


def test_constants_name_their_source():
    for arch, numerics in ARCHS:
        constants = _ffi.model_constants(arch, numerics)
        assert all(value > 0 and len(source) > 10 for value, source in constants.values())


def test_a_plan_and_its_stream_take_microseconds():
    """Search, plan, stream and the dict for Python together; a dispatch takes 50 to 130 us."""
    best = min(_seconds(lambda: _ffi.plan("npu2", 256, 768, 2304)) for _ in range(50))
    assert best < 500e-6


def _seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
