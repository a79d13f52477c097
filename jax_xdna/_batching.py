"""How `vmap` of a GEMM becomes one GEMM: fold the new axis into M, N or the batch."""

from __future__ import annotations

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

    - only a has it: it becomes rows of M. Free unless a is stored (K, M) with the axis outermost;
      then it becomes the batch and b is shared by it.
    - only b has it: it becomes the batch and a is shared by it, or it becomes columns of N.
    - both have it: it becomes (the outer part of) the batch.
    """
    if a_dim is not None and b_dim is not None:
        return _both(product, layout, jnp.moveaxis(a, a_dim, 0), jnp.moveaxis(b, b_dim, 0)), 0
    if a_dim is not None:
        return _left(product, layout, a, b, a_dim)
    assert b_dim is not None
    return _right(product, layout, a, b, b_dim)


def _both(product: Product, layout: str, a: jax.Array, b: jax.Array) -> jax.Array:
    size = a.shape[0]
    if a.ndim == b.ndim == 3:
        return product(a, b)
    if a.ndim == 4 and b.ndim == 4:
        return _unfold(product(_fold(a, 0), _fold(b, 0)), 0, size, a.shape[1])
    if a.ndim == 4 and layout[0] == "N":
        # b is the same for the inner batch, which then is only more rows.
        return _unfold(product(_fold(a, 1), b), 1, a.shape[1], a.shape[2])
    inner = a.shape[1] if a.ndim == 4 else b.shape[1]
    if a.ndim == 3:
        a = jnp.broadcast_to(a[:, None], (size, inner, *a.shape[1:]))
    else:
        b = jnp.broadcast_to(b[:, None], (size, inner, *b.shape[1:]))
    return _unfold(product(_fold(a, 0), _fold(b, 0)), 0, size, inner)


def _left(
    product: Product, layout: str, a: jax.Array, b: jax.Array, dim: int
) -> tuple[jax.Array, int]:
    size, batched = a.shape[dim], a.ndim == 4
    if batched and b.ndim == 2 and dim < 2:
        # Both axes are batch, in either order; b is shared by all of it.
        return _unfold(product(_fold(a, 0), b), 0, a.shape[0], a.shape[1]), dim
    if not batched and b.ndim == 2 and dim == 0 and layout[0] == "T":
        return product(a, b), 0
    # Rows of M: the axis goes right before or after M, wherever the layout stores it.
    m_axis = (a.ndim - 3) + (0 if layout[0] == "N" else 1)  # of M without the new axis
    if dim not in (m_axis, m_axis + 1):
        a, dim = jnp.moveaxis(a, dim, m_axis), m_axis
    outer, inner = a.shape[m_axis], a.shape[m_axis + 1]
    c = product(_fold(a, m_axis), b)
    rows = c.ndim - 2
    assert size in (outer, inner)
    return _unfold(c, rows, outer, inner), rows + (dim - m_axis)


def _right(
    product: Product, layout: str, a: jax.Array, b: jax.Array, dim: int
) -> tuple[jax.Array, int]:
    batched = b.ndim == 4
    if a.ndim == 2 and batched and dim < 2:
        return _unfold(product(a, _fold(b, 0)), 0, b.shape[0], b.shape[1]), dim
    if a.ndim == 2 and not batched and dim == 0:
        return product(a, b), 0
    if a.ndim == 3 and not batched and dim == 0 and layout[0] == "N":
        # a's own batch is only more rows for every b.
        return _unfold(product(_fold(a, 0), b), 1, a.shape[0], a.shape[1]), 0
    # Columns of N, like rows of M in _left.
    n_axis = (b.ndim - 3) + (1 if layout[1] == "N" else 0)
    if dim not in (n_axis, n_axis + 1):
        b, dim = jnp.moveaxis(b, dim, n_axis), n_axis
    outer, inner = b.shape[n_axis], b.shape[n_axis + 1]
    c = product(a, _fold(b, n_axis))
    columns = c.ndim - 1
    return _unfold(c, columns, outer, inner), columns + (dim - n_axis)
