"""What the other processes of a run do: take the leader's word, and train along in step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers

from . import data, train
from .errors import UserError
from .gpt2 import GPT2, Config
from .options import PER_PROCESS, flag, from_stored, parse
from .prepare import Run, prepare
from .processes import Processes
from .rundir import RunDir
from .tokenizer import Tokenizer
from .trainer import Trainer

# Flags that each machine has its own of.
_OWN = {"data", "device", "out", "resume", *PER_PROCESS}


def prepare_together(argv: list[str] | None, processes: Processes) -> Run:
    """What `prepare` makes of the flags, by the leader; the others take it over.

    Only the leader looks at --out, --init and --tokenizer. All read --data.

    Raises:
      UserError: what `prepare` raises; flags or data that are not the leader's.
    """
    run = processes.together(lambda: prepare(argv) if processes.leads else None)
    if processes.count == 1 and run:
        return run
    told = processes.gather(run and _told(run))[0]
    run = processes.together(lambda: run or _take_over(told, parse(argv)))
    fingerprints = processes.gather(run.corpus.fingerprint())
    for index, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise UserError(
                f"process {index} reads other text than process 0: every machine needs the same "
                "files behind --data (the default, the standard library, differs between Pythons)"
            )
    return run


def _told(run: Run) -> dict[str, Any]:
    return {
        "options": run.options.stored(),
        "out": str(run.folder.path),
        "model": dataclasses.asdict(run.config),
        "tokenizer": run.tokenizer.to_json(),
    }


def _take_over(told: dict[str, Any], given: dict[str, Any]) -> Run:
    leaders = from_stored({**told["options"], "device": None})
    for name, value in given.items():
        theirs = getattr(leaders, name)
        if name not in _OWN and value != theirs:
            theirs = "not given" if theirs is None else theirs
            raise UserError(
                f"{flag(name)} is {value}, but {theirs} in process 0: start all processes with the "
                "same flags"
            )
    options = dataclasses.replace(leaders, **given)
    config = Config(**told["model"])
    tokens = Tokenizer(tokenizers.Tokenizer.from_str(told["tokenizer"]), "of process 0")
    files = data.find_files(options.data) if options.data else data.stdlib_files()

    def shapes() -> Any:
        key = jax.random.key(0)
        return jax.eval_shape(GPT2(config).init, key, jnp.zeros((1, 1), jnp.int32))["params"]

    folder = RunDir(Path(told["out"]))
    corpus = data.build(files, tokens, options.text_field)
    return Run(options, folder, tokens, config, corpus, shapes)


def initial_state(run: Run, trainer: Trainer) -> train.State:
    """The state before the first step on the leader, and its shapes elsewhere; not replicated."""
    params = run.initial_params()
    if trainer.processes.leads:
        return trainer.begin(params)
    state = jax.eval_shape(trainer.begin, params)
    trainer.base = params if run.options.lora else None  # Not what the trace left there.
    return state


def follow(
    run: Run,
    trainer: Trainer,
    reference: Callable[[], Trainer],
    state: train.State,
    stopped: Callable[[], bool],
) -> None:
    """Makes the leader's steps, and those of `reference` to compare; shows and writes nothing."""
    processes, steps = trainer.processes, run.options.steps
    print(
        f"process {processes.index} of {processes.count} trains along from step {int(state.step)}; "
        "process 0 shows, samples and saves",
        flush=True,
    )

    def train_along(trainer: Trainer, state: train.State) -> int:
        trainer.compile(state)
        outcome = trainer.run(state, lambda row: None, lambda state: None, stopped)
        return int(outcome.state.step)

    step = train_along(trainer, state)
    if step == steps and run.options.compare:
        other = reference()
        train_along(other, other.place(initial_state(run, other)))
    print(f"process {processes.index}: stopped at step {step} of {steps}", flush=True)
