"""The one walker over jaxprs: decides about every dot, and replaces those the device takes."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core.primitives import dot_general_p, transpose_p

from . import _jax_compat as compat
from . import _primitive, _shapes
from ._decide import Row, Scope, bound_row, describe, why_not
from ._dot import apply
from ._mode import Mode
from ._policy import Rule, ask
from ._transposes import Tail, View, swap, tails, uses, views


class _Result(NamedTuple):
    jaxpr: Any  # None: nothing was replaced
    rows: tuple[Row, ...]


class _Product(NamedTuple):
    """What replaces a dot: a plan and the variables it reads."""

    plan: _shapes.Gemm
    operands: tuple[Any, Any]


class Rewriter:
    """Rewrites jaxprs by one policy, and remembers them.

    A jaxpr that occurs again gives the same object again, so JAX's caches for its tracing and
    compilation stay warm. Entries go when the jaxpr they belong to goes.
    """

    def __init__(self, rule: Rule, mode: Mode) -> None:
        self._rule = rule
        self._mode = mode
        self._results: weakref.WeakKeyDictionary[Any, dict[Scope, _Result]]
        self._results = weakref.WeakKeyDictionary()
        self._versions: weakref.WeakKeyDictionary[Any, dict[tuple[bool, ...], Any]]
        self._versions = weakref.WeakKeyDictionary()
        self._templates: dict[Any, Any] = {}

    def rewrite(self, jaxpr: Any) -> tuple[Any, tuple[Row, ...]]:
        """`jaxpr` with the dots that the policy takes replaced, and a row for every dot.

        It is returned as it is when nothing is replaced. All else stays: inputs, effects, name
        stacks, source lines.
        """
        result = self._walk(jaxpr, Scope())
        return jaxpr if result.jaxpr is None else result.jaxpr, result.rows

    def _walk(self, jaxpr: Any, scope: Scope) -> _Result:
        known = self._results.setdefault(jaxpr, {})
        if scope not in known:
            known[scope] = self._visit(jaxpr, scope)
        return known[scope]

    def _visit(self, jaxpr: Any, scope: Scope) -> _Result:
        rows: list[Row] = []
        eqns: list[compat.Equation] = []
        changed = False
        after, before = tails(jaxpr), views(jaxpr)
        absorbed: set[int] = set()
        for eqn in compat.equations(jaxpr):
            if id(eqn) in absorbed:
                continue
            if eqn.primitive is dot_general_p:
                tail = after.get(id(eqn), Tail((), False))
                row, replacement = self._decide(eqn, tail, before, scope)
                rows.append(row)
                eqns.extend([eqn] if replacement is None else replacement)
                if replacement is not None:
                    changed = True
                    absorbed.update(map(id, tail.transposes))
            elif eqn.primitive is _primitive.gemm_p:
                rows.append(bound_row(eqn, scope))
                eqns.append(eqn)
            else:
                params = self._visit_params(eqn, scope, rows)
                changed = changed or params is not None
                eqns.append(eqn if params is None else eqn.replace(params=params))
        if not changed:
            return _Result(None, tuple(rows))
        # Wherever the same decisions were taken, share one jaxpr.
        versions = self._versions.setdefault(jaxpr, {})
        decisions = tuple(row.offloaded for row in rows)
        if decisions not in versions:
            versions[decisions] = compat.with_equations(jaxpr, _without_dead(jaxpr, eqns))
        return _Result(versions[decisions], tuple(rows))

    def _visit_params(
        self, eqn: compat.Equation, scope: Scope, rows: list[Row]
    ) -> dict[str, Any] | None:
        """Parameters of `eqn` with every jaxpr in them rewritten; None when none changed."""
        inner: Scope | None = None

        def visit(value: Any) -> Any:
            nonlocal inner
            if not compat.is_jaxpr(value):
                return value
            inner = inner or scope.enter(eqn)
            result = self._walk(value, inner)
            rows.extend(result.rows)
            return value if result.jaxpr is None else result.jaxpr

        changed: dict[str, Any] = {}
        for name, value in eqn.params.items():
            if type(value) in (tuple, list):  # the branches of a cond
                items = [visit(item) for item in value]
                if any(new is not old for new, old in zip(items, value, strict=True)):
                    changed[name] = type(value)(items)
            elif (new := visit(value)) is not value:
                changed[name] = new
        return {**eqn.params, **changed} if changed else None

    def _decide(
        self, eqn: compat.Equation, tail: Tail, before: dict[Any, View], scope: Scope
    ) -> tuple[Row, list[compat.Equation] | None]:
        """The row of a dot and, when the device takes it, the equations that replace it."""
        product = _plan(eqn, tail, before)
        dot = describe(eqn, product.operands, product.plan, scope)
        reason = scope.held or why_not(eqn)
        if reason is not None:
            return Row(**vars(dot), offloaded=False, reason=reason), None
        taken, reason = ask(self._rule, dot)
        if not taken:
            return Row(**vars(dot), offloaded=False, reason=reason), None
        outvar = (tail.transposes[-1] if tail.transposes else eqn).outvars[0]
        template = self._template(product, outvar.aval, eqn)
        if template is None:
            reason = "its typed sharding cannot be kept"
            return Row(**vars(dot), offloaded=False, reason=reason), None
        made = _instantiate(template, product.operands, outvar, eqn)
        return Row(**vars(dot), offloaded=True, reason=reason), made

    def _template(self, product: _Product, out: Any, eqn: compat.Equation) -> Any:
        """The jaxpr of reshape, GEMM, reshape; None when the types do not allow it."""
        avals = tuple(v.aval for v in product.operands)
        key = (product.plan, avals, out, compat.trace_context(eqn))
        if key not in self._templates:
            self._templates[key] = self._trace(product.plan, avals, out, eqn)
        return self._templates[key]

    def _trace(self, plan: _shapes.Gemm, avals: Any, out: Any, eqn: compat.Equation) -> Any:
        dtype = np.dtype(out.dtype)
        gemm = functools.partial(_primitive.gemm, out_dtype=dtype, **self._mode._asdict())

        def multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return apply(gemm, plan, lhs, rhs)

        with eqn.ctx.manager:
            try:
                template = jax.make_jaxpr(multiply)(*avals)
            except Exception:
                # Merging dimensions can be impossible for a typed sharding, and for nothing else.
                if not compat.explicitly_sharded(*avals):
                    raise
                return None
        return template if template.out_avals == [out] else None


def _plan(eqn: compat.Equation, tail: Tail, before: dict[Any, View]) -> _Product:
    """The GEMM for a dot and its neighbouring transposes that copies the least."""
    operands = tuple(eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    if tail.swapped:
        operands, numbers = operands[::-1], swap(numbers)
    choices: list[tuple[int, int, _Product]] = []
    for seen in itertools.product(
        *([before[v], View(v, ())] if v in before else [View(v, ())] for v in operands)
    ):
        (lhs, lhs_order), (rhs, rhs_order) = seen
        plan = _shapes.canonicalize(
            lhs.aval.shape, rhs.aval.shape, numbers, lhs_order or None, rhs_order or None
        )
        # A transpose that is not taken in is a copy too.
        left = sum(v in before and view.base is v for v, view in zip(operands, seen, strict=True))
        choices.append((plan.copies + left, len(choices), _Product(plan, (lhs, rhs))))
    return min(choices)[2]


def _without_dead(jaxpr: Any, eqns: list[compat.Equation]) -> list[compat.Equation]:
    """Drops transposes whose only readers took them in; XLA would, an eager call would not."""
    kept = list(eqns)
    while True:
        count = uses(jaxpr, kept)
        alive = [e for e in kept if e.primitive is not transpose_p or count[e.outvars[0]]]
        if len(alive) == len(kept):
            return kept
        kept = alive


def _instantiate(
    template: Any, operands: Sequence[Any], outvar: Any, eqn: compat.Equation
) -> list[compat.Equation]:
    """The template's equations between `operands` and `outvar`, in place of `eqn`."""
    body = compat.open_jaxpr(template)
    names: dict[Any, Any] = dict(zip(body.invars, operands, strict=True))
    names[body.outvars[0]] = outvar
    made = []
    for inner in body.eqns:
        for v in inner.outvars:
            if v not in names:
                names[v] = compat.fresh_var(v.aval)
        made.append(
            inner.replace(
                invars=[v if isinstance(v, compat.Literal) else names[v] for v in inner.invars],
                outvars=[names[v] for v in inner.outvars],
                source_info=eqn.source_info,
                ctx=eqn.ctx,
            )
        )
    return made
