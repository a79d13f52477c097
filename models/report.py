"""What a run shows: progress while it trains, tables at its end, loss.png."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

import jax_xdna

matplotlib.use("Agg")  # No display is needed, nor a main thread.
from matplotlib import pyplot as plt  # noqa: E402

Row = dict[str, Any]
# Lines of progress where there is no terminal.
_LINES = 20


class Display:
    """Progress of training: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, start: int = 0, label: str = "") -> None:
        self._total, self._start = total, start
        self._began = time.perf_counter()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(compact=True),
                console=Console(),
                expand=True,
            )
            self._task = self._progress.add_task(
                label or "training", total=total, completed=start, figures=""
            )

    def __enter__(self) -> Display:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress:
            self._progress.stop()

    def show(self, row: Row) -> None:
        """Shows a row of the log: of a step or of an evaluation."""
        if "val_loss" in row:
            loss = row["val_loss"]
            self.note(
                f"step {row['step']:>{len(str(self._total))}}/{self._total}  "
                f"validation loss {number(loss)}  perplexity {number(perplexity(loss), '.2f')}"
            )
            return
        figures = (
            f"loss {number(row['loss'])}  lr {row['lr']:.1e}  "
            f"grad-norm {number(row['grad_norm'], '.2f')}  {row['tokens_per_second']:,.0f} tok/s"
        )
        if row["loss"] is None or row["grad_norm"] is None:
            self.note(f"step {row['step']}: not finite, skipped")
        if self._progress:
            self._progress.update(self._task, completed=row["step"], figures=figures)
            return
        every = max(1, self._total // _LINES)
        if row["step"] % every == 0 or row["step"] in (1, self._total):
            elapsed = time.perf_counter() - self._began
            left = elapsed / (row["step"] - self._start) * (self._total - row["step"])
            eta = f"ETA {int(left) // 60}:{int(left) % 60:02d}"
            width = len(str(self._total))
            print(f"step {row['step']:>{width}}/{self._total}  {figures}  {eta}", flush=True)

    def note(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._progress:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)


def perplexity(loss: float | None) -> float | None:
    """exp(loss); None where it is not finite."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def number(value: float | None, form: str = ".3f") -> str:
    """A figure, or what stands for one that is not finite."""
    return "not finite" if value is None else format(value, form)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: the first column to the left, the others to the right."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def stages(profile: jax_xdna.profile, wall: float) -> dict[str, float]:
    """Where `wall` seconds of training went: seconds by name, all of them together `wall`.

    Stage times are sums over threads; each is shown as its share of the time inside the calls.
    """
    summed = {
        "pack A": profile.pack_a,
        "pack B": profile.pack_b,
        "run": profile.run,
        "unpack": profile.unpack,
    }
    busy = sum(summed.values())
    scale = profile.seconds / busy if busy else 0.0
    seconds = {name: value * scale for name, value in summed.items()}
    seconds["everything else"] = max(0.0, wall - profile.seconds)
    return seconds


def stage_table(profile: jax_xdna.profile, wall: float) -> str:
    """`stages` as a table."""
    rows = [
        (name, f"{value:.2f}", f"{value / wall:.1%}" if wall else "-")
        for name, value in stages(profile, wall).items()
    ]
    return columns(("stage", "seconds", "share"), [*rows, ("all", f"{wall:.2f}", "100.0%")])


def loss_table(ours: Sequence[Row], reference: Sequence[Row], lines: int = 12) -> str:
    """Both training loss curves, each figure the mean of the steps since the line before."""
    pairs = [
        (a["step"], a["loss"], b["loss"])
        for a, b in zip(_steps(ours), _steps(reference), strict=False)
        if a["loss"] is not None and b["loss"] is not None
    ]
    rows = []
    for part in np.array_split(np.asarray(pairs, float), min(lines, len(pairs))):
        a, b = part[:, 1].mean(), part[:, 2].mean()
        rows.append(
            (f"{part[0, 0]:.0f}–{part[-1, 0]:.0f}", f"{a:.4f}", f"{b:.4f}", f"{a - b:+.4f}")
        )
    return columns(("steps", "offloaded", "fp32", "difference"), rows)


def plot_losses(path: Path, ours: Sequence[Row], reference: Sequence[Row] = ()) -> None:
    """Draws training and validation loss over steps; with a reference also the difference."""
    figure, axes = plt.subplots(
        2 if reference else 1,
        figsize=(8, 6 if reference else 4.5),
        sharex=True,
        squeeze=False,
        height_ratios=(3, 1) if reference else None,
        layout="constrained",
    )
    top = axes[0, 0]
    for rows, name, color, style in (
        (ours, "offloaded" if reference else "training", "tab:blue", "-"),
        (reference, "fp32", "tab:orange", "--"),
    ):
        steps, losses = _series(rows, "loss")
        if not len(steps):
            continue
        top.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        top.plot(steps, _smooth(losses), color=color, linestyle=style, label=name)
        steps, losses = _series(rows, "val_loss")
        label = f"{name}, validation" if reference else "validation"
        marker = "o" if style == "-" else "x"
        top.plot(
            steps,
            losses,
            color="black" if marker == "o" else color,
            marker=marker,
            linestyle=":",
            label=label,
        )
    top.set_ylabel("loss (nats per token)")
    top.legend()
    if reference:
        bottom = axes[1, 0]
        theirs = {r["step"]: r["loss"] for r in _steps(reference)}
        differences = [
            (r["step"], r["loss"] - theirs[r["step"]])
            for r in _steps(ours)
            if r["loss"] is not None and theirs.get(r["step"]) is not None
        ]
        bottom.axhline(0, color="gray", linewidth=0.8)
        if differences:
            bottom.plot(*zip(*differences, strict=True), color="tab:blue", linewidth=0.8)
        bottom.set_ylabel("offloaded − fp32")
    axes[-1, 0].set_xlabel("step")
    for ax in axes[:, 0]:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "loss" in row]


def _series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = np.asarray(pairs, float).reshape(-1, 2).T
    return steps, values


def _smooth(values: np.ndarray) -> np.ndarray:
    """A centred mean over a twentieth of the points, its window cut off at both ends."""
    half = len(values) // 40
    total = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)
