"""Packing into tile order and back, bit for bit against NumPy."""

import ml_dtypes
import numpy as np
import pytest

from benchmarks.packing import aligned, in_tiles
from jax_xdna import _ffi

OPERANDS = [(64, 64, 4, 8), (64, 48, 8, 4), (64, 48, 8, 8), (64, 64, 1, 8), (8, 24, 4, 8)]


def special(shape):
    """Random numbers with every kind of float among them."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    odd = [np.nan, -np.nan, np.inf, -0.0, 1e-40, 3.4e38, 1.00390625, 1.01171875]
    x.flat[:: max(1, x.size // 40)][: len(odd)] = odd[: x.size]
    return x


@pytest.mark.parametrize("shape", [(128, 192), (100, 77), (3, 5), (1, 200)])
@pytest.mark.parametrize("tile", OPERANDS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_operands(shape, tile, transposed, dtype):
    matrix = special(shape).astype(dtype)
    bits = matrix.astype(ml_dtypes.bfloat16).view(np.uint16)
    want = in_tiles(bits, tile)
    packed = aligned(want.size, np.uint16)
    packed[:] = 7
    source = np.ascontiguousarray(matrix.T if transposed else matrix)
    if dtype != np.float32:
        source = source.view(np.uint16)
    down = -(-shape[0] // tile[0])
    for piece in [(0, down // 2), (down // 2, down)]:
        _ffi.pack_tiles(source, packed, tile, transposed=transposed, rows_of_tiles=piece)
    # A NaN's payload is unspecified.
    got, expected = (x.view(ml_dtypes.bfloat16).astype(np.float32) for x in (packed, want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(packed[~np.isnan(got)], want[~np.isnan(got)])


@pytest.mark.parametrize("shape", [(128, 192), (100, 77), (3, 5)])
@pytest.mark.parametrize("tile", [(64, 48, 4, 4), (64, 48, 4, 8), (64, 48, 8, 8)], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_results(shape, tile, stream):
    matrix = special(shape)
    rows = np.full(shape, 7, np.float32)
    _ffi.unpack_tiles(
        in_tiles(matrix, tile), rows, tile, stream=stream, rows_of_tiles=(0, -(-shape[0] // 64))
    )
    np.testing.assert_array_equal(rows.view(np.uint32), matrix.view(np.uint32))


def test_errors_name_the_size():
    source, packed = np.zeros((64, 64), np.float32), aligned(64 * 64, np.uint16)

    def pack(tile=(64, 64, 4, 8), source=source, packed=packed, piece=(0, 1)):
        _ffi.pack_tiles(source, packed, tile, transposed=False, rows_of_tiles=piece)

    with pytest.raises(ValueError, match="micro_columns is 16; it must be 4 or 8"):
        pack((64, 64, 4, 16))
    with pytest.raises(ValueError, match="micro_rows is 2; it must be 1, 4 or 8"):
        pack((64, 64, 2, 8))
    with pytest.raises(ValueError, match="rows is 12; it must be a positive multiple of 8"):
        pack((12, 64, 4, 8))
    with pytest.raises(ValueError, match="has 4096 elements; its tiles take 8192"):
        pack(source=np.zeros((65, 64), np.float32))
    with pytest.raises(ValueError, match=r"rows_of_tiles is \(0, 2\); there are 1"):
        pack(piece=(0, 2))
    with pytest.raises(ValueError, match="float32, or uint16"):
        pack(source=np.zeros((64, 64), np.float64))
    with pytest.raises(ValueError, match="aligned to 64 bytes"):
        pack(packed=aligned(64 * 64 + 1, np.uint16)[1:])
    pack()


def test_kernel_rates_are_rates():
    peak, tile = _ffi.kernel_rates(2000)
    assert 1e7 < tile < 1e13 and 1e7 < peak < 1e13
