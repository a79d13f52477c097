"""How `vmap` of a GEMM becomes one GEMM: fold the new axis into M, N or the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# (a, b) → c with everything but the operands fixed.
Product = Callable[[jax.Array, jax.Array], jax.Array]


def _fold(x: jax.Array, axis: int) -> jax.Array:
    """Merges `axis` with the one after it: a reshape that moves nothing."""
    shape = x.shape
    return x.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _unfold(x: jax.Array, axis: int, outer: int, inner: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], outer, inner, *x.shape[axis + 1 :])


def batch_product(
    product: Product, layout: str, a: jax.Array, b: jax.Array, a_dim: int | None, b_dim: int | None
) -> tuple[jax.Array, int]:
    """Applies `product` to operands with one more axis at `a_dim` / `b_dim` (None: no such axis).

    Returns the result and the position of the new axis in it. Every case is one product:

    - only a has it: it becomes rows of M, or one more axis of the batch that shares b.
    - only b has it: it becomes one more axis of the batch that shares a, or columns of N.
    - both have it: it becomes the outermost axis of the batch.
    """
    if a_dim is not None and b_dim is not None:
        return _both(product, layout, jnp.moveaxis(a, a_dim, 0), jnp.moveaxis(b, b_dim, 0)), 0
    if a_dim is not None:
        return _left(product, layout, a, b, a_dim)
    assert b_dim is not None
    return _right(product, layout, a, b, b_dim)


def _rows(product: Product, a: jax.Array, b: jax.Array, kept: int) -> jax.Array:
    """`product` with all but the first `kept` batch axes of a, stored (…, M, K), as rows of M."""
    rows = math.prod(a.shape[kept:-1])
    c = product(a.reshape(*a.shape[:kept], rows, a.shape[-1]), b)
    return c.reshape(*c.shape[:-2], *a.shape[kept:-1], c.shape[-1])


def _both(product: Product, layout: str, a: jax.Array, b: jax.Array) -> jax.Array:
    if a.ndim > b.ndim and layout[0] == "N":
        # b is the same for the inner batch, which then is only more rows.
        return _rows(product, a, b, 1)
    lead = max(a.shape[:-2], b.shape[:-2], key=len)
    a, b = (_spread(x, lead) for x in (a, b))
    return product(a, b)


def _spread(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """`x` with batch `lead`, of which it may have the first axis only."""
    if x.ndim == len(lead) + 2:
        return x
    inner = (1,) * (len(lead) - 1)
    return jnp.broadcast_to(x.reshape(lead[0], *inner, *x.shape[1:]), (*lead, *x.shape[1:]))


def _left(
    product: Product, layout: str, a: jax.Array, b: jax.Array, dim: int
) -> tuple[jax.Array, int]:
    if b.ndim == 2 and dim <= a.ndim - 3 and (a.ndim > 3 or layout[0] == "T"):
        return product(a, b), dim
    # Rows of M: the axis goes right before or after M, wherever the layout stores it.
    m_axis = (a.ndim - 3) + (0 if layout[0] == "N" else 1)  # of M without the new axis
    if dim not in (m_axis, m_axis + 1):
        a, dim = jnp.moveaxis(a, dim, m_axis), m_axis
    outer, inner = a.shape[m_axis], a.shape[m_axis + 1]
    c = product(_fold(a, m_axis), b)
    rows = c.ndim - 2
    return _unfold(c, rows, outer, inner), rows + (dim - m_axis)


def _right(
    product: Product, layout: str, a: jax.Array, b: jax.Array, dim: int
) -> tuple[jax.Array, int]:
    if a.ndim == 2 and dim <= b.ndim - 3:
        return product(a, b), dim
    if a.ndim > 2 and b.ndim == 3 and dim == 0 and layout[0] == "N":
        # a's own batch is only more rows for every b.
        return _rows(product, a, b, 0), 0
    # Columns of N, like rows of M in _left.
    n_axis = (b.ndim - 3) + (1 if layout[1] == "N" else 0)
    if dim not in (n_axis, n_axis + 1):
        b, dim = jnp.moveaxis(b, dim, n_axis), n_axis
    outer, inner = b.shape[n_axis], b.shape[n_axis + 1]
    c = product(a, _fold(b, n_axis))
    columns = c.ndim - 1
    return _unfold(c, columns, outer, inner), columns + (dim - n_axis)
