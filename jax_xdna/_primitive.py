"""The GEMM primitive `jax_xdna_gemm`: bilinear, with every rule a JAX transform asks for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from . import _jax_compat as compat
from . import _partition
from ._batching import batch_product
from ._shapes import LAYOUTS, Ranks, layout_of

TARGET = "jax_xdna_gemm"
DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
NUMERICS = ("bf16", "bfp16")
ROUNDINGS = ("nearest", "floor")

gemm_p: Any = compat.Primitive(TARGET)

# gemm or something with its signature: (a, b, layout=…, ranks=…, out_dtype=…, **mode) → c
GemmFunction = Callable[..., jax.Array]


def gemm(
    a: jax.Array,
    b: jax.Array,
    *,
    layout: str,
    ranks: Ranks = Ranks(),  # noqa: B008
    out_dtype: Any,
    numerics: str,
    rounding: str,
    device: str,
) -> jax.Array:
    """C = A · B on `device`, or one such product per batch element.

    a is (…, M, K) in layout N·, (…, K, M) in layout T·; b is (…, K, N) in layout ·N, (…, N, K) in
    layout ·T; both float32 or bfloat16. M, K and N each stand for as many dimensions as `ranks`
    says, leading dimensions are the batch; an operand without batch is shared by that of the
    other. Returns (…, M, N) in `out_dtype`.
    """
    a, b = compat.match_varying(a, b)
    c: jax.Array = gemm_p.bind(
        a,
        b,
        layout=layout,
        ranks=ranks,
        out_dtype=np.dtype(out_dtype),
        numerics=numerics,
        rounding=rounding,
        device=device,
    )
    return c


# ---- value ----


def _abstract_eval(
    a: Any,
    b: Any,
    *,
    layout: str,
    ranks: Ranks,
    out_dtype: np.dtype[Any],
    numerics: str,
    rounding: str,
    **_: Any,
) -> jax.core.ShapedArray:
    for name, operand, rank in (("a", a, ranks.m + ranks.k), ("b", b, ranks.k + ranks.n)):
        if operand.dtype not in DTYPES:
            raise TypeError(f"{TARGET}: {name} is {operand.dtype}; it must be float32 or bfloat16")
        if operand.ndim < rank:
            raise ValueError(
                f"{TARGET}: {name} has shape {operand.shape}; it must have rank {rank}, or more "
                "with a leading batch"
            )
    batches = a.ndim - ranks.m - ranks.k, b.ndim - ranks.k - ranks.n
    if 0 not in batches and batches[0] != batches[1]:
        raise ValueError(
            f"{TARGET}: a has shape {a.shape} and b {b.shape}; they must have the same batch, or "
            "one of them none"
        )
    if out_dtype not in DTYPES:
        raise TypeError(f"{TARGET}: out_dtype is {out_dtype}; it must be float32 or bfloat16")
    for attribute, value, choices in (
        ("layout", layout, LAYOUTS),
        ("numerics", numerics, NUMERICS),
        ("rounding", rounding, ROUNDINGS),
    ):
        if value not in choices:
            raise ValueError(f"{TARGET}: {attribute} is {value!r}; it must be one of {choices}")
    letters = _partition.factors(layout, a.ndim, b.ndim, ranks)
    sizes: dict[str, int] = {}
    for letter, size in zip(letters.a + letters.b, (*a.shape, *b.shape), strict=True):
        if sizes.setdefault(letter, size) != size:
            what = "K" if letter in letters.k else "the batch size"
            raise ValueError(
                f"{TARGET}: {what} of a and b differ, {sizes[letter]} and {size}; a has shape "
                f"{a.shape} and b {b.shape} in layout {layout}"
            )

    def spec(a_spec: Any, b_spec: Any) -> Any:
        return _partition.result_spec(letters, a_spec, b_spec)

    return compat.result_aval(a, b, tuple(sizes[x] for x in letters.c), out_dtype, spec)


def _ffi_call(
    a: jax.Array, b: jax.Array, *, layout: str, ranks: Ranks, out_dtype: Any, **mode: str
) -> Any:
    letters = _partition.factors(layout, a.ndim, b.ndim, ranks)
    sizes = dict(zip(letters.a + letters.b, (*a.shape, *b.shape), strict=True))
    groups = (letters.batch, letters.m, letters.k, letters.n)
    batch, m, k, n = (math.prod(sizes[letter] for letter in group) for group in groups)

    def merged(word: str, rows: int, columns: int) -> tuple[int, ...]:
        return (batch, rows, columns) if word[:1] in letters.batch else (rows, columns)

    # The device knows one dimension of each kind; nothing moves.
    a = compat.reshape(a, merged(letters.a, *((m, k) if layout[0] == "N" else (k, m))))
    b = compat.reshape(b, merged(letters.b, *((k, n) if layout[1] == "N" else (n, k))))
    # No side effect: the call may be removed, merged and recomputed like any dot.
    result = compat.ShapeDtypeStruct(merged(letters.c, m, n), out_dtype)
    call: Any = jax.ffi.ffi_call(TARGET, result)
    return call(a, b, layout=layout, **mode).reshape([sizes[letter] for letter in letters.c])


def _partitioned(a: jax.Array, b: jax.Array, **params: Any) -> jax.Array:
    return _partition.partitioned(_ffi_call, a_ndim=a.ndim, b_ndim=b.ndim, **params)(a, b)


@functools.cache
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(gemm_p.bind, **dict(params)))


def _impl(a: jax.Array, b: jax.Array, **params: Any) -> jax.Array:
    return _compiled(tuple(sorted(params.items())))(a, b)


gemm_p.def_impl(_impl)
gemm_p.def_abstract_eval(_abstract_eval)
compat.needs_devices(gemm_p)
mlir.register_lowering(gemm_p, mlir.lower_fun(_partitioned, multiple_results=False), platform="cpu")


# ---- derivative: the cotangents are GEMMs too, in the layout that fits the stored operands ----


def _flip(letter: str) -> str:
    return "T" if letter == "N" else "N"


def _depth(x: jax.Array, batch: int, rows: int, *, depth_first: bool) -> jax.Array:
    """`x`, its batch to be summed over too, with the batch before the dimensions of K."""
    # With K first nothing moves.
    return x if depth_first else jnp.moveaxis(x, range(batch), range(rows, rows + batch))


def lhs_cotangent(
    gemm: GemmFunction,
    c: jax.Array,
    b: jax.Array,
    a_ndim: int,
    layout: str,
    ranks: Ranks,
    **params: Any,
) -> jax.Array:
    """The cotangent of a, stored as a is: dC · Bᵀ, summed over the batch when a has none."""
    x, y = layout[0], layout[1]
    m, k, n = ranks
    batch = c.ndim - m - n
    if batch and a_ndim == m + k:
        c = _depth(c, batch, m, depth_first=False)
        b = _depth(b, batch, k, depth_first=y == "T")
        n += batch
    if x == "N":
        return gemm(c, b, layout=layout_of("N", _flip(y)), ranks=Ranks(m, n, k), **params)
    return gemm(b, c, layout=layout_of(y, "T"), ranks=Ranks(k, n, m), **params)


def rhs_cotangent(
    gemm: GemmFunction,
    c: jax.Array,
    a: jax.Array,
    b_ndim: int,
    layout: str,
    ranks: Ranks,
    **params: Any,
) -> jax.Array:
    """The cotangent of b, stored as b is: Aᵀ · dC, summed over the batch when b has none."""
    x, y = layout[0], layout[1]
    m, k, n = ranks
    batch = c.ndim - m - n
    if batch and b_ndim == k + n:
        c = _depth(c, batch, n, depth_first=True)
        a = _depth(a, batch, k, depth_first=x == "N")
        m += batch
    if y == "N":
        return gemm(a, c, layout=layout_of(_flip(x), "N"), ranks=Ranks(k, m, n), **params)
    return gemm(c, a, layout=layout_of("T", x), ranks=Ranks(n, m, k), **params)


def _transpose_lhs(c: Any, a: Any, b: Any, *, layout: str, out_dtype: Any, **params: Any) -> Any:
    aval = a.aval
    out = lhs_cotangent(gemm, c, b, aval.ndim, layout, out_dtype=aval.dtype, **params)
    return compat.with_type(out, aval)


def _transpose_rhs(c: Any, a: Any, b: Any, *, layout: str, out_dtype: Any, **params: Any) -> Any:
    aval = b.aval
    out = rhs_cotangent(gemm, c, a, aval.ndim, layout, out_dtype=aval.dtype, **params)
    return compat.with_type(out, aval)


compat.defbilinear(gemm_p, _transpose_lhs, _transpose_rhs)


# ---- vmap ----


def _batch(
    args: Any, where: Any, *, layout: str, ranks: Ranks, **params: Any
) -> tuple[jax.Array, int]:
    def product(a: jax.Array, b: jax.Array, ranks: Ranks) -> jax.Array:
        return gemm(a, b, layout=layout, ranks=ranks, **params)

    return batch_product(product, layout, ranks, *args, *where)


batching.primitive_batchers[gemm_p] = _batch
