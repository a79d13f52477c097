"""A run's log as TensorBoard reads it, with `--tensorboard`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .errors import UserError

FOLDER = "tensorboard"
_TAGS = {
    "loss": "loss/training",
    "val_loss": "loss/validation",
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "tokens_per_second": "tokens_per_second",
}


def require() -> None:
    """Raises UserError where the writer of the files is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError(
            '--tensorboard needs the package tensorboardX: pip install "jax-xdna[tensorboard]", or '
            "leave the flag out; metrics.jsonl and report.html need nothing more"
        )


class Writer:
    """Appends to the event files of the run in `folder`, continued after step `start`.

    TensorBoard drops what an earlier process wrote of the steps after `start`.
    """

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboardX import SummaryWriter

        # From step 0 on everything is written anew: the evaluation before the first step, too.
        again = start + 1 if start else 0
        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=again, flush_secs=10)

    def row(self, row: dict[str, Any]) -> None:
        """Adds a row of the log; what is not finite is left out."""
        for name, tag in _TAGS.items():
            if row.get(name) is not None:
                self._writer.add_scalar(tag, row[name], row["step"])

    def sample(self, step: int, text: str) -> None:
        """Adds a text, shown as it is."""
        block = "\n".join("    " + line for line in text.split("\n"))
        self._writer.add_text("sample", block, step)

    def close(self) -> None:
        self._writer.close()
