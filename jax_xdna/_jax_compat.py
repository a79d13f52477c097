"""Everything that depends on the JAX version or on a private JAX name. Works on 0.10.2 … 0.12."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning as _custom_partitioning
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var
from jax.interpreters import ad

# JAX types only part of these; Any keeps `mypy --strict` to our own code.
Equation = Any  # jax.extend.core.JaxprEqn
PartitionSpec: Any = jax.sharding.PartitionSpec
ShapeDtypeStruct: Any = jax.ShapeDtypeStruct
custom_partitioning: Any = _custom_partitioning
defbilinear: Any = ad.defbilinear
make_user_context: Any = jax.make_user_context
psum: Any = jax.lax.psum
reshard: Any = jax.sharding.reshard

__all__ = [
    "ClosedJaxpr",
    "Equation",
    "Jaxpr",
    "Literal",
    "Primitive",
    "PartitionSpec",
    "ShapeDtypeStruct",
    "Var",
    "custom_partitioning",
    "defbilinear",
    "equations",
    "explicitly_sharded",
    "frames",
    "fresh_var",
    "is_jaxpr",
    "make_user_context",
    "manual_axes_missing",
    "match_varying",
    "needs_devices",
    "open_jaxpr",
    "psum",
    "reshape",
    "reshard",
    "result_aval",
    "scan_length",
    "trace_context",
    "under_jit",
    "with_equations",
    "without_mesh",
    "with_type",
]


def needs_devices(primitive: Primitive) -> None:
    """Has `primitive` lowered with the device assignment known.

    A lowering that contains a `custom_partitioning` call needs it, and JAX looks only at the
    primitives it sees in the jaxpr. No public name exists for this set.
    """
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering
    except ImportError:  # a later JAX may find out by itself
        return
    prim_requires_devices_during_lowering.add(primitive)


# ---- jaxprs: from 0.11 on a Jaxpr carries its own constants and ClosedJaxpr is the same class ----


def is_jaxpr(value: object) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def open_jaxpr(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def equations(jaxpr: Any) -> list[Equation]:
    return list(open_jaxpr(jaxpr).eqns)


def with_equations(jaxpr: Any, eqns: Sequence[Equation]) -> Any:
    """A copy of `jaxpr` with other equations and the same inputs, outputs, effects, constants."""
    inner = open_jaxpr(jaxpr).replace(eqns=list(eqns))
    return inner if isinstance(jaxpr, Jaxpr) else jaxpr.replace(jaxpr=inner)


def fresh_var(aval: Any) -> Var:
    return Var(aval)


def scan_length(eqn: Equation) -> int:
    """Trip count of a scan equation. Its other parameters differ between versions."""
    return int(eqn.params.get("length", 1))


def trace_context(eqn: Equation) -> Any:
    """What, besides operand types, decides how code traces at this equation."""
    return getattr(eqn.ctx, "cur_abstract_mesh", None)


def manual_axes_missing(eqn: Equation) -> bool:
    """True for a shard_map that leaves some mesh axes to the partitioner."""
    mesh = eqn.params["mesh"]
    manual = {*eqn.params["newly_manual_axes"], *mesh.manual_axes}
    return not manual.issuperset(mesh.axis_names)


def frames(eqn: Equation) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of the Python frames that made `eqn`, innermost first."""
    traceback: Any = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        yield frame.file_name, frame.line_num, frame.function_name


def under_jit() -> bool:
    """Whether operations are being staged out rather than run. No other public way to ask."""
    ask: Any = getattr(jax.extend.core, "unsafe_am_i_under_a_jit_DO_NOT_USE", None)
    return ask is not None and bool(ask())


# ---- types: explicit shardings and the manual axes of shard_map ----


def _varying(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def match_varying(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes both vary over the same manual mesh axes, as shard_map's type rules want.

    The cast's transpose is the psum that the gradient of a replicated operand needs.
    """
    axes_a, axes_b = _varying(a), _varying(b)
    if axes_a != axes_b:
        if missing := tuple(sorted(axes_b - axes_a)):
            a = jax.lax.pcast(a, missing, to="varying")
        if missing := tuple(sorted(axes_a - axes_b)):
            b = jax.lax.pcast(b, missing, to="varying")
    return a, b


def result_aval(
    a: Any, b: Any, shape: tuple[int, ...], dtype: np.dtype[Any], specs: Any
) -> jax.core.ShapedArray:
    """Type of a product of `a` and `b`; `specs(spec_a, spec_b)` gives its partition spec."""
    mesh = a.sharding.mesh if not a.sharding.mesh.empty else b.sharding.mesh
    spec = PartitionSpec(*[None] * len(shape))
    if not mesh.empty and mesh._any_axis_explicit:
        spec = specs(a.sharding.spec, b.sharding.spec)
    aval: jax.core.ShapedArray = a.update(
        shape=shape,
        dtype=dtype,
        weak_type=False,
        sharding=jax.sharding.NamedSharding(mesh, spec),
    )
    return aval


def with_type(x: jax.Array, aval: Any) -> jax.Array:
    """`x`, resharded when the typed sharding of `aval` differs. For Explicit meshes only."""
    wanted = aval.sharding
    if wanted.mesh.empty or not wanted.mesh._any_axis_explicit:
        return x
    if jax.typeof(x).sharding.spec == wanted.spec:
        return x
    resharded: jax.Array = reshard(x, wanted)
    return resharded


def reshape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` in another shape, for code that runs per shard: a typed sharding is dropped."""
    aval: Any = jax.typeof(x)
    if not explicitly_sharded(aval):
        return x.reshape(shape)
    replicated = jax.sharding.NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return jax.lax.reshape(x, shape, out_sharding=replicated)


def without_mesh() -> Any:
    """A context with no typed shardings, for code that runs per shard.

    0.12 lowers a reshape, and the reducer of a `psum`, under the mesh of the caller, and XLA
    refuses the sharding annotations that an Explicit mesh puts there.
    """
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def explicitly_sharded(*avals: Any) -> bool:
    """True when a type carries a sharding, as on a mesh with Explicit axes."""
    return any(
        not aval.sharding.mesh.empty and aval.sharding.mesh._any_axis_explicit for aval in avals
    )
