"""The packed operands of a plan and its result, in NumPy: slow, independent of the C++ packer."""

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


def _padded(x: Array, rows: int, cols: int) -> Array:
    """x as bfloat16 bits in a (rows, cols) array of zeros."""
    out = np.zeros((rows, cols), np.uint16)
    out[: x.shape[0], : x.shape[1]] = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    return out


def pack(plan: dict[str, Any], a: Array, b: Array) -> tuple[Array, Array]:
    """The buffers A and B of the plan, one-dimensional uint16.

    a is (m, k), b (k, n), float32 or bfloat16; float32 is rounded to nearest even. The plan is what
    `jax_xdna._ffi.plan` gives.
    """
    left, right = (b.T, a.T) if plan["transposed"] else (a, b)
    rows, depth, cols = plan["padded"]
    tile_m, tile_k, tile_n, _ = plan["tile"]
    r, s, t = plan["micro_tile"]
    across = plan["columns"]
    packed_a = (
        _padded(left, rows, depth)
        .reshape(-1, 4, tile_m // r, r, depth // tile_k, tile_k // s, s)
        .transpose(1, 0, 4, 2, 5, 3, 6)  # core row, i, kk, then the tile's micro-tiles
    )
    packed_b = (
        _padded(right, depth, cols)
        .reshape(depth // tile_k, tile_k // s, s, -1, across, tile_n // t, t)
        .transpose(4, 3, 0, 1, 5, 2, 6)  # column, j, kk, then the tile's micro-tiles
    )
    return packed_a.ravel(), packed_b.ravel()


def unpack(plan: dict[str, Any], c: Array) -> Array:
    """The (m, n) product, float32 or bfloat16, from the bytes of the plan's buffer C."""
    rows, _, cols = plan["padded"]
    tile_m, _, tile_n, _ = plan["tile"]
    r, _, t = plan["micro_tile"]
    i, _, j = plan["tiles"]
    outer, inner = (j, i) if plan["columns_outer"] else (i, j)
    dtype = np.float32 if plan["result"] == "f32" else ml_dtypes.bfloat16
    tiles = c.view(dtype).reshape(plan["columns"], outer, inner, 4, tile_m // r, tile_n // t, r, t)
    if plan["columns_outer"]:
        tiles = tiles.swapaxes(1, 2)
    product = tiles.transpose(1, 3, 4, 6, 2, 0, 5, 7).reshape(rows, cols)
    if plan["transposed"]:
        product = product.T
    return product[: plan["m"], : plan["n"]]
