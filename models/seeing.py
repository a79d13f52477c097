"""What is seen of a run beside its log: samples, energy, TensorBoard, report.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax_xdna

from . import html_report, report, tensorboard
from .checkpoint import write_atomically
from .energy import Meter
from .errors import UserError
from .generate import generate
from .gpt2 import GPT2
from .prepare import Run
from .rundir import METRICS
from .tokenizer import printable

FP32_METRICS = "metrics-fp32.jsonl"
SAMPLES = "samples.jsonl"
REPORT = "report.html"


class Seeing:
    """Follows one run from step `start`; `local` gives one device's copy of parameters.

    Attributes:
      energy: counts from the construction on.
      dots: `jax_xdna.explain` of the train step, for the report.
    """

    def __init__(
        self, run: Run, model: GPT2, start: int, dots: Sequence[Any], local: Callable[[Any], Any]
    ) -> None:
        self._run, self._model, self._local, self.dots = run, model, local, dots
        self.energy = Meter()
        self._spent: list[str] = []
        run.folder.cut_metrics(start or -1, SAMPLES)
        self._board = (
            tensorboard.Writer(run.folder.path, start) if run.options.tensorboard else None
        )

    def log(self, row: dict[str, Any]) -> None:
        """Takes a row of the log."""
        self.energy.update()
        if self._board:
            self._board.row(row)

    def evaluated(self, step: int, params: Any) -> None:
        """Writes a sample of the model as it is at an evaluation."""
        run, count = self._run, self._run.options.sample_tokens
        if not count:
            return
        end, seed = run.tokenizer.end, run.options.seed
        made = generate(
            self._model,
            self._local(params),
            [end],
            max_tokens=count,
            seed=seed,
            end=end,
            known=run.tokenizer.vocab_size,
        )
        try:
            text = printable(run.tokenizer.decode(list(made)).rstrip())
        except UserError as error:  # Logits that are NaN: the log says so, training goes on.
            text = f"none: {error}"
        run.folder.append_metrics({"step": step, "text": text}, SAMPLES)
        if self._board:
            self._board.sample(step, text)

    def last_sample(self) -> str | None:
        """The newest sample, None without any."""
        rows = self._run.folder.read_metrics(SAMPLES)
        return rows[-1]["text"] if rows else None

    def spent(self, what: str, meter: Meter, seconds: float, tokens: int) -> None:
        """Adds a sentence on the energy of `seconds` in which `tokens` were trained on."""
        meter.update()
        if meter.joules is None:
            line = f"{what}: not measured: {meter.missing}"
        else:
            line = f"{what}: {meter.joules:,.0f} J"
            line += f" ({', '.join(f'{name} {j:,.0f}' for name, j in meter.packages.items())})"
            line += f", {meter.joules / seconds:.1f} W on average" if seconds else ""
            line += f", {1e3 * meter.joules / tokens:.3g} J per 1000 tokens" if tokens else ""
        self._spent.append(line)

    def write(self, step: int, summary: dict[str, Any], profile: Any, seconds: float) -> None:
        """Writes report.html; warns where that fails, as nothing else depends on it."""
        run, folder = self._run, self._run.folder
        of, rows = run.options.steps, folder.read_metrics(METRICS)
        ended = "finished" if step >= of else "stopped; --resume continues"
        content = html_report.page(
            html_report.Report(
                title=str(folder.path),
                status=f"step {step:,} of {of:,}, {ended}",
                rows=rows,
                fp32_rows=folder.read_metrics(FP32_METRICS) if "fp32_val_loss" in summary else (),
                samples=folder.read_metrics(SAMPLES),
                summary=summary,
                stages=report.stages(profile, seconds),
                ran=ran_on(profile),
                dots=self.dots,
                energy=self._spent,
                options=run.options.stored(),
            )
        )
        try:
            write_atomically(folder.path / REPORT, content.encode())
        except OSError as error:
            folder.warn(f"{REPORT} could not be written: {error.strerror}")

    def facts(self, profile: jax_xdna.profile) -> list[str]:
        """Lines on what ran where and on energy, as the report has them."""
        return [*ran_on(profile), *(f"energy, {line}" for line in self._spent)]

    def close(self) -> None:
        if self._board:
            self._board.close()


def describe_share(dots: Sequence[Any]) -> tuple[float, int]:
    """The share of matmul FLOPs that goes to the device, and the FLOPs of all."""
    total = sum(dot.flops for dot in dots)
    return sum(dot.flops for dot in dots if dot.offloaded) / total, total


def ran_on(profile: jax_xdna.profile) -> list[str]:
    """A line per device about the products that ran there."""
    found: dict[str, list[float]] = {}
    for row in profile.rows:
        sums = found.setdefault(row.device, [0, 0, 0])
        for i, value in enumerate((row.calls, row.flops, row.seconds)):
            sums[i] += value
    return [
        f"{calls:,} products of {flops / 1e9:,.1f} GFLOP ran on {device} in {seconds:,.1f} s"
        for device, (calls, flops, seconds) in sorted(found.items())
    ]
