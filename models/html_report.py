"""report.html: what a run did, in one file that needs no other, no script and no network."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

import jax_xdna

from .report import number

Row = dict[str, Any]
# Points of a line: each is the mean of its share of the steps, drawn over their range.
_POINTS = 150
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# Size of a chart, and of the part inside the axes.
_WIDTH, _HEIGHT = 480, 260
_LEFT, _TOP, _RIGHT, _BOTTOM = 58, 10, 472, 226

_CSS = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #59636e; --page: #fff; --box: #f6f8fa;
  --line: #d1d9e0; --a: #0969da; --b: #bc4c00; --c: #1a7f37; --d: #8250df; --e: #8c959f; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --dim: #9198a1; --page: #0d1117;
  --box: #161b22; --line: #3d444d; --a: #58a6ff; --b: #f0883e; --c: #3fb950; --d: #bc8cff;
  --e: #6e7681; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 16px; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 8px 0 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 28px 0 8px; }
p { margin: 4px 0 8px; } .dim { color: var(--dim); }
.grid { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.tiles { display: grid; gap: 8px; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); }
.tiles div, figure { background: var(--box); border: 1px solid var(--line); border-radius: 6px; }
.tiles div { padding: 8px 12px; } .tiles b { display: block; font-size: 19px; }
.tiles span { color: var(--dim); font-size: 13px; }
figure { margin: 0; padding: 10px; } figcaption { font-weight: 600; }
figcaption span { font-weight: 400; font-size: 13px; margin-left: 10px; white-space: nowrap; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--dim); font: 13px system-ui, sans-serif; }
.axis { stroke: var(--line); } .mean { fill: none; stroke-width: 1.8; }
.range { opacity: .18; stroke: none; } .dash { stroke-dasharray: 6 4; }
.a { stroke: var(--a); fill: var(--a); } .b { stroke: var(--b); fill: var(--b); }
.c { stroke: var(--c); fill: var(--c); } .d { stroke: var(--d); fill: var(--d); }
.a.mean, .b.mean, .c.mean, .d.mean { fill: none; }
i { display: inline-block; width: 18px; border-top: 3px solid; margin: 0 5px 4px 0; }
i.dash { border-top-style: dashed; } i.a { color: var(--a); } i.b { color: var(--b); }
i.c { color: var(--c); } i.d { color: var(--d); }
.bar { display: flex; height: 22px; border-radius: 4px; overflow: hidden; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th { text-align: left; color: var(--dim); font-weight: 600; }
td, th { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.r, th.r { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.w { overflow-wrap: anywhere; } .wide td, .wide th { white-space: nowrap; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px; }
details { border-bottom: 1px solid var(--line); padding: 4px 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; margin: 6px 0;
  padding: 10px; background: var(--box); border-radius: 6px;
  font: 13px/1.45 ui-monospace, monospace; }
"""


@dataclass(frozen=True)
class Report:
    """What a report shows.

    Attributes:
      title, status: the run's folder, and whether it is finished.
      rows, fp32_rows: rows of metrics.jsonl, and of the comparison's.
      samples: rows {step, text}.
      summary: contents of summary.json, as far as they are known.
      stages: seconds by name, of this process since it began to train; all of its time.
      ran: sentences about what ran on devices in that time.
      dots: `jax_xdna.explain` of the train step.
      energy: sentences about it.
      options: flags and their values.
    """

    title: str
    status: str
    rows: Sequence[Row]
    fp32_rows: Sequence[Row] = ()
    samples: Sequence[Row] = ()
    summary: Row = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    ran: Sequence[str] = ()
    dots: Sequence[Any] = ()
    energy: Sequence[str] = ()
    options: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One line of a chart: its legend, its classes in the style sheet, its points."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    marked: bool = False  # a dot per point instead of means over ranges


