"""A run's folder: what the run was asked for, its training state, its log and its results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .checkpoint import write_atomically
from .errors import UserError
from .train import State

OPTIONS = "options.json"
METRICS = "metrics.jsonl"
# Of the last checkpoints this many are kept.
_KEPT = 2


class RunDir:
    """Reads and writes one run's folder. Every file is replaced at once or appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manager: ocp.CheckpointManager | None = None

    # Training state, by orbax: a checkpoint is complete or it does not exist.

    def _checkpoints(self) -> ocp.CheckpointManager:
        if self._manager is None:
            folder, settings = (self.path / "state").resolve(), {}
            if jax.process_count() > 1:  # One process writes alone; orbax would wait for all.
                folder.mkdir(parents=True, exist_ok=True)
                settings["create"] = False
                settings["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                    primary_host=jax.process_index(), active_processes={jax.process_index()}
                )
            options = ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT, enable_async_checkpointing=False, **settings
            )
            self._manager = ocp.CheckpointManager(folder, options=options)
        return self._manager

    def save_state(self, state: State, identity: dict[str, Any]) -> None:
        """Saves the state under its step, with what it must only be continued with.

        Of several processes one calls this, with a state of NumPy arrays.
        """
        manager = self._checkpoints()
        step = int(state.step)
        if manager.latest_step() != step:
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), identity=ocp.args.JsonSave(identity)
                ),
            )

    def has_state(self) -> bool:
        return (self.path / "state").is_dir() and self._checkpoints().latest_step() is not None

    def load_state(self, like: State, identity: dict[str, Any]) -> State:
        """The newest saved state, shaped like `like`.

        Raises:
          UserError: nothing saved, or saved by a run on other data, tokenizer or model.
        """
        if not self.has_state():
            raise UserError(f"--resume: no saved state in {self.path}")
        manager = self._checkpoints()
        step = manager.latest_step()
        saved = manager.restore(step, args=ocp.args.Composite(identity=ocp.args.JsonRestore()))
        for name, value in identity.items():
            if saved["identity"].get(name) != value:
                raise UserError(
                    f"--resume: the {name} changed since {self.path} was started "
                    f"(was {saved['identity'].get(name)}, is {value})"
                )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return State(*manager.restore(step, args=args)["state"])

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    # Small files.

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, (json.dumps(value, indent=2) + "\n").encode())

    def read_json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} is not a run's folder: {name}: {error}") from error

    def append_metrics(self, row: dict[str, Any], name: str = METRICS) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self, name: str = METRICS) -> list[dict[str, Any]]:
        return list(self._rows(name))

    def cut_metrics(self, step: int, name: str = METRICS) -> None:
        """Drops the rows after `step`: a resumed run writes them again."""
        rows = [row for row in self._rows(name) if row["step"] <= step]
        content = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(self.path / name, content.encode())

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.path / name
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    return  # The last line of a killed run may be cut short.
