"""The time model against published measurements, and the constants that come from them."""

import pytest

from benchmarks import cost_model
from jax_xdna import _ffi


@pytest.fixture(scope="module")
def results():
    return {result.series: result for result in cost_model.evaluate(cost_model.read())}


def test_median_error_of_rows_it_was_not_fitted_to(results):
    tested = [pair for result in results.values() for pair in result.tested]
    assert len(tested) > 50
    assert cost_model.median(tested) <= 0.15


def test_no_product_is_fitted_and_tested(results):
    rows = cost_model.read()
    assert sum(len(r.fitted) + len(r.tested) for r in results.values()) == len(rows)
    for result in results.values():
        fitted, tested = ({row.name for row, _ in half} for half in (result.fitted, result.tested))
        assert not fitted & tested
        # Three rates are never fitted to fewer products.
        assert (len(fitted) >= 3) == bool(result.rates)


@pytest.mark.parametrize(
    ("arch", "numerics", "series"),
    [
        ("npu1", "bf16", "flm.GEMM, npu1, README"),
        ("npu2", "bfp16", "flm.GEMM, npu2, Krackan CI, default"),
        ("npu2", "bf16", "iron.operators.GEMM, npu2, Krackan CI, default"),
    ],
)
def test_the_default_power_mode_has_the_fitted_rates(results, arch, numerics, series):
    constants = _ffi.model_constants(arch, numerics, "default")
    names = ["macs_per_cycle", "dram_bandwidth", "dispatch"]
    if (arch, numerics) == ("npu2", "bf16"):
        del names[1:]  # The exact datapath has its own kernel, the rest is the machine's.
    rates = results[series].rates[: len(names)]
    assert rates == pytest.approx([constants[n][0] for n in names], rel=0.01)


def test_power_modes_name_their_sources_and_reach_the_plan():
    for arch, numerics in (("npu1", "bf16"), ("npu2", "bf16"), ("npu2", "bfp16")):
        for power in ("turbo", "default"):
            constants = _ffi.model_constants(arch, numerics, power)
            assert all(value > 0 and len(source) > 10 for value, source in constants.values())
            seconds = _ffi.plan(arch, 256, 768, 3072, numerics, power=power)["seconds"]
            assert seconds["dispatch"] == constants["dispatch"][0]
    modes = [
        _ffi.model_constants("npu1", "bf16", p)["macs_per_cycle"][0] for p in ("default", "turbo")
    ]
    assert modes[0] < modes[1]
    with pytest.raises(ValueError, match='power must be "turbo" or "default", got "eco"'):
        _ffi.model_constants("npu1", "bf16", "eco")


def test_a_foreign_design_is_predicted_as_our_own_is():
    """The one model behind a plan's seconds and `predict_design`: the same product, both ways."""
    plan = _ffi.plan("npu1", 256, 768, 2304, "bf16", (64, 64, 48, 2))
    i, kk, j = plan["tiles"]
    a, b, c = plan["buffer_bytes"]
    names = ("clock", "dram_bandwidth", "dispatch", "macs_per_cycle")
    seconds = _ffi.predict_design(
        tiles=(i, kk, j),
        tile=plan["tile"],
        array=(4, 4),
        items=(2.0, 4.0),
        bytes=(a * j, b * i, c),
        rates=tuple(_ffi.model_constants("npu1")[name][0] for name in names),
        rounds=False,
    )
    for part in ("dispatch", "compute", "dram", "lanes"):
        assert seconds[part] == pytest.approx(plan["seconds"][part])
