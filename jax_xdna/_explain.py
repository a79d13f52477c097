"""`explain`: every dot of a function, where it goes and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import _policy
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
      dtypes, calls, flops: operations of all calls), `offloaded` and `reason`.

    Raises:
      TypeError, ValueError: as `offload`.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; explain takes a function")
    rewriter = Rewriter(_policy.check(policy), mode(device, numerics, rounding))
    _, rows = rewriter.rewrite(trace(fn, args, kwargs).jaxpr)
    if print:
        sys.stdout.write(report(rows) + "\n")
    return list(rows)


def report(rows: Sequence[Row]) -> str:
    """The table that `explain` prints."""
    if not rows:
        return "no dots"
    head = ("where", "name stack", "batch×M×K×N", "layout", "dtypes", "calls", "FLOPs", "on", "why")
    body = [
        (
            row.source or "?",
            _short(row.name_stack),
            f"{row.batch}×{row.m}×{row.k}×{row.n}",
            row.layout,
            _dtypes(row),
            str(row.calls),
            si(row.flops),
            "device" if row.offloaded else "CPU",
            row.reason,
        )
        for row in rows
    ]
    total = sum(row.flops for row in rows)
    taken = [row for row in rows if row.offloaded]
    share = sum(row.flops for row in taken) / total if total else 0.0
    return (
        table(head, body, right=(5, 6))
        + f"\n{len(rows)} dots, {si(total)}FLOP in total; {len(taken)} dots with {share:.1%} of it "
        "go to the device"
    )


def _dtypes(row: Row) -> str:
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    lhs, rhs, out = (short.get(d, d) for d in (row.lhs_dtype, row.rhs_dtype, row.out_dtype))
    return f"{lhs}·{rhs}→{out}"


def _short(name_stack: str, width: int = 48) -> str:
    return name_stack if len(name_stack) <= width else "…" + name_stack[1 - width :]
