"""How `vmap` of a GEMM becomes one GEMM: the new axis is one more of M, N or the batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ._shapes import Ranks

# (a, b, ranks) → c with everything else fixed.
Product = Callable[[jax.Array, jax.Array, Ranks], jax.Array]


def batch_product(
    product: Product,
    layout: str,
    ranks: Ranks,
    a: jax.Array,
    b: jax.Array,
    a_dim: int | None,
    b_dim: int | None,
) -> tuple[jax.Array, int]:
    """Applies `product` to operands with one more axis at `a_dim` / `b_dim` (None: no such axis).

    Returns the result and the position of the new axis in it. Every case is one product:

    - only a has it: it becomes one more dimension of M, or of the batch that shares b.
    - only b has it: it becomes one more dimension of the batch that shares a, or of N.
    - both have it: it becomes the outermost dimension of the batch.
    """
    m, k, n = ranks
    a_batch = a.ndim - (a_dim is not None) - m - k
    b_batch = b.ndim - (b_dim is not None) - k - n
    if a_dim is not None and b_dim is not None:
        a, b = jnp.moveaxis(a, a_dim, 0), jnp.moveaxis(b, b_dim, 0)
        if b_batch == 0 and layout[0] == "N":
            # b is the same for the inner batch of a, which then is only more rows.
            return product(a, b, Ranks(m + a_batch, k, n)), 0
        lead = max(a.shape[: 1 + a_batch], b.shape[: 1 + b_batch], key=len)
        return product(_spread(a, 1 + a_batch, lead), _spread(b, 1 + b_batch, lead), ranks), 0
    batch = max(a_batch, b_batch)
    if a_dim is not None:
        if b_batch == 0 and a_dim <= a_batch and (a_batch > 0 or layout[0] == "T"):
            return product(a, b, ranks), a_dim
        # Next to the dimensions of M, wherever the layout stores them.
        first = a_batch + (0 if layout[0] == "N" else k)
        if not first <= a_dim <= first + m:
            a, a_dim = jnp.moveaxis(a, a_dim, first), first
        return product(a, b, Ranks(m + 1, k, n)), batch + a_dim - first
    assert b_dim is not None
    if a_batch == 0 and b_dim <= b_batch:
        return product(a, b, ranks), b_dim
    if b_batch == 0 and b_dim == 0 and layout[0] == "N":
        # The batch of a is only more rows for every b.
        return product(a, b, Ranks(m + a_batch, k, n)), 0
    first = b_batch + (k if layout[1] == "N" else 0)
    if not first <= b_dim <= first + n:
        b, b_dim = jnp.moveaxis(b, b_dim, first), first
    return product(a, b, Ranks(m, k, n + 1)), batch + m + b_dim - first


def _spread(x: jax.Array, batch: int, lead: tuple[int, ...]) -> jax.Array:
    """`x` with batch `lead`, of which it may have the first axis only."""
    if batch == len(lead):
        return x
    inner = (1,) * (len(lead) - 1)
    return jnp.broadcast_to(x.reshape(lead[0], *inner, *x.shape[1:]), (*lead, *x.shape[1:]))
