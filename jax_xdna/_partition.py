"""How a GEMM is cut over a device mesh: its Shardy rule and what each shard computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from . import _jax_compat as compat
from ._shapes import Ranks

# What a GEMM is, beyond its operands: the primitive's parameters.
Kernel = Callable[..., jax.Array]
Axes = tuple[str, ...]


# Dimensions stay apart up to the call: merged, a sharded inner one would be gathered.
_BATCH, _M, _K, _N = "ghijopqrlJxXz", "mMsStTuUdDeEF", "kKvVwWyYPQRLZ", "nNaAbBcCGHIOf"


class Factors(NamedTuple):
    """Dimension letters of a, b and c, and those of the batch, M, K and N that they consist of."""

    a: str
    b: str
    c: str
    batch: str
    m: str
    k: str
    n: str


@functools.cache
def factors(layout: str, a_ndim: int, b_ndim: int, ranks: Ranks = Ranks()) -> Factors:  # noqa: B008
    """The letters of a product whose operands have these ranks."""
    m, k, n = _M[: ranks.m], _K[: ranks.k], _N[: ranks.n]
    a_batch, b_batch = _BATCH[: a_ndim - len(m + k)], _BATCH[: b_ndim - len(k + n)]
    a = a_batch + (m + k if layout[0] == "N" else k + m)
    b = b_batch + (k + n if layout[1] == "N" else n + k)
    batch = max(a_batch, b_batch, key=len)
    return Factors(a, b, batch + m + n, batch, m, k, n)


def _axes(entry: Any) -> Axes:
    if entry is None or entry is compat.PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def assign_axes(letters: Factors, a_spec: Any, b_spec: Any) -> dict[str, Axes]:
    """Mesh axes of each letter, from the operands' specs; no axis is used twice.

    Where the operands disagree the left one wins, and an output dimension wins over K.
    """
    wanted: dict[str, list[Axes]] = {letter: [] for letter in letters.c + letters.k}
    for word, spec in ((letters.a, a_spec), (letters.b, b_spec)):
        for letter, entry in zip(word, tuple(spec), strict=False):  # a spec may be shorter
            wanted[letter].append(_axes(entry))
    taken: set[str] = set()
    chosen: dict[str, Axes] = {}
    for letter in wanted:
        axes = next((x for x in wanted[letter] if x and not taken & set(x)), ())
        taken |= set(axes)
        chosen[letter] = axes
    return chosen


def spec_of(word: str, axes: dict[str, Axes]) -> Any:
    """The partition spec of an array with these dimension letters."""
    entries = (axes[letter] for letter in word)
    return compat.PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in entries))


def result_spec(letters: Factors, a_spec: Any, b_spec: Any) -> Any:
    """The partition spec of the product, with K summed over its axes."""
    return spec_of(letters.c, assign_axes(letters, a_spec, b_spec))


def _narrow(c: jax.Array, dtype: np.dtype[Any], rounding: str) -> jax.Array:
    """Rounds a float32 sum to `dtype` as the device would."""
    narrow = c.astype(dtype)
    if rounding == "floor" and dtype != c.dtype:
        below = jnp.nextafter(narrow, jnp.array(-jnp.inf, dtype))
        narrow = jnp.where(narrow.astype(c.dtype) > c, below, narrow)
    return narrow


@functools.cache
def partitioned(
    kernel: Kernel,
    layout: str,
    ranks: Ranks,
    a_ndim: int,
    b_ndim: int,
    out_dtype: np.dtype[Any],
    numerics: str,
    rounding: str,
    device: str,
) -> Kernel:
    """`kernel` with these attributes as a function of (a, b) that the partitioner can cut.

    Batch, M and N may be sharded freely. With K sharded every shard sums its part in float32, the
    parts are added over the mesh (`psum`) and rounded once: the sum is then no longer in order of
    k, so its last bits depend on the number of shards.
    """
    attributes = {"numerics": numerics, "rounding": rounding, "device": device}

    def whole(a: jax.Array, b: jax.Array) -> jax.Array:
        return kernel(a, b, layout=layout, ranks=ranks, out_dtype=out_dtype, **attributes)

    letters = factors(layout, a_ndim, b_ndim, ranks)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        a, b = operands
        axes = assign_axes(letters, a.sharding.spec, b.sharding.spec)
        mesh = a.sharding.mesh
        for letter in letters.k:
            shards = math.prod(mesh.shape[axis] for axis in axes[letter])
            if a.shape[letters.a.index(letter)] % shards:
                # Uneven shards are padded with values nobody defined, and a sum would take them in.
                axes[letter] = ()
        summed = tuple(axis for letter in letters.k for axis in axes[letter])

        def shard(a: jax.Array, b: jax.Array) -> jax.Array:
            with compat.without_mesh():
                if not summed:
                    return whole(a, b)
                wide = np.dtype(np.float32)
                part = kernel(a, b, layout=layout, ranks=ranks, out_dtype=wide, **attributes)
                return _narrow(compat.psum(part, summed), out_dtype, rounding)

        def sharding(word: str) -> NamedSharding:
            return NamedSharding(mesh, spec_of(word, axes))

        return mesh, shard, sharding(letters.c), (sharding(letters.a), sharding(letters.b))

    cut: Any = compat.custom_partitioning(whole)
    cut.def_partition(
        partition=partition,
        sharding_rule=f"{' '.join(letters.a)}, {' '.join(letters.b)} -> {' '.join(letters.c)}",
        reduction_factors=tuple(letters.k),
    )
    result: Kernel = cut
    return result
