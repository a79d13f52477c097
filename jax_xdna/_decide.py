"""What is said about one dot: its description, whether the device can take it, and why not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core.primitives import scan_p

from . import _jax_compat as compat
from . import _partition, _primitive, _shapes
from ._cost import Cost
from ._dot import result_dtype
from ._policy import Dot
from ._precision import too_precise
from ._source import user_source


@dataclass(frozen=True)
class Row(Dot):
    """A dot and what was decided: one row of `explain`."""

    offloaded: bool
    reason: str
    cost: Cost | None = None  # of one call, predicted: with Policy.cost_model


class Scope(NamedTuple):
    """Where a jaxpr stands in the program."""

    name_stack: str = ""
    calls: int = 1
    held: str | None = None  # why no dot in here may be replaced
    source: str = ""  # of the innermost enclosing equation that knows its own

    def enter(self, eqn: compat.Equation) -> Scope:
        """The scope of the jaxprs among `eqn`'s parameters."""
        name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
        return Scope(
            self.name_of(eqn) + (f"/jit({name})" if name else ""),
            self.calls * (compat.scan_length(eqn) if eqn.primitive is scan_p else 1),
            self.held or _why_held(eqn),
            self.source_of(eqn),
        )

    def name_of(self, eqn: compat.Equation) -> str:
        own = str(eqn.source_info.name_stack)
        return "/".join(name for name in (self.name_stack, own) if name)

    def source_of(self, eqn: compat.Equation) -> str:
        return user_source(eqn) or self.source


def _why_held(eqn: compat.Equation) -> str | None:
    name = eqn.primitive.name
    if name == "pallas_call":
        return "inside a Pallas kernel"
    if name == "custom_partitioning":
        return "inside a custom_partitioning function"
    if name == "shard_map" and compat.manual_axes_missing(eqn):
        return "inside a shard_map that is manual over some mesh axes only"
    return None


def why_not(eqn: compat.Equation) -> str | None:
    """Why the device cannot compute this dot_general; None when it can."""
    lhs, rhs, out = (v.aval for v in (*eqn.invars, *eqn.outvars))
    for aval in (lhs, rhs, out):
        if aval.dtype not in _primitive.DTYPES:
            return f"{aval.dtype} is not float32 or bfloat16"
    if reason := too_precise(eqn.params["precision"]):
        return reason
    if out.dtype != result_dtype(lhs.dtype, rhs.dtype, eqn.params["preferred_element_type"]):
        return f"result dtype {out.dtype} does not follow from the operands"
    if 0 in (*lhs.shape, *rhs.shape):
        return "an operand is empty"
    return None


def describe(eqn: compat.Equation, operands: Any, plan: _shapes.Gemm, scope: Scope) -> Dot:
    """The description of a dot_general that is computed as `plan` from `operands`."""
    lhs, rhs = (v.aval for v in operands)
    return Dot(
        source=scope.source_of(eqn),
        name_stack=scope.name_of(eqn),
        batch=plan.batch,
        m=plan.m,
        k=plan.k,
        n=plan.n,
        layout=plan.layout,
        copies=plan.copies,
        lhs_dtype=str(lhs.dtype),
        rhs_dtype=str(rhs.dtype),
        out_dtype=str(eqn.outvars[0].aval.dtype),
        calls=scope.calls,
    )


def bound_row(eqn: compat.Equation, scope: Scope) -> Row:
    """The row of a product that `dot` or `dot_general` already bound to the device."""
    a, b = (v.aval for v in eqn.invars)
    layout = eqn.params["layout"]
    letters = _partition.factors(layout, a.ndim, b.ndim, eqn.params["ranks"])
    sizes = dict(zip(letters.a + letters.b, (*a.shape, *b.shape), strict=True))
    groups = (letters.batch, letters.m, letters.k, letters.n)
    batch, m, k, n = (math.prod(sizes[letter] for letter in group) for group in groups)
    return Row(
        source=scope.source_of(eqn),
        name_stack=scope.name_of(eqn),
        batch=batch,
        m=m,
        k=k,
        n=n,
        layout=layout,
        copies=0,
        lhs_dtype=str(a.dtype),
        rhs_dtype=str(b.dtype),
        out_dtype=str(eqn.params["out_dtype"]),
        calls=scope.calls,
        offloaded=True,
        reason="already a jax_xdna product",
    )
