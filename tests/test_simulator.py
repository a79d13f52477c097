"""The instruction stream, executed on the simulated array, gives the emulated device's bits."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_xdna
from aie_kernels import packing, simulate
from aie_kernels._simulator import SimulationError, Simulator
from jax_xdna import _ffi

STREAMS = Path(__file__).parent / "data" / "streams"
LAYOUTS = {"NN": (1, 0), "NT": (1, 1), "TN": (0, 0)}  # contracted dimensions
TILES = [(16, 32, 16, 1), (16, 32, 16, 2), (32, 64, 48, 2), (64, 64, 48, 2), (64, 32, 96, 1)]


def same_bits(got, want):
    want = np.asarray(want)
    bits = {4: np.uint32, 2: np.uint16}[got.dtype.itemsize]
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("arch", "numerics"), [("npu1", "bf16"), ("npu2", "bf16"), ("npu2", "bfp16")]
)
def test_random_products(arch, numerics, layout):
    rng = np.random.default_rng([ord(c) for c in arch + numerics + layout])
    for _ in range(6):
        tile = TILES[rng.integers(len(TILES))]
        # Up to two macro-tiles each way, ragged; the smallest tiles get loops of many pushes.
        m, n = (int(rng.integers(1, 500)) for _ in range(2))
        k = int(rng.integers(1, 200))
        a = rng.standard_normal((m, k) if layout[0] == "N" else (k, m), np.float32)
        b = rng.standard_normal((k, n) if layout[1] == "N" else (n, k), np.float32)
        if rng.random() < 0.5:
            a = a.astype(ml_dtypes.bfloat16)
        result = "bf16" if rng.random() < 0.3 else "f32"
        plan = _ffi.plan(arch, m, k, n, numerics, tile, result, bool(rng.random() < 0.3))
        got, _ = simulate.simulate(
            plan, a if layout[0] == "N" else a.T, b if layout[1] == "N" else b.T
        )
        left, right = LAYOUTS[layout]
        want = jax_xdna.dot_general(
            a,
            b,
            (((left,), (right,)), ((), ())),
            preferred_element_type=np.float32 if result == "f32" else ml_dtypes.bfloat16,
            device="emulated",
            numerics=numerics,
        )
        same_bits(got, want)


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("npu1_4col_64x64x48", (64, 64, 48, 2)),
        ("npu1_4col_64x32x96", (64, 32, 96, 1)),
        ("npu2_8col_64x64x48", (64, 64, 48, 2)),
        ("npu2_8col_64x64x48_resident", (64, 64, 48, 2)),
    ],
)
def test_streams_made_by_the_real_tools(rng, name, tile):
    m, k, n = 256, 768, 2304
    plan = _ffi.plan(name[:4], m, k, n, "bf16", tile, "f32", name.endswith("resident"))
    plan["stream"] = (STREAMS / f"{name}_{m}x{k}x{n}.bin").read_bytes()
    a = rng.standard_normal((m, k), np.float32)
    b = rng.standard_normal((k, n), np.float32)
    got, report = simulate.simulate(plan, a, b)
    same_bits(got, jax.jit(lambda a, b: jax_xdna.dot(a, b, device="emulated"))(a, b))
    i, _, j = plan["tiles"]
    passes = j if plan["feed"] == "fifo" else 1
    assert report.bytes_read == 2 * (m * k * passes + k * n * i)
    assert report.bytes_written == 4 * m * n


def test_time_agrees_with_the_plan():
    """Two models of one array: cores and lanes of a long product within a tenth."""
    for arch, tile in (("npu1", TILES[3]), ("npu2", TILES[4])):
        plan = _ffi.plan(arch, 256, 512, 1536, "bf16", tile)
        a = np.zeros((256, 512), np.float32)
        b = np.zeros((512, 1536), np.float32)
        _, report = simulate.simulate(plan, a, b)
        seconds = plan["seconds"]
        predicted = max(seconds["compute"], seconds["lanes"]) + seconds["edges"]
        assert report.cycles / report.clock_hz == pytest.approx(predicted, rel=0.1)


def test_errors_reach_python():
    plan = _ffi.plan("npu1", 64, 32, 64, "bf16", (16, 32, 16, 2))
    a, b = packing.pack(plan, np.ones((64, 32), np.float32), np.ones((32, 64), np.float32))
    c = np.zeros(plan["buffer_bytes"][2], np.uint8)
    stream = np.frombuffer(plan["stream"], np.uint32)
    with pytest.raises(ValueError, match="word 3: the header says"):
        Simulator("npu1", "bf16", 16, 32, 16, 2).run(stream[:-1], a, b, c)
    with pytest.raises(SimulationError, match="of argument 0, which has"):
        Simulator("npu1", "bf16", 16, 32, 16, 2).run(stream, a[:-2], b, c)
    with pytest.raises(ValueError, match="arch must be 'npu1' or 'npu2', got 'npu3'"):
        Simulator("npu3", "bf16", 16, 32, 16, 2)
    with pytest.raises(ValueError, match="result must be 'f32' or 'bf16', got 'f16'"):
        Simulator("npu1", "bf16", 16, 32, 16, 2, "f16")
    with pytest.raises(ValueError, match="tile k 40: the kernel takes multiples of 32"):
        Simulator("npu1", "bf16", 16, 40, 16, 2)


def test_command_line(capsys):
    assert simulate.main(["--arch", "npu2", "100", "70", "200"]) == 0
    out = capsys.readouterr().out
    assert "npu2 bf16 to f32 100x70x200: tile" in out
    assert "column 7 row 5" in out
    assert "elements that differ from the emulated device: 0 of 20000" in out
    assert simulate.main(["--arch", "npu1", "--result", "bf16", "100", "70", "200"]) == 0
    assert "emulated device: 0 of 20000" in capsys.readouterr().out
    assert simulate.main(["--arch", "npu1", "0", "70", "200"]) == 1
    assert "M, K and N must be at least 1" in capsys.readouterr().err
