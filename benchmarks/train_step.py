"""One optimizer step of GPT-2: through `offload`, stock JAX in f32 and bf16, and PyTorch f32.

    python -m benchmarks.train_step [--json FILE] [--cases 124m-64 124m-256 default] [--rounds 7]
                                    [--busy 0] [--without-amx] [--memory]

Same weights, same tokens, same AdamW with clipping; the losses of the first steps are compared
before anything is timed. Stock bf16 is the usual mixed precision: fp32 master weights, cast to
bf16 for the forward and backward pass. PyTorch runs the model of transformers in a process of its
own, in turns with the others (with `pip install .[bench]`). `--busy 1` keeps one other process
computing all the time. `--memory` instead runs each JAX variant alone in a process, as it is and
with glibc's malloc on huge pages, and prints peak memory, page faults and seconds per step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_xdna
from benchmarks._measure import deny_amx, machine, paired_ratio
from models import checkpoint, optimizers, train
from models.gpt2 import GPT2, PRESETS, Config

LEARNING_RATE = 3e-4
VARIANTS = ("offload", "stock f32", "stock bf16")
HUGE_PAGES = "glibc.malloc.hugetlb=1"


@dataclass(frozen=True)
class Case:
    """A model and the shape of its batch."""

    config: Config
    batch: int
    length: int


CASES = {
    "124m-64": Case(PRESETS["gpt2"], 4, 64),
    "124m-256": Case(PRESETS["gpt2"], 4, 256),
    "default": Case(dataclasses.replace(PRESETS["small"], vocab_size=257), 16, 64),
}


class Narrow:
    """A model that computes in bf16 from fp32 weights and gives fp32 logits."""

    def __init__(self, model: GPT2) -> None:
        self.model, self.config = model, model.config

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> jax.Array:
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables)
        return self.model.apply(narrow, *args, **kwargs).astype(jnp.float32)


class Trained:
    """A variant with its own state; `step()` trains once and returns the loss."""

    def __init__(self, variant: str, case: Case, params: Any, tokens: np.ndarray) -> None:
        model: Any = GPT2(case.config)
        if variant == "stock bf16":
            model = Narrow(model)
        rate = lambda step: jnp.float32(LEARNING_RATE)  # noqa: E731
        tx = optimizers.optimizer(LEARNING_RATE)
        step = train.make_train_step(model, tx, rate, seed=0)
        if variant == "offload":
            step = jax_xdna.offload(step)
        self._step = jax.jit(step, donate_argnums=0)
        self._state = train.init_state(jax.tree.map(jnp.copy, params), tx)
        self._tokens = tokens[None]
        self._weights = np.ones((1, case.batch, case.length), np.float32)

    def step(self) -> float:
        self._state, metrics = self._step(self._state, self._tokens, self._weights)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])


class Torch:
    """The same step in a process that runs PyTorch."""

    def __init__(self, case: Case, params: Any, tokens: np.ndarray, folder: Path) -> None:
        checkpoint.save_config(folder, case.config, 0)
        checkpoint.save_params(folder, case.config, params)
        np.save(folder / "tokens.npy", tokens)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._torch_step"]
            + [str(folder), str(folder / "tokens.npy"), str(LEARNING_RATE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the process that runs PyTorch has ended")
        return line

    def step(self) -> tuple[float, float]:
        """Loss and seconds; then a pause for its threads to fall asleep."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        loss, seconds = map(float, self._read().split())
        time.sleep(0.3)
        return loss, seconds

    def close(self) -> None:
        self._process.communicate()