def page(report: Report) -> str:
    """The whole file. All text of the run is escaped."""
    parts = [
        f"<h1>{escape(report.title)}</h1><p class=dim>{escape(report.status)}</p>",
        _tiles(report),
        _charts(report),
        _stages(report),
        _dots(report),
        "<h2>Energy</h2>" + "".join(f"<p>{escape(line)}</p>" for line in report.energy),
        _samples(report.samples),
        "<h2>Options</h2>" + _table(("flag", "value"), _flags(report.options)),
        "<h2>Versions</h2>" + _table(("package", "version"), versions()),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        # Nothing is loaded and nothing runs, whatever a model writes.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_CSS}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def versions() -> list[tuple[str, str]]:
    """Names and versions of what computes."""
    found = [("jax-xdna", jax_xdna.__version__), ("Python", platform.python_version())]
    found += [(name, importlib.metadata.version(name)) for name in _PACKAGES]
    return [*found, ("system", f"{platform.system()} {platform.release()} {platform.machine()}")]


def chart(title: str, lines: Iterable[Line]) -> str:
    """A figure of lines over steps, "" when none has a point."""
    drawn = [line for line in lines if len(line.points)]
    if not drawn:
        return ""
    every = np.concatenate([np.asarray(line.points, float) for line in drawn])
    (x0, y0), (x1, y1) = every.min(axis=0), every.max(axis=0)
    margin = 0.04 * (y1 - y0) or abs(y1) * 0.1 or 1.0
    y0, y1, x1 = y0 - margin, y1 + margin, max(x1, x0 + 1)
    if 0 <= every[:, 1].min() < y1 / 4:
        y0 = 0.0

    def x(step: float) -> float:
        return _LEFT + (step - x0) / (x1 - x0) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        return _BOTTOM - (value - y0) / (y1 - y0) * (_BOTTOM - _TOP)

    parts = []
    for tick in MaxNLocator(5).tick_values(y0, y1):
        if y0 <= tick <= y1:
            parts.append(
                f'<path class=axis d="M{_LEFT} {y(tick):.1f}H{_RIGHT}"/><text x="{_LEFT - 6}" '
                f'y="{y(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
            )
    for tick in MaxNLocator(6, integer=True).tick_values(x0, x1):
        if x0 <= tick <= x1:
            parts.append(
                f'<text x="{x(tick):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">'
                f"{_short(tick)}</text>"
            )
    parts.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 5}" text-anchor="middle">step</text>'
    )
    for line in drawn:
        parts.append(_draw(line, x, y))
    legend = "".join(
        f'<span><i class="{line.style}"></i>{escape(line.name)}</span>' for line in drawn
    )
    return (
        f"<figure><figcaption>{escape(title)}{legend if len(drawn) > 1 else ''}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg></figure>"
    )


def _draw(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    def path(points: Iterable[Sequence[float]]) -> str:
        return "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)

    points = np.asarray(line.points, float)
    if line.marked:
        dots = "".join(
            f'<circle class="{line.style}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3">'
            f"<title>step {a:.0f}: {b:.4f}</title></circle>"
            for a, b in points
        )
        return f'<path class="mean {line.style}" d="{path(points)}"/>{dots}'
    shares = np.array_split(points, min(_POINTS, len(points)))
    means = [share.mean(axis=0) for share in shares]
    highs = [(m[0], s[:, 1].max()) for m, s in zip(means, shares, strict=True)]
    lows = [(m[0], s[:, 1].min()) for m, s in zip(means, shares, strict=True)]
    area = f'<path class="range {line.style}" d="{path([*highs, *reversed(lows)])}Z"/>'
    return f'{area}<path class="mean {line.style}" d="{path(means)}"/>'


def _charts(report: Report) -> str:
    ours, fp32 = report.rows, report.fp32_rows
    rates = [Line("offloaded", "a", _series(ours, "tokens_per_second"))]
    rates.append(Line("fp32", "b dash", _series(fp32, "tokens_per_second")))
    name = "offloaded, " if fp32 else ""
    figures = [
        chart(
            "Loss, nats per token",
            [
                Line(f"{name}training", "a", _series(ours, "loss")),
                Line("fp32, training", "b dash", _series(fp32, "loss")),
                Line(f"{name}validation", "c", _series(ours, "val_loss"), marked=True),
                Line("fp32, validation", "d dash", _series(fp32, "val_loss"), marked=True),
            ],
        ),
        chart("Learning rate", [Line("learning rate", "a", _series(ours, "lr"))]),
        chart(
            "Gradient norm, before clipping",
            [
                Line("offloaded", "a", _series(ours, "grad_norm")),
                Line("fp32", "b dash", _series(fp32, "grad_norm")),
            ],
        ),
        chart("Tokens per second", rates),
    ]
    note = (
        "<p class=dim>A line is the mean of neighbouring steps; the area behind it, their range."
        "</p>"
        if len(ours) > _POINTS
        else ""
    )
    return f"<h2>Curves</h2><div class=grid>{''.join(figures)}</div>{note}" if any(figures) else ""


def _tiles(report: Report) -> str:
    s = report.summary
    ppl, fp32 = s.get("val_perplexity"), s.get("fp32_val_perplexity")
    tiles: list[tuple[str, str]] = []
    for key, label, form in (
        ("val_loss", "validation loss", ".4f"),
        ("val_perplexity", "validation perplexity", ".3f"),
        ("fp32_val_perplexity", "the same on plain fp32", ".3f"),
    ):
        if key in s:
            tiles.append((number(s[key], form), label))
    if ppl and fp32:
        tiles.append((f"{ppl / fp32 - 1:+.3%}", "perplexity, offloaded against fp32"))
    for key, label, form in (
        ("tokens_per_second", "tokens/s", ",.0f"),
        ("fp32_tokens_per_second", "tokens/s on plain fp32", ",.0f"),
        ("offloaded_flop_share", "of matmul FLOPs offloaded", ".1%"),
        ("seconds", "seconds", ",.1f"),
        ("skipped_steps", "steps skipped, not finite", "d"),
    ):
        if key in s:
            tiles.append((number(s[key], form), label))
    inner = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in tiles)
    return f"<div class=tiles>{inner}</div>" if tiles else ""


