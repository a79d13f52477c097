"""`explain`: every dot of a function, where it goes and why."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import _policy
from ._cost import CostModel
from ._decide import Row
from ._mode import mode
from ._rewrite import Rewriter
from ._table import si, table
from ._trace import trace


def explain(
    fn: Callable[..., Any],
    *args: Any,
    policy: _policy.Rule | None = None,
    device: str | None = None,
    numerics: str | None = None,
    rounding: str | None = None,
    print: bool = True,
    **kwargs: Any,
) -> list[Row]:
    """Prints and returns one row per dot of `fn(*args, **kwargs)`, also inside nested functions.

    Nothing is computed: `fn` is traced only, and arrays may be `jax.ShapeDtypeStruct`s. The
    decisions are those of `offload` with the same arguments; dots of `jax_xdna.dot` and
    `dot_general` are listed too.

    Args:
      fn: a function, jitted or not, offloaded or not.
      *args, **kwargs: its arguments.
      policy, device, numerics, rounding: as in `offload`.
      print: False only returns the rows.

    Returns:
      Rows with the attributes of a policy's `Dot` (source, name_stack, batch, m, k, n, layout,
      dtypes, calls, flops: operations of all calls), `offloaded` and `reason`. With
      `Policy.cost_model` also `cost`, predicted for one call: cpu, npu and total seconds,
      intensity, bound, useful_share; None for what the NPU cannot compute.

    Raises:
      TypeError, ValueError: as `offload`.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; explain takes a function")
    rewriter = Rewriter(_policy.check(policy), mode(device, numerics, rounding))
    _, found = rewriter.rewrite(trace(fn, args, kwargs).jaxpr)
    rows = list(found)
    if isinstance(policy, _policy.Policy) and isinstance(policy.rule, CostModel):
        rows = [dataclasses.replace(row, cost=policy.rule.cost(row)) for row in rows]
    if print:
        sys.stdout.write(report(rows) + "\n")
    return rows


def report(rows: Sequence[Row]) -> str:
    """The table that `explain` prints."""
    if not rows:
        return "no dots"
    predicted = any(row.cost for row in rows)
    head = (
        *("where", "name stack", "batch×M×K×N", "layout", "dtypes", "calls", "FLOPs"),
        *(("CPU ms", "NPU ms", "FLOP/B", "bound", "useful") if predicted else ()),
        *("on", "why"),
    )
    body = [
        (
            row.source or "?",
            _short(row.name_stack),
            f"{row.batch}×{row.m}×{row.k}×{row.n}",
            row.layout,
            _dtypes(row),
            str(row.calls),
            si(row.flops),
            *(_predicted(row) if predicted else ()),
            "device" if row.offloaded else "CPU",
            row.reason,
        )
        for row in rows
    ]
    total = sum(row.flops for row in rows)
    taken = [row for row in rows if row.offloaded]
    share = sum(row.flops for row in taken) / total if total else 0.0
    return (
        table(head, body, right=(5, 6, 7, 8, 9, 11) if predicted else (5, 6))
        + f"\n{len(rows)} dots, {si(total)}FLOP in total; {len(taken)} dots with {share:.1%} of it "
        "go to the device"
    )


def _predicted(row: Row) -> tuple[str, ...]:
    if (cost := row.cost) is None:
        return ("-",) * 5
    times = (f"{1e3 * seconds:.3g}" for seconds in (cost.cpu, cost.total))
    return (*times, f"{cost.intensity:.0f}", cost.bound, f"{cost.useful_share:.2f}")


def _dtypes(row: Row) -> str:
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    lhs, rhs, out = (short.get(d, d) for d in (row.lhs_dtype, row.rhs_dtype, row.out_dtype))
    return f"{lhs}·{rhs}→{out}"


def _short(name_stack: str, width: int = 48) -> str:
    return name_stack if len(name_stack) <= width else "…" + name_stack[1 - width :]
