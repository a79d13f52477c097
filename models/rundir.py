"""A run's folder: what the run was asked for, its training state, its log and its results."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from .checkpoint import write_atomically
from .errors import UserError, WriteError
from .train import State

OPTIONS = "options.json"
METRICS = "metrics.jsonl"
TOKENIZER = "tokenizer.json"
LOCK = ".lock"


class RunDir:
    """Reads and writes one run's folder. Every file is replaced at once or appended to.

    Attributes:
      keep: of the last checkpoints this many are kept.
      warn: gets the lines about what went wrong without ending the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keep = 2
        self.warn: Callable[[str], None] = lambda text: print(f"warning: {text}", flush=True)
        self._manager: ocp.CheckpointManager | None = None
        self._lock: io.TextIOWrapper | None = None
        self._writer = ThreadPoolExecutor(1)
        self._writing: tuple[str, Future[None]] | None = None

    # One process writes. The kernel drops its lock when it ends, in whatever way.

    def lock(self) -> None:
        """Makes the folder if need be, and its owner this object until `close`.

        Raises:
          UserError: it cannot be made, or a process that runs has it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"--out {self.path} cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise UserError(
                f"--out {self.path}: process {owner} is writing this run; wait for it, stop it "
                "with Ctrl-C or SIGTERM, or name another folder"
            ) from None
        except OSError as error:  # As some network file systems have it.
            self.warn(f"{self.path} cannot be locked ({error.strerror}): start no second process")
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        """Waits for what is being written and gives the folder free."""
        self._writer.shutdown()
        try:
            self.wait()
        except WriteError as error:
            self.warn(str(error))
        self._close_checkpoints()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Writing while training goes on.

    def write_later(self, what: str, work: Callable[[], None]) -> None:
        """Does the work in the background, after what was given before; warns if that failed."""
        try:
            self.wait()
        except WriteError as error:
            self.warn(str(error))
        self._writing = what, self._writer.submit(work)

    def wait(self) -> None:
        """Waits for what `write_later` began.

        Raises:
          WriteError: it failed.
        """
        if self._writing is None:
            return
        (what, future), self._writing = self._writing, None
        error = future.exception()
        if error is not None:
            self._close_checkpoints()  # Opening them again removes what is incomplete.
            raise WriteError(f"{what} could not be saved: {_reason(error)}. {self.last_saved()}")

    def last_saved(self) -> str:
        """A sentence about the newest checkpoint."""
        if not self.has_state():
            return "Nothing was saved before"
        step = self._checkpoints().latest_step()
        return f"The checkpoint of step {step} is complete and kept"

    # Training state, by orbax: a checkpoint is complete or it does not exist.

    def _checkpoints(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # It logs the traces of errors that `wait` and `load_state` tell in one line.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            folder, settings = (self.path / "state").resolve(), {}
            if jax.process_count() > 1:  # One process writes alone; orbax would wait for all.
                folder.mkdir(parents=True, exist_ok=True)
                settings["create"] = False
                settings["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                    primary_host=jax.process_index(), active_processes={jax.process_index()}
                )
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep,
                cleanup_tmp_directories=self._lock is not None,
                enable_async_checkpointing=False,  # `write_later` is, for all files alike.
                **settings,
            )
            self._manager = ocp.CheckpointManager(folder, options=options)
        return self._manager

    def _close_checkpoints(self) -> None:
        if self._manager is not None:
            with contextlib.suppress(Exception):  # After a failed write it may complain again.
                self._manager.close()
            self._manager = None

    def save_state(self, state: State, identity: dict[str, Any]) -> None:
        """Saves a state of NumPy arrays under its step, with what it must only be continued with.

        Of several processes one calls this.
        """
        manager = self._checkpoints()
        step = int(state.step)
        if manager.latest_step() != step:
            self._sync(METRICS)  # A checkpoint is never newer than the log on the disk.
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    identity=ocp.args.JsonSave({**identity, "digest": digest(state)}),
                ),
            )

    def has_state(self) -> bool:
        return (self.path / "state").is_dir() and self._checkpoints().latest_step() is not None

    def load_state(self, like: State, identity: dict[str, Any]) -> State:
        """The newest saved state that is whole, shaped like `like`; warns of newer ones that are
        not, and removes them.

        Raises:
          UserError: nothing saved, none whole, or saved by a run on other data, tokenizer or model.
        """
        if not self.has_state():
            raise UserError(f"--resume: no saved state in {self.path}")
        manager = self._checkpoints()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        damaged = []
        for step in sorted(manager.all_steps(), reverse=True):
            try:
                state = self._load(step, target, identity)
            except UserError:
                raise
            except Exception as error:  # Which one depends on the file that is damaged.
                self.warn(
                    f"the checkpoint of step {step} in {self.path} is damaged ({_reason(error)}); "
                    "continuing from the one before"
                )
                damaged.append(step)
                continue
            for bad in damaged:
                manager.delete(bad)
            return state
        raise UserError(f"--resume: no checkpoint in {self.path}/state can be read")

    def _load(self, step: int, target: Any, identity: dict[str, Any]) -> State:
        restore = self._checkpoints().restore
        saved = restore(step, args=ocp.args.Composite(identity=ocp.args.JsonRestore()))["identity"]
        for name, value in identity.items():
            if saved[name] != value:
                raise UserError(
                    f"--resume: the {name} changed since {self.path} was started "
                    f"(was {saved[name]}, is {value})"
                )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        state = State(*restore(step, args=args)["state"])
        if digest(state) != saved["digest"]:
            raise ValueError("its arrays are not those that were saved")
        return state

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
        """Raises WriteError when it cannot: the log would have a gap."""
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            with contextlib.suppress(WriteError):  # Of the same disk.
                self.wait()
            raise WriteError(
                f"{self.path / name}: {error.strerror}. {self.last_saved()}; continue with --resume"
            ) from error

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

    def _sync(self, name: str) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            os.fsync(file.fileno())


def _reason(error: BaseException) -> str:
    """One line. What TensorStore tells from outermost to innermost ends with what matters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else "…" + text[-200:]


def digest(state: Any) -> str:
    """A hash of every bit of a tree's arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return found.hexdigest()
