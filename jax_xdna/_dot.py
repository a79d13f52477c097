"""`dot` and `dot_general`: the GEMM primitive in the shapes JAX users know."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from . import _jax_compat as compat
from . import _primitive, _shapes
from ._mode import Mode, mode
from ._precision import too_precise


def _operand(name: str, value: ArrayLike, function: str) -> jax.Array:
    array = jnp.asarray(value)
    if array.dtype not in _primitive.DTYPES:
        raise TypeError(
            f"{function}: {name} is {array.dtype}; the device multiplies float32 and bfloat16. "
            "Convert it, or use jax.numpy.matmul, which keeps it on the CPU"
        )
    return array


def result_dtype(a: Any, b: Any, preferred: DTypeLike | None) -> np.dtype[Any]:
    """Result dtype by lax.dot_general's rule, for float32 and bfloat16 operands."""
    return jnp.promote_types(a, b) if preferred is None else jnp.dtype(preferred)


def _result_dtype(
    function: str, a: jax.Array, b: jax.Array, preferred: DTypeLike | None
) -> np.dtype[Any]:
    dtype = result_dtype(a.dtype, b.dtype, preferred)
    if dtype not in _primitive.DTYPES:
        raise TypeError(
            f"{function}: preferred_element_type is {dtype}; it must be float32 or bfloat16"
        )
    return dtype


def apply(
    product: _primitive.GemmFunction,
    plan: _shapes.Gemm,
    lhs: jax.Array,
    rhs: jax.Array,
    **params: Any,
) -> jax.Array:
    """`product` of `lhs` and `rhs` with the reshapes of `plan` around it."""
    a, b = (
        (x if o.permutation is None else x.transpose(o.permutation)).reshape(o.shape)
        for x, o in ((lhs, plan.lhs), (rhs, plan.rhs))
    )
    c = product(a, b, layout=plan.layout, ranks=plan.ranks, **params)
    return c.reshape(plan.out_shape)


# ---- the custom_vjp behind `dot`: its cotangents are products of the same kind, to any order ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _product(
    a: jax.Array, b: jax.Array, layout: str, ranks: _shapes.Ranks, out_dtype: Any, how: Mode
) -> jax.Array:
    return _primitive.gemm(a, b, layout=layout, ranks=ranks, out_dtype=out_dtype, **how._asdict())


