"""Transposes next to a dot that it can take in, because a GEMM reads and writes either order.

`x @ w.T` transposes before the dot, reverse mode after it. XLA folds such transposes into its own
dots, but not into a call.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from jax.extend.core.primitives import dot_general_p, transpose_p

from . import _jax_compat as compat
from ._shapes import DimensionNumbers


class View(NamedTuple):
    """A variable that is `base` with its dimensions in another order."""

    base: Any
    order: tuple[int, ...]


class Tail(NamedTuple):
    """Transposes after a dot that cancel out (`swapped` False) or exchange its operands."""

    transposes: tuple[compat.Equation, ...]
    swapped: bool


def views(jaxpr: Any) -> dict[Any, View]:
    """Every variable of `jaxpr` made by transposes alone, and what it is made of."""
    found: dict[Any, View] = {}
    for eqn in compat.equations(jaxpr):
        if eqn.primitive is transpose_p and not isinstance(eqn.invars[0], compat.Literal):
            order = tuple(eqn.params["permutation"])
            base = eqn.invars[0]
            if base in found:
                base, inner = found[base]
                order = tuple(inner[d] for d in order)
            found[eqn.outvars[0]] = View(base, order)
    return found


def uses(jaxpr: Any, eqns: list[compat.Equation]) -> Counter[Any]:
    """How often each variable is read by `eqns` and returned by `jaxpr`."""
    read = [v for eqn in eqns for v in eqn.invars] + list(compat.open_jaxpr(jaxpr).outvars)
    return Counter(v for v in read if not isinstance(v, compat.Literal))


def tails(jaxpr: Any) -> dict[int, Tail]:
    """By the id of a dot's equation: the transposes after it that it makes needless.

    Each must be the only reader of what comes before it.
    """
    eqns = compat.equations(jaxpr)
    if not any(eqn.primitive is dot_general_p for eqn in eqns):
        return {}
    count = uses(jaxpr, eqns)
    reader = {eqn.invars[0]: eqn for eqn in eqns if eqn.primitive is transpose_p}
    found: dict[int, Tail] = {}
    for dot in eqns:
        if dot.primitive is not dot_general_p:
            continue
        chain: list[compat.Equation] = []
        value = dot.outvars[0]
        plain = order = tuple(range(value.aval.ndim))
        exchanged = _exchanged(dot)
        while count[value] == 1 and value in reader:
            chain.append(reader[value])
            value = chain[-1].outvars[0]
            order = tuple(order[d] for d in chain[-1].params["permutation"])
            if order in (plain, exchanged):
                found[id(dot)] = Tail(tuple(chain), order != plain)
    return found


def _exchanged(dot: compat.Equation) -> tuple[int, ...]:
    """The order of a dot's result with the right operand's free dimensions before the left's."""
    (contract, _), (batch, _) = dot.params["dimension_numbers"]
    lead = len(batch)
    middle = lead + dot.invars[0].aval.ndim - lead - len(contract)
    rank = dot.outvars[0].aval.ndim
    return (*range(lead), *range(middle, rank), *range(lead, middle))


def swap(numbers: DimensionNumbers) -> DimensionNumbers:
    """Dimension numbers of the dot with exchanged operands."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    return (rhs_contract, lhs_contract), (rhs_batch, lhs_batch)