def has_torch() -> bool:
    """Whether PyTorch and transformers can be imported."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def start(case: Case) -> tuple[Any, np.ndarray]:
    """Fresh weights, and tokens (batch, length + 1)."""
    shape = (case.batch, case.length + 1)
    tokens = np.random.default_rng(0).integers(0, case.config.vocab_size, shape, np.int32)
    return jax.jit(GPT2(case.config).init)(jax.random.key(0), tokens[:, :-1])["params"], tokens


def spin() -> None:
    """Keeps a core busy until the process is ended."""
    a = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    while True:
        a = np.tanh(a * 1.01)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` other processes that compute all the time."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=spin, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    try:
        time.sleep(2 if others else 0)
        yield
    finally:
        for other in others:
            other.terminate()


def compare(name: str, rounds: int, count: int) -> dict[str, Any]:
    """Compares the losses of a case's variants, then times their steps in turns."""
    case = CASES[name]
    params, tokens = start(case)
    runs: dict[str, Callable[[], tuple[float, float]]] = {}

    def timed(trained: Trained) -> Callable[[], tuple[float, float]]:
        def run() -> tuple[float, float]:
            begin = time.perf_counter()
            return trained.step(), time.perf_counter() - begin

        return run

    for variant in VARIANTS:
        runs[variant] = timed(Trained(variant, case, params, tokens))
    with tempfile.TemporaryDirectory() as folder:
        rival = Torch(case, params, tokens, Path(folder)) if has_torch() else None
        if rival:
            runs["PyTorch f32"] = rival.step
        del params

        losses = {variant: [run()[0] for _ in range(3)] for variant, run in runs.items()}
        want = losses["stock f32"]
        for variant, got in losses.items():
            bound = 2e-4 if variant == "PyTorch f32" else 5e-3
            if not np.allclose(got, want, rtol=bound):
                sys.exit(f"{name}: {variant} has losses {got}, stock f32 {want}; not timed")

        times: dict[str, list[float]] = {variant: [] for variant in runs}
        order = list(runs)
        with busy(count):
            for _ in range(rounds):
                for variant in order:
                    times[variant].append(runs[variant]()[1])
                order.reverse()
        if rival:
            rival.close()
    ours = times["offload"]
    print(f"\n{name}: {case.batch} × {case.length} tokens, {count} busy processes beside it")
    rows = {}
    for variant, taken in times.items():
        rows[variant] = {
            "seconds": statistics.median(taken),
            "over_ours": paired_ratio(taken, ours),
            "losses": losses[variant],
        }
        print(
            f"  {variant:<12} {1e3 * rows[variant]['seconds']:>8.0f} ms "
            f"{rows[variant]['over_ours']:>6.2f} × ours   loss {losses[variant][-1]:.4f}",
            flush=True,
        )
    return {"case": name, "busy": count, "rows": rows}


def measure_alone(name: str, variant: str, steps: int) -> dict[str, float]:
    """Peak memory, page faults and seconds per step of one variant, this process's own."""
    case = CASES[name]
    params, tokens = start(case)
    trained = Trained(variant, case, params, tokens)
    del params
    trained.step()
    trained.step()
    before, times = resource.getrusage(resource.RUSAGE_SELF), []
    for _ in range(steps):
        begin = time.perf_counter()
        trained.step()
        times.append(time.perf_counter() - begin)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "peak_gigabytes": after.ru_maxrss / 1e6,
        "faults_per_step": (after.ru_minflt - before.ru_minflt) / steps,
        "system_seconds_per_step": (after.ru_stime - before.ru_stime) / steps,
        "seconds": statistics.median(times),
    }


def memory(name: str, steps: int, flags: list[str]) -> dict[str, Any]:
    """Runs every variant alone, with and without huge pages for malloc, twice in turns."""
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(2):
        for variant in VARIANTS:
            for tunables in ("", HUGE_PAGES):
                label = variant + (f", {tunables}" if tunables else "")
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.train_step", "--cases", name, *flags]
                    + ["--alone", variant, "--rounds", str(steps)],
                    env={**os.environ, "GLIBC_TUNABLES": tunables},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                rows.setdefault(label, []).append(json.loads(done.stdout.splitlines()[-1]))
    print(f"\n{name}, each alone in a process     peak GB  faults/step  system s  s/step")
    table = {}
    for label, parts in rows.items():
        table[label] = row = {k: statistics.mean(part[k] for part in parts) for k in parts[0]}
        print(
            f"  {label:<34} {row['peak_gigabytes']:>6.2f} {row['faults_per_step']:>12,.0f} "
            f"{row['system_seconds_per_step']:>9.2f} {row['seconds']:>7.3f}",
            flush=True,
        )
    return {"case": name, "rows": table}


def main() -> None:
    """Prints the tables; `--json` also writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7, help="steps of each variant")
    parser.add_argument("--busy", type=int, nargs="+", default=[0], help="other processes")
    parser.add_argument("--memory", action="store_true", help="memory and page faults instead")
    parser.add_argument("--without-amx", action="store_true", help="as on a CPU without AMX")
    parser.add_argument("--alone", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.without_amx:
        deny_amx()
    if args.alone:
        print(json.dumps(measure_alone(args.cases[0], args.alone, args.rounds)))
        return
    about = {**machine(), "without_amx": args.without_amx}
    print(f"{about['cpu']}, {about['cores']} cores, {about['kernel']} kernel, jax {about['jax']}")
    if not has_torch():
        print("no PyTorch and transformers here: pip install .[bench]")
    flags = ["--without-amx"] if args.without_amx else []
    tables = [
        memory(name, args.rounds, flags) if args.memory else compare(name, args.rounds, count)
        for name in args.cases
        for count in (args.busy[:1] if args.memory else args.busy)
    ]
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": about, "tables": tables}, file, indent=1)


if __name__ == "__main__":
    main()