def _product_fwd(
    a: jax.Array, b: jax.Array, layout: str, ranks: _shapes.Ranks, out_dtype: Any, how: Mode
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(a, b, layout, ranks, out_dtype, how), (a, b)


def _product_bwd(
    layout: str,
    ranks: _shapes.Ranks,
    out_dtype: Any,
    how: Mode,
    operands: tuple[jax.Array, jax.Array],
    c: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def again(
        x: jax.Array, y: jax.Array, *, layout: str, ranks: _shapes.Ranks, out_dtype: Any
    ) -> jax.Array:
        return _product(x, y, layout, ranks, out_dtype, how)

    a, b = operands
    return (
        _primitive.lhs_cotangent(again, c, b, a.ndim, layout, ranks, out_dtype=a.dtype),
        _primitive.rhs_cotangent(again, c, a, b.ndim, layout, ranks, out_dtype=b.dtype),
    )


_product.defvjp(_product_fwd, _product_bwd)


def dot(
    a: ArrayLike,
    b: ArrayLike,
    *,
    preferred_element_type: DTypeLike | None = None,
    device: str | None = None,
    numerics: str | None = None,
    rounding: str | None = None,
) -> jax.Array:
    """Matrix product on the NPU, with shapes as `jax.numpy.matmul` and gradients as `custom_vjp`.

    Operands are rounded once to bfloat16, products are added in float32 in order of k. On a mesh
    that shards K each device adds its part and a `psum` adds the parts, so the last bits then
    depend on the number of devices.

    Give a batch to `dot` itself: the gradient of `vmap(dot)` makes a cotangent per example for a
    shared operand and adds them, as for every custom_vjp function; `dot_general` makes one GEMM.

    Args:
      a: (…, M, K), or (K,). float32 or bfloat16.
      b: (…, K, N), or (K,). Its dtype may differ from a's.
      preferred_element_type: dtype of the result, float32 or bfloat16. By default bfloat16 when
        both operands are, else float32, as for `lax.dot_general`.
      device: a name from `jax_xdna.devices()`; default: see `jax_xdna.default_device`.
      numerics: "bf16" (default) or "bfp16", block floating point in groups of 8 along K.
      rounding: "nearest" (default, to even) or "floor", of every conversion.

    Returns:
      (…, M, N); a dimension is missing where an operand had rank 1. A batch of `a` alone becomes
      rows, a batch of `b` alone shares `a`; other batches broadcast.

    Raises:
      TypeError: an operand of another dtype; or forward-mode differentiation (`jax.jvp`,
        `jacfwd`, `hessian`), which a custom_vjp function does not have: use
        `jax_xdna.dot_general` for it. Reverse mode works to any order.
      ValueError: shapes that do not fit, an unknown device or mode.
    """
    x, y = _operand("a", a, "dot"), _operand("b", b, "dot")
    how = mode(device, numerics, rounding)
    out_dtype = _result_dtype("dot", x, y, preferred_element_type)
    plan = _shapes.matmul(x.shape, y.shape)
    if plan.lhs_broadcast is not None:
        x = jnp.broadcast_to(x, plan.lhs_broadcast)
    if plan.rhs_broadcast is not None:
        y = jnp.broadcast_to(y, plan.rhs_broadcast)

    def product(p: jax.Array, q: jax.Array, *, layout: str, ranks: _shapes.Ranks) -> jax.Array:
        # Outside the custom_vjp: the cast's own transpose sums a replicated operand's gradient.
        p, q = compat.match_varying(p, q)
        return _product(p, q, layout, ranks, out_dtype, how)

    try:
        return apply(product, plan.gemm, x, y)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "jax_xdna.dot is a custom_vjp function and has no forward-mode derivative (jvp, "
            "jacfwd, hessian); use jax_xdna.dot_general or jax_xdna.offload, which have"
        ) from error


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: _shapes.DimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    device: str | None = None,
    numerics: str | None = None,
    rounding: str | None = None,
) -> jax.Array:
    """Drop-in for `jax.lax.dot_general` on the NPU, for example `nn.Dense(dot_general=…)`.

    Shapes, dimension numbers and the result's dtype are those of `jax.lax.dot_general`. Works
    under every transform, forward mode included, and is one GEMM in layout NN, NT, TN or TT;
    operands are copied only when their dimensions are interleaved.

    Args:
      lhs: float32 or bfloat16.
      rhs: float32 or bfloat16; its dtype may differ.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: None, DEFAULT or an algorithm with bfloat16 products.
      preferred_element_type: float32 or bfloat16; by default the operands' common dtype.
      out_sharding: sharding of the result on a mesh with Explicit axes. Without it a sharded K
        is summed and the result replicated over its axes, where lax.dot_general would refuse.
      device, numerics, rounding: as in `jax_xdna.dot`.

    Raises:
      TypeError: another dtype.
      ValueError: shapes that do not fit; a precision that asks for more than bfloat16 products;
        an unknown device or mode.
    """
    a, b = _operand("lhs", lhs, "dot_general"), _operand("rhs", rhs, "dot_general")
    if reason := too_precise(precision):
        raise ValueError(
            f"dot_general: {reason}; the device rounds operands to bfloat16. Use "
            "jax.lax.dot_general for it"
        )
    how = mode(device, numerics, rounding)
    dtype = _result_dtype("dot_general", a, b, preferred_element_type)
    numbers = _checked(a.shape, b.shape, dimension_numbers)
    product = functools.partial(_primitive.gemm, out_dtype=dtype, **how._asdict())
    out = apply(product, _shapes.canonicalize(a.shape, b.shape, numbers), a, b)
    return out if out_sharding is None else compat.reshard(out, out_sharding)


def _checked(
    lhs: tuple[int, ...], rhs: tuple[int, ...], numbers: _shapes.DimensionNumbers
) -> _shapes.DimensionNumbers:
    """Dimension numbers with non-negative indices. Raises ValueError when they do not fit."""

    def fail(what: str) -> ValueError:
        return ValueError(
            f"dot_general: {what}; lhs has shape {lhs}, rhs {rhs}, dimension_numbers {numbers}"
        )

    (contract, batch) = numbers
    checked = []
    for kind, (left, right) in (("contracting", contract), ("batch", batch)):
        if len(left) != len(right):
            raise fail(f"lhs and rhs need equally many {kind} dimensions")
        pair = []
        for side, shape, dims in (("lhs", lhs, left), ("rhs", rhs, right)):
            if not all(-len(shape) <= d < len(shape) for d in dims):
                raise fail(f"{kind} dimensions {tuple(dims)} do not exist in {side}")
            pair.append(tuple(int(d) % len(shape) for d in dims))
        for i, j in zip(*pair, strict=True):
            if lhs[i] != rhs[j]:
                raise fail(f"{kind} dimensions {i} and {j} have sizes {lhs[i]} and {rhs[j]}")
        checked.append((pair[0], pair[1]))
    for side, used in (
        ("lhs", checked[0][0] + checked[1][0]),
        ("rhs", checked[0][1] + checked[1][1]),
    ):
        if len(set(used)) != len(used):
            raise fail(f"a dimension of {side} is named twice")
    return checked[0], checked[1]
