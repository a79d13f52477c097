"""Predicted times: the pipeline of host and array, the cost-model policy, the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from gpt2_step import gpt2_step

import jax_xdna
from jax_xdna import Policy, _ffi, _host, _predict
from jax_xdna._cost import CostModel, predict
from jax_xdna._host import Host
from jax_xdna._policy import Dot
from models.errors import UserError
from models.options import parse_policy

LAPTOP = Host(flops=200e9, pack=30e9, unpack=40e9)
BIG = Dot("f.py:1", "", 1, 256, 768, 2304, "NN", 0, "float32", "float32", "float32", 1)


@pytest.fixture
def laptop(monkeypatch, tmp_path):
    """A machine with the rates of `LAPTOP`, and an empty cache; counts the measurements."""
    measured = []
    monkeypatch.setattr(_host, "measure", lambda: measured.append(1) or LAPTOP)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _host._host.cache_clear()
    yield measured
    _host._host.cache_clear()


def a_plan(chunks, along="m", m=4, transposed=False):
    seconds = {"dispatch": 1.0, "edges": 0.5, "compute": 8.0, "dram": 0.0, "lanes": 0.0}
    return {
        **{"m": m, "k": 1, "n": 1, "transposed": transposed, "buffer_bytes": (4, 6, 2)},
        **{"chunks": chunks, "chunks_along": along, "seconds": {**seconds, "total": 9.5}},
    }


def test_one_piece_overlaps_nothing():
    host = Host(1.0, 2.0, 4.0)
    # B (10 + 6 bytes) and A (8 + 4) packed, dispatched, run, unpacked (6 + 2).
    total, work = predict(a_plan([(0, 4)]), host, (8, 10, 6))
    assert total == pytest.approx(8 + 6 + 1 + 0.5 + 8 + 2)
    assert work == pytest.approx(16)
    # The transposed product's buffers are those of the other operand.
    total, _ = predict(a_plan([(0, 4)], transposed=True), host, (8, 10, 6))
    assert total == pytest.approx(7 + 7 + 1 + 0.5 + 8 + 2)


def test_pieces_overlap_packing_and_unpacking():
    """B packed by 8, A by 11 and 14; runs end at 16.5 and 21; C unpacked by 17.5 and 22."""
    total, _ = predict(a_plan([(0, 2), (2, 2)]), Host(1.0, 2.0, 4.0), (8, 10, 6))
    assert total == pytest.approx(22)
    # A slow host is what everything waits for.
    total, work = predict(a_plan([(0, 2), (2, 2)]), Host(1.0, 0.2, 0.4), (8, 10, 6))
    assert work == pytest.approx(160) and 160 <= total < 165


@pytest.mark.parametrize(("arch", "numerics"), [("npu1", "bf16"), ("npu2", "bfp16")])
def test_a_prediction_lies_between_its_parts_and_their_sum(arch, numerics):
    for m, k, n, _ in gpt2_step(256):
        plan = _ffi.plan(arch, m, k, n, numerics)
        total, host = predict(plan, LAPTOP, (4 * m * k, 4 * k * n, 4 * m * n))
        array = plan["seconds"]["total"]
        edges = (len(plan["chunks"]) - 1) * plan["seconds"]["edges"]
        assert max(array, host) < total <= (array + host + edges) * (1 + 1e-9)
        free, _ = predict(plan, Host(1.0, 1e30, 1e30), (4 * m * k, 4 * k * n, 4 * m * n))
        assert free == pytest.approx(array + edges)


def test_the_policy_takes_what_is_faster(laptop):
    policy = Policy.cost_model("npu1")
    assert repr(policy) == "Policy.cost_model(npu1, bf16, turbo)"
    verdict, reason = policy(BIG)
    assert verdict and reason.startswith("npu1 0.9") and "CPU 4.53 ms" in reason
    small = dataclasses.replace(BIG, m=64, k=64, n=64, batch=48)
    assert not policy(small)[0]
    assert not policy(dataclasses.replace(BIG, lhs_dtype="float64"))[0]
    # What the plan refuses: packed buffers beyond 32-bit offsets.
    assert policy(dataclasses.replace(BIG, m=200000, n=200000)) == (False, "npu1 cannot compute it")
    fast = CostModel(Host(1e15, 1e13, 1e13), **{k: getattr(policy.rule, k) for k in FIELDS})
    assert not fast(BIG)[0]


FIELDS = ("arch", "numerics", "power", "tile")


def test_power_and_datapath_change_the_prediction(laptop):
    def cost(*args):
        return Policy.cost_model(*args).rule.cost(BIG)

    assert cost("npu2", "bfp16").npu < cost("npu2", "bfp16", "default").npu
    assert cost("npu2", "bfp16").npu < cost("npu2").npu
    batch = Policy.cost_model("npu1").rule.cost(dataclasses.replace(BIG, batch=3))
    assert batch.total == pytest.approx(3 * cost("npu1").total)
    assert batch.cpu == pytest.approx(3 * 2 * 256 * 768 * 2304 / LAPTOP.flops)


@pytest.mark.parametrize(
    "args", [("npu3",), ("npu1", "fp8"), ("npu1", "bfp16"), ("npu1", "bf16", "x")]
)
def test_the_policy_refuses_what_does_not_exist(laptop, args):
    with pytest.raises(ValueError, match="npu3|fp8|bfp16 needs npu2|power"):
        Policy.cost_model(*args)


def test_rates_are_measured_once_and_kept(laptop, tmp_path):
    for _ in range(2):
        assert _host.host() == LAPTOP
        _host._host.cache_clear()
    assert len(laptop) == 1
    (path,) = (tmp_path / "jax-xdna").iterdir()
    good = path.read_text()
    for bad in ("", good[:20], "[]", "{}", good.replace("jax ", "other "), '"machine"'):
        path.write_text(bad)
        before = len(laptop)
        assert _host.host() == LAPTOP and len(laptop) == before + 1
        assert path.read_text() == good and list(path.parent.iterdir()) == [path]
        _host._host.cache_clear()
    zero = json.loads(good) | {"flops": 0}
    path.write_text(json.dumps(zero))
    assert _host.host() == LAPTOP


def test_a_place_of_ones_own_and_one_that_cannot_be_written(laptop, tmp_path):
    Policy.cost_model("npu1", cache=tmp_path / "mine")
    assert [p.suffix for p in (tmp_path / "mine").iterdir()] == [".json"]
    (tmp_path / "file").write_text("")
    assert _host.host(tmp_path / "file" / "below") == LAPTOP and len(laptop) == 2


def test_measured_rates_also_while_jax_traces():
    rates = []
    jax.jit(lambda x: rates.append(_host.measure()) or x)(jnp.ones(()))
    assert all(1e8 < rate < 1e15 for rate in dataclasses.astuple(rates[0]))


def test_explain_shows_the_predictions(laptop, capsys):
    x = jax.ShapeDtypeStruct((256, 768), jnp.float32)
    w = jax.ShapeDtypeStruct((768, 2304), jnp.float32)

    def f(x, w):
        return (x @ w).astype(jnp.float16)[:4] @ w.T.astype(jnp.float16)

    policy = Policy.cost_model("npu1")
    big, half = jax_xdna.explain(f, x, w, policy=policy)
    head, _, first, second, _ = capsys.readouterr().out.splitlines()
    assert (
        head.split()[-7:]
        == ["CPU", "ms", "NPU", "ms", "FLOP/B", "bound", "useful", "on", "why"][-7:]
    )
    assert big.cost == policy.rule.cost(BIG) and half.cost is None
    assert big.offloaded and not half.offloaded
    figures = (f"{1e3 * big.cost.cpu:.3g}", f"{1e3 * big.cost.total:.3g}", big.cost.bound, "1.00")
    assert set(figures) <= set(first.split()) and second.split().count("-") == 5
    (row,) = jax_xdna.explain(lambda x: x @ x.T, x, print=False)
    assert row.cost is None


def test_the_step_of_the_command_is_the_step_of_gpt2(laptop, tmp_path, capsys):
    """All 147 products, in one table, and the array's time as the plan's own."""
    png = tmp_path / "roof.png"
    shape = ["--model", "gpt2", "--batch", "4", "--seq", "64"]
    assert _predict.main([*shape, "--arch", "npu1", "--png", str(png)]) == 0
    out = capsys.readouterr().out
    tile = _ffi.best_tile("npu1", gpt2_step(256))
    array = sum(
        _ffi.plan("npu1", m, k, n, "bf16", tile)["seconds"]["total"] * calls
        for m, k, n, calls in gpt2_step(256)
    )
    assert f"NPU: 147 products, 190 GFLOP; array {1e3 * array:.1f} ms" in out
    assert "CPU: 72 products" in out and "145 GFLOP/s end to end" in out
    assert "arXiv 2512.13282, table 2" in out
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt5"], "--model is 'gpt5'; it must be one of tiny"),
        (["--model", "tiny", "--seq", "129"], "--seq is 129; tiny takes 1 to 128"),
        (["--batch", "0"], "--batch is 0"),
        (["--numerics", "bfp16"], "bfp16 needs npu2"),
    ],
)
def test_the_command_names_what_is_wrong(laptop, capsys, flags, message):
    assert _predict.main(["--model", "tiny", "--arch", "npu1", *flags]) == 1
    assert message in capsys.readouterr().err


def test_nothing_to_gain_is_said_too(laptop, tmp_path, capsys):
    png = tmp_path / "roof.png"
    flags = ["--batch", "1", "--seq", "8", "--arch", "npu2", "--png", str(png)]
    assert _predict.main(["--model", "tiny", *flags]) == 0
    out = capsys.readouterr().out
    assert png.exists()
    assert "CPU: " in out and "NPU: " not in out and "Constants" in out


def test_the_fine_tuners_flag(laptop):
    policy = parse_policy("cost-model:npu2")
    assert repr(policy) == "Policy.cost_model(npu2, bf16, turbo)"
    for text in ("cost-model", "cost-model:", "cost-model:npu3"):
        with pytest.raises(UserError, match="cost-model:npu1, cost-model:npu2"):
            parse_policy(text)
