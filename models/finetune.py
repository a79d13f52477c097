"""Trains GPT-2 on text, its matrix products on the NPU or the emulated device.

`python -m models.finetune --help` lists the flags; without any, it trains a small model on this
Python's standard library.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jax_xdna

from . import checkpoint, lora, report, train
from .energy import Meter
from .errors import UserError, WriteError
from .follow import follow, initial_state, prepare_together
from .gpt2 import GPT2
from .join import join
from .options import parse, parse_policy
from .prepare import Run
from .processes import Processes
from .rundir import METRICS, OPTIONS, TOKENIZER
from .seeing import FP32_METRICS, REPORT, SAMPLES, Seeing, describe_share
from .trainer import Trainer

SUMMARY = "summary.json"


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a request to save and stop."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        old = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step; once more stops at once", flush=True)


def execute(run: Run, processes: Processes) -> int:
    """Trains, saves and reports. Returns the exit code."""
    options, folder = run.options, run.folder
    model, policy = GPT2(run.config), parse_policy(options.policy)

    def offload(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax_xdna.offload(fn, policy=policy, device=options.device)

    def save(state: train.State) -> None:
        # A copy: the next step works in the memory of `state` while this one is written.
        copy = jax.tree.map(np.array, processes.local(state))
        base = processes.local(trainer.base)

        def write() -> None:
            folder.save_state(copy, identity)
            params = (
                lora.merge(base, copy.params, options.lora_scale) if options.lora else copy.params
            )
            checkpoint.save_params(folder.path, run.config, params)

        folder.write_later(f"step {int(copy.step)}", write)

    def stopped() -> bool:
        return processes.any(interrupt.requested)

    def reference() -> Trainer:
        return Trainer(options, model, run.corpus, lambda fn: fn, processes)

    trainer, interrupt = Trainer(options, model, run.corpus, offload, processes), Interrupt()
    state = begin(run, trainer)
    start = int(state.step)
    if not processes.leads:
        with interrupt.handled():
            follow(run, trainer, reference, state, stopped)
        return 0
    identity = run.identity()
    args = (state, *trainer.example(), trainer.base)
    dots = jax_xdna.explain(
        trainer.train_step, *args, policy=policy, device=options.device, print=False
    )
    share, flops = describe_share(dots)
    describe(run, share, flops, state, processes)
    seeing = Seeing(run, model, start, dots, processes.local)

    with interrupt.handled(), contextlib.closing(seeing):
        print(f"compiled in {trainer.compile(state):.1f} s\n", flush=True)
        began = time.perf_counter()
        with report.Display(options.steps, start) as display, jax_xdna.profile() as profile:

            def log(row: dict[str, Any]) -> None:
                folder.append_metrics(row)
                display.show(row)
                seeing.log(row)

            folder.warn = lambda text: display.note(f"warning: {text}")
            outcome = trainer.run(state, log, save, stopped, seeing.evaluated)
        folder.wait()
        seconds = time.perf_counter() - began
        step = int(outcome.state.step)
        seeing.spent("training", seeing.energy, seconds, outcome.tokens)
        if step < options.steps:
            seeing.write(step, {"tokens_per_second": outcome.tokens_per_second}, profile, seconds)
            print(f"stopped at step {step} of {options.steps}; all of it is saved. To continue:")
            print(f"  python -m models.finetune --out {folder.path} --resume")
            return 0
        rows = folder.read_metrics()
        val_loss = [row["val_loss"] for row in rows if "val_loss" in row][-1]
        summary = {
            "val_loss": val_loss,
            "val_perplexity": report.perplexity(val_loss),
            "offloaded_flop_share": share,
            "tokens_per_second": outcome.tokens_per_second,
            "seconds": seconds,
            "skipped_steps": int(outcome.state.opt_state.total_notfinite),
        }
        if step == start:  # Nothing was left to train: the speed is that of the run before.
            summary |= folder.read_json(SUMMARY) if folder.has(SUMMARY) else {}
        show_results(summary, seeing.last_sample())
        print(f"\nWhere {seconds:.1f} s went, training and evaluation:\n")
        print(report.stage_table(profile, seconds))
        print("\n" + "\n".join(seeing.facts(profile)))
        fp32_rows = []
        if options.compare:
            fp32_rows = compare(run, reference(), rows, summary, stopped, seeing)
        seeing.write(step, summary, profile, seconds)
    report.plot_losses(folder.path / "loss.png", rows, fp32_rows)
    folder.write_json(SUMMARY, summary)
    names = (checkpoint.WEIGHTS, checkpoint.CONFIG, METRICS, SAMPLES, REPORT, "loss.png", SUMMARY)
    print(f"\nSaved in {folder.path}: {', '.join(names)}")
    print(f'More text: python -m models.generate {folder.path} --prompt "…"')
    return 0


def begin(run: Run, trainer: Trainer) -> train.State:
    """The state that training starts from, on every device, and the folder it is kept in."""
    processes, folder = trainer.processes, run.folder

    def saved_or_new() -> train.State:
        state = initial_state(run, trainer)
        if processes.leads:
            folder.keep = run.options.keep
            folder.lock()
            if folder.has(OPTIONS) and not run.options.resume:
                raise UserError(f"--out {folder.path}: another process has just begun a run there")
            resumed = run.options.resume and folder.has_state()
            if resumed:
                state = folder.load_state(state, run.identity())
            begin_folder(run, int(state.step) if resumed else None)
        return state

    return trainer.place(processes.together(saved_or_new))


def begin_folder(run: Run, step: int | None) -> None:
    """Fills the folder, or drops log rows after the step that is resumed from."""
    path = run.folder.path
    run.folder.write_json(OPTIONS, run.options.stored())
    checkpoint.save_config(path, run.config, run.tokenizer.end)
    checkpoint.write_atomically(path / TOKENIZER, run.tokenizer.to_json().encode())
    # From step 0, too, the loop writes all rows, as it evaluates first.
    run.folder.cut_metrics(step or -1)


def describe(run: Run, share: float, flops: int, state: train.State, processes: Processes) -> None:
    """Prints what is about to run."""
    o, c = run.options, run.config
    size = sum(leaf.size for leaf in checkpoint.abstract_params(c).values())
    trainable = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    adapters = ""
    if o.lora:
        adapters = (
            f"lora    rank {o.lora}, alpha {o.lora_scale * o.lora:g} on {', '.join(o.targets)}: "
            f"{trainable:,} trainable parameters of {size + trainable:,}\n"
        )
    source = f"from {o.init}" if o.init else f"{o.model or 'small'}, new weights"
    text = " ".join(o.data) if o.data else "the standard library of this Python"
    device = next(d for d in jax_xdna.devices() if o.device in (None, d.name))
    per_step = f"{o.tokens_per_step:,} tokens per step"
    accumulated = f"{o.accumulation} × " if o.accumulation > 1 else ""
    shared = f"; on {processes.devices} devices" if processes.mesh else ""
    if processes.count > 1:
        shared += f" of {processes.count} processes"
    print(
        f"model   {source}: {size / 1e6:.1f} M parameters, {c.n_layer} layers, width {c.n_embd}, "
        f"vocabulary {c.vocab_size}\n"
        f"{adapters}"
        f"data    {text}: {len(run.corpus.train):,} tokens, {len(run.corpus.validation):,} for "
        f"validation, {run.corpus.documents} documents\n"
        f"steps   {int(state.step)}–{o.steps}, {per_step} "
        f"({accumulated}{o.batch_size} × {o.block}), {o.optimizer}, "
        f"peak lr {o.learning_rate:g} ({o.schedule}){shared}\n"
        f"device  {device.name} ({device.description}), policy {o.policy}: {share:.1%} of "
        f"{flops / 1e9:.3g} GFLOP per step\n"
        f"folder  {run.folder.path}",
        flush=True,
    )


def show_results(summary: dict[str, Any], sample: str | None) -> None:
    """Prints losses, speed and a sample."""
    print(
        f"\nvalidation loss {report.number(summary['val_loss'], '.4f')}, "
        f"perplexity {report.number(summary['val_perplexity'], '.3f')}\n"
        f"{summary['offloaded_flop_share']:.1%} of matmul FLOPs offloaded, "
        f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['skipped_steps']} steps skipped"
    )
    if sample is not None:
        print("\nA sample:\n\n" + "\n".join("  │ " + line for line in sample.split("\n")))


def compare(
    run: Run,
    trainer: Trainer,
    ours: list[dict[str, Any]],
    summary: dict[str, Any],
    stopped: Callable[[], bool],
    seeing: Seeing,
) -> list[dict[str, Any]]:
    """Trains the same steps on plain fp32 XLA; prints both and adds to the summary.

    Returns the rows of its log.
    """
    print("\nThe same steps on plain fp32 XLA:\n")
    folder, steps = run.folder, run.options.steps
    state = trainer.place(initial_state(run, trainer))
    trainer.compile(state)
    folder.cut_metrics(-1, FP32_METRICS)
    meter, began = Meter(), time.perf_counter()
    with report.Display(steps, label="fp32") as display:

        def log(row: dict[str, Any]) -> None:
            folder.append_metrics(row, FP32_METRICS)
            display.show(row)
            meter.update()

        outcome = trainer.run(state, log, lambda state: None, stopped)
    seeing.spent("plain fp32", meter, time.perf_counter() - began, outcome.tokens)
    rows = folder.read_metrics(FP32_METRICS)
    if int(outcome.state.step) < steps:
        print("comparison stopped; --resume --compare starts it again")
        return rows
    loss = [row["val_loss"] for row in rows if "val_loss" in row][-1]
    summary["fp32_val_loss"] = loss
    summary["fp32_val_perplexity"] = report.perplexity(loss)
    summary["fp32_tokens_per_second"] = outcome.tokens_per_second
    print("\nTraining loss, mean of the steps named:\n")
    print(report.loss_table(ours, rows))
    a, b = summary["val_perplexity"], summary["fp32_val_perplexity"]
    difference = f"{a / b - 1:+.3%}" if a and b else "not finite"
    print(
        f"\nvalidation perplexity {report.number(a, '.4f')} offloaded, "
        f"{report.number(b, '.4f')} fp32: difference {difference}\n"
        f"tokens/s {summary['tokens_per_second']:,.0f} offloaded, "
        f"{outcome.tokens_per_second:,.0f} fp32"
    )
    return rows


def main(argv: list[str] | None = None) -> int:
    try:
        processes = join(parse(argv))
        with processes.ending_together():
            run = prepare_together(argv, processes)
            with contextlib.closing(run.folder):
                return execute(run, processes)
    except (UserError, WriteError) as error:
        print(f"models.finetune: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
