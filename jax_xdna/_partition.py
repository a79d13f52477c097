"""How a GEMM is cut over a device mesh: its Shardy rule and what each shard computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from . import _jax_compat as compat

# What a GEMM is, beyond its operands: the primitive's parameters.
Kernel = Callable[..., jax.Array]
Axes = tuple[str, ...]


# Batch dimensions stay apart up to the call: merged, a sharded inner one would be gathered.
_BATCH = "ghijopqrstuvwyzabcdef"


def factors(layout: str, a_ndim: int, b_ndim: int) -> tuple[str, str, str]:
    """Dimension letters of a, b and c: m, n, k, and others for the batch."""
    a = _BATCH[: a_ndim - 2] + ("mk" if layout[0] == "N" else "km")
    b = _BATCH[: b_ndim - 2] + ("kn" if layout[1] == "N" else "nk")
    return a, b, _BATCH[: max(a_ndim, b_ndim) - 2] + "mn"


def _axes(entry: Any) -> Axes:
    if entry is None or entry is compat.PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def assign_axes(layout: str, a_spec: Any, b_spec: Any, a_ndim: int, b_ndim: int) -> dict[str, Axes]:
    """Mesh axes of each letter, from the operands' specs; no axis is used twice.

    Where the operands disagree the left one wins, and an output dimension wins over K.
    """
    a, b, c = factors(layout, a_ndim, b_ndim)
    wanted: dict[str, list[Axes]] = {letter: [] for letter in c + "k"}
    for letters, spec in ((a, a_spec), (b, b_spec)):
        for letter, entry in zip(letters, tuple(spec), strict=False):  # a spec may be shorter
            wanted[letter].append(_axes(entry))
    taken: set[str] = set()
    chosen: dict[str, Axes] = {}
    for letter in wanted:
        axes = next((x for x in wanted[letter] if x and not taken & set(x)), ())
        taken |= set(axes)
        chosen[letter] = axes
    return chosen


def spec_of(letters: str, axes: dict[str, Axes]) -> Any:
    """The partition spec of an array with these dimension letters."""
    entries = (axes[letter] for letter in letters)
    return compat.PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in entries))


def result_spec(layout: str, a_spec: Any, b_spec: Any, a_ndim: int, b_ndim: int) -> Any:
    """The partition spec of the product, with K summed over its axes."""
    axes = assign_axes(layout, a_spec, b_spec, a_ndim, b_ndim)
    return spec_of(factors(layout, a_ndim, b_ndim)[2], axes)


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
        return kernel(a, b, layout=layout, out_dtype=out_dtype, **attributes)

    a_letters, b_letters, c_letters = factors(layout, a_ndim, b_ndim)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        a, b = operands
        axes = assign_axes(layout, a.sharding.spec, b.sharding.spec, a_ndim, b_ndim)
        mesh = a.sharding.mesh
        shards = int(np.prod([mesh.shape[axis] for axis in axes["k"]], dtype=int))
        if a.shape[a_letters.index("k")] % shards:
            # Uneven shards are padded with values nobody defined, and a sum would take them in.
            axes["k"] = ()

        def shard(a: jax.Array, b: jax.Array) -> jax.Array:
            with compat.without_mesh():
                if not axes["k"]:
                    return whole(a, b)
                wide = np.dtype(np.float32)
                part = kernel(a, b, layout=layout, out_dtype=wide, **attributes)
                return _narrow(compat.psum(part, axes["k"]), out_dtype, rounding)

        def sharding(letters: str) -> NamedSharding:
            return NamedSharding(mesh, spec_of(letters, axes))

        return mesh, shard, sharding(c_letters), (sharding(a_letters), sharding(b_letters))

    cut: Any = compat.custom_partitioning(whole)
    cut.def_partition(
        partition=partition,
        sharding_rule=f"{' '.join(a_letters)}, {' '.join(b_letters)} -> {' '.join(c_letters)}",
        reduction_factors=("k",),
    )
    result: Kernel = cut
    return result