def _stages(report: Report) -> str:
    total = sum(report.stages.values())
    if not total:
        return ""
    colors = dict(zip(report.stages, ("--a", "--b", "--c", "--d", "--e"), strict=False))
    bar = "".join(
        f'<div style="width:{100 * value / total:.2f}%;background:var({colors[name]})"></div>'
        for name, value in report.stages.items()
    )
    rows = "".join(
        f'<tr><td><span class=key style="background:var({colors[name]})"></span>{escape(name)}</td>'
        f"<td class=r>{value:.2f}</td><td class=r>{value / total:.1%}</td></tr>"
        for name, value in report.stages.items()
    )
    head = "<tr><th>stage</th><th class=r>seconds</th><th class=r>share</th></tr>"
    calls = "".join(f"<p>{escape(line)}</p>" for line in report.ran)
    return (
        f"<h2>Where {total:,.1f} s went</h2><div class=bar>{bar}</div>"
        f"<table>{head}{rows}</table>{calls}"
    )


def _dots(report: Report) -> str:
    """The table of `explain`; products that differ only in the layer they are of share a line."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for dot in report.dots:
        key = (
            dot.source.rpartition("/")[2] or "?",
            f"{dot.batch}×{dot.m}×{dot.k}×{dot.n}",
            dot.layout,
            "device" if dot.offloaded else "CPU",
            dot.reason,
        )
        sums = found.setdefault(key, [0, 0])
        sums[0] += dot.calls
        sums[1] += dot.flops
    if not found:
        return ""
    total = sum(flops for _, flops in found.values())
    rows = [
        (*key[:3], f"{calls:,}", f"{flops / 1e6:,.1f}", f"{flops / total:.1%}", *key[3:])
        for key, (calls, flops) in sorted(found.items(), key=lambda item: -item[1][1])
    ]
    head = ("where", "batch×M×K×N", "layout", "calls", "MFLOP", "share", "on", "why")
    return (
        "<h2>Where each product of a step runs</h2>"
        "<p class=dim>As jax_xdna.explain tells it, the layers' equal products added up.</p>"
        f"<div class=wide>{_table(head, rows, right=(3, 4, 5))}</div>"
    )


def _samples(samples: Sequence[Row]) -> str:
    if not samples:
        return ""
    inner = "".join(
        f"<details{' open' if row is samples[-1] else ''}><summary>step {row['step']:,}</summary>"
        f"<pre>{escape(row['text'])}</pre></details>"
        for row in samples
    )
    return f"<h2>Samples</h2><p class=dim>From no prompt, with the same seed.</p>{inner}"


def _flags(options: Row) -> list[tuple[str, str]]:
    def words(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return [
        ("--" + name.replace("_", "-"), words(value))
        for name, value in options.items()
        if value is not None and value != () and value != []
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    kind = [" class=r" if i in set(right) else " class=w" for i in range(len(head))]
    lines = [
        "<tr>"
        + "".join(f"<td{k}>{escape(c)}</td>" for k, c in zip(kind, row, strict=True))
        + "</tr>"
        for row in rows
    ]
    top = "".join(f"<th{k}>{escape(c)}</th>" for k, c in zip(kind, head, strict=True))
    return f"<table><tr>{top}</tr>{''.join(lines)}</table>"


def _series(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _short(value: float) -> str:
    if 0 < abs(value) < 0.01:  # 0.00025 would not fit beside the axis.
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
