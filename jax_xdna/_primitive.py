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
from ._shapes import LAYOUTS, layout_of

TARGET = "jax_xdna_gemm"
DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
NUMERICS = ("bf16", "bfp16")
ROUNDINGS = ("nearest", "floor")

gemm_p: Any = compat.Primitive(TARGET)

# gemm or something with its signature: (a, b, layout=…, out_dtype=…, **mode) → c
GemmFunction = Callable[..., jax.Array]


def gemm(
    a: jax.Array,
    b: jax.Array,
    *,
    layout: str,
    out_dtype: Any,
    numerics: str,
    rounding: str,
    device: str,
) -> jax.Array:
    """C = A · B on `device`, or one such product per batch element.

    a is (…, M, K) in layout N·, (…, K, M) in layout T·; b is (…, K, N) in layout ·N, (…, N, K) in
    layout ·T; both float32 or bfloat16. Leading dimensions are the batch; an operand of rank 2 is
    shared by the batch of the other. Returns (…, M, N) in `out_dtype`.
    """
    a, b = compat.match_varying(a, b)
    c: jax.Array = gemm_p.bind(
        a,
        b,
        layout=layout,
        out_dtype=np.dtype(out_dtype),
        numerics=numerics,
        rounding=rounding,
        device=device,
    )
    return c


# ---- value ----


def _abstract_eval(
    a: Any, b: Any, *, layout: str, out_dtype: np.dtype[Any], numerics: str, rounding: str, **_: Any
) -> jax.core.ShapedArray:
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in DTYPES:
            raise TypeError(f"{TARGET}: {name} is {operand.dtype}; it must be float32 or bfloat16")
        if operand.ndim < 2:
            raise ValueError(
                f"{TARGET}: {name} has shape {operand.shape}; it must have rank 2, or more with "
                "a leading batch"
            )
    if a.ndim != b.ndim and 2 not in (a.ndim, b.ndim):
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
    letters = _partition.factors(layout, a.ndim, b.ndim)
    sizes: dict[str, int] = {}
    for letter, size in zip(letters[0] + letters[1], (*a.shape, *b.shape), strict=True):
        if sizes.setdefault(letter, size) != size:
            what = "K" if letter == "k" else "the batch size"
            raise ValueError(
                f"{TARGET}: {what} of a and b differ, {sizes[letter]} and {size}; a has shape "
                f"{a.shape} and b {b.shape} in layout {layout}"
            )

    def spec(a_spec: Any, b_spec: Any) -> Any:
        return _partition.result_spec(layout, a_spec, b_spec, a.ndim, b.ndim)

    return compat.result_aval(a, b, tuple(sizes[x] for x in letters[2]), out_dtype, spec)


def _ffi_call(a: jax.Array, b: jax.Array, *, layout: str, out_dtype: Any, **mode: str) -> Any:
    a_letters, b_letters, c_letters = _partition.factors(layout, a.ndim, b.ndim)
    sizes = dict(zip(a_letters + b_letters, (*a.shape, *b.shape), strict=True))
    shape = tuple(sizes[letter] for letter in c_letters)
    batch = (math.prod(shape[:-2]),) if len(shape) > 2 else ()
    # No side effect: the call may be removed, merged and recomputed like any dot.
    result = compat.ShapeDtypeStruct((*batch, *shape[-2:]), out_dtype)
    call: Any = jax.ffi.ffi_call(TARGET, result)
    # The device knows one batch dimension; nothing moves.
    a, b = (compat.reshape(x, (*batch, *x.shape[-2:])) if x.ndim > 3 else x for x in (a, b))
    c = call(a, b, layout=layout, **mode)
    return c.reshape(shape) if len(shape) > 3 else c


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


def _fold_k(x: jax.Array, *, depth_first: bool) -> jax.Array:
    """(batch…, …) with one dimension to sum over → that dimension and the batch as one K."""
    batch, (rows, columns) = math.prod(x.shape[:-2]), x.shape[-2:]
    if depth_first:  # (batch, K, other) → (batch·K, other), free
        return x.reshape(batch * rows, columns)
    x = x if x.ndim == 3 else x.reshape(batch, rows, columns)
    return jnp.moveaxis(x, 0, 1).reshape(rows, batch * columns)


def lhs_cotangent(
    gemm: GemmFunction, c: jax.Array, b: jax.Array, a_ndim: int, layout: str, **params: Any
) -> jax.Array:
    """The cotangent of a, stored as a is: dC · Bᵀ, summed over the batch when a has none."""
    x, y = layout[0], layout[1]
    if a_ndim == 2 and c.ndim > 2:
        c, b = _fold_k(c, depth_first=False), _fold_k(b, depth_first=y == "T")
    if x == "N":
        return gemm(c, b, layout=layout_of("N", _flip(y)), **params)
    return gemm(b, c, layout=layout_of(y, "T"), **params)


def rhs_cotangent(
    gemm: GemmFunction, c: jax.Array, a: jax.Array, b_ndim: int, layout: str, **params: Any
) -> jax.Array:
    """The cotangent of b, stored as b is: Aᵀ · dC, summed over the batch when b has none."""
    x, y = layout[0], layout[1]
    if b_ndim == 2 and c.ndim > 2:
        c, a = _fold_k(c, depth_first=True), _fold_k(a, depth_first=x == "N")
    if y == "N":
        return gemm(a, c, layout=layout_of(_flip(x), "N"), **params)
    return gemm(c, a, layout=layout_of("T", x), **params)


def _transpose_lhs(c: Any, a: Any, b: Any, *, layout: str, out_dtype: Any, **mode: str) -> Any:
    aval = a.aval
    out = lhs_cotangent(gemm, c, b, aval.ndim, layout, out_dtype=aval.dtype, **mode)
    return compat.with_type(out, aval)


def _transpose_rhs(c: Any, a: Any, b: Any, *, layout: str, out_dtype: Any, **mode: str) -> Any:
    aval = b.aval
    out = rhs_cotangent(gemm, c, a, aval.ndim, layout, out_dtype=aval.dtype, **mode)
    return compat.with_type(out, aval)


compat.defbilinear(gemm_p, _transpose_lhs, _transpose_rhs)


# ---- vmap ----


def _batch(args: Any, dims: Any, *, layout: str, **params: Any) -> tuple[jax.Array, int]:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, layout=layout, **params)

    return batch_product(product, layout, *args, *dims)


batching.primitive_batchers[gemm_p] = _batch
