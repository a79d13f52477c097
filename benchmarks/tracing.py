"""What `offload` costs before the first step of a GPT-2 124M train step, and in every later call.

    python -m benchmarks.tracing [--json FILE] [--preset gpt2] [--rounds 5]

Tracing: `jax.jit(step).trace(…)` of the whole step (forward, backward, AdamW), with all of JAX's
caches empty, with and without `offload`; below it the next stage, lowering for XLA. Nothing is
allocated or compiled. Both are Python on one thread, so the times are CPU seconds of that thread:
other programs on the machine disturb them less.
Cached calls: a compiled step small enough that a call is mostly dispatch, with and without
`offload`, where the policy leaves every dot to XLA, so both run the same program.
Both are checked before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_xdna
from benchmarks._measure import machine, paired_ratio, paired_times
from jax_xdna import _jax_compat as compat
from models import optimizers, train
from models.gpt2 import GPT2, PRESETS

TARGET = 1.3
STAGES = ("trace", "lower")
Step = Callable[..., Any]


def make_step(model: GPT2) -> tuple[Step, Any]:
    """A new step of the fine-tuner, which no cache knows, and the shapes of its state."""
    schedule = optimizers.schedule(1e-4, 10, 100)
    tx = optimizers.optimizer(schedule)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def init(tokens: jax.Array) -> train.State:
        return train.init_state(model.init(jax.random.key(0), tokens)["params"], tx)

    return train.make_train_step(model, tx, schedule, seed=0), jax.eval_shape(init, tokens)


def primitive_counts(jaxpr: Any) -> dict[str, int]:
    """How often each primitive occurs, nested jaxprs included."""
    found: dict[str, int] = {}
    for eqn in compat.equations(jaxpr):
        found[eqn.primitive.name] = found.get(eqn.primitive.name, 0) + 1
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if compat.is_jaxpr(item):
                    for name, n in primitive_counts(item).items():
                        found[name] = found.get(name, 0) + n
    return found


def trace_times(preset: str, rounds: int) -> dict[str, Any]:
    """CPU seconds to trace and to lower the step, per round; ours and plain JAX in turns."""
    model = GPT2(PRESETS[preset])
    _, state = make_step(model)
    tokens = jax.ShapeDtypeStruct((1, 4, 65), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, 4, 64), jnp.float32)
    always = jax_xdna.Policy.always()
    wraps: dict[str, Callable[[Step], Step]] = {
        "plain": lambda step: step,
        "offload": functools.partial(jax_xdna.offload, policy=always),
    }

    dots = primitive_counts(jax.make_jaxpr(make_step(model)[0])(state, tokens, weights))
    ours = jax.make_jaxpr(wraps["offload"](make_step(model)[0]))(state, tokens, weights)
    taken = primitive_counts(ours)
    if taken.get("jax_xdna_gemm") != dots["dot_general"] or "dot_general" in taken:
        sys.exit(f"offload took {taken.get('jax_xdna_gemm', 0)} of {dots['dot_general']} dots")

    times: dict[str, list[float]] = {f"{name} {what}": [] for name in wraps for what in STAGES}
    order = list(wraps)
    for _ in range(rounds):
        for name in order:
            step = wraps[name](make_step(model)[0])
            jax.clear_caches()
            gc.collect()
            start = time.thread_time()
            traced = jax.jit(step).trace(state, tokens, weights)
            middle = time.thread_time()
            traced.lower()
            times[f"{name} trace"].append(middle - start)
            times[f"{name} lower"].append(time.thread_time() - middle)
        order.reverse()
    return {"dots": dots["dot_general"], "times": times}


def call_times(rounds: int) -> dict[str, list[float]]:
    """Seconds per cached call of a tiny step that is donated its state, in batches of calls."""

    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(state: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean(jnp.tanh(x @ state["w"] + state["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads), value

    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((4, 8)), jnp.float32)
    w = random.standard_normal((8, 8)).astype(np.float32)
    traces = {"plain": 0, "offload": 0}

    def counted(name: str) -> Step:
        def run(*args: Any) -> Any:
            traces[name] += 1
            return step(*args)

        return run

    never = jax_xdna.Policy.never()
    steps = {
        "plain": jax.jit(counted("plain"), donate_argnums=0),
        "offload": jax.jit(jax_xdna.offload(counted("offload"), policy=never), donate_argnums=0),
    }

    def run(name: str, calls: int) -> Any:
        state, value = {"w": jnp.asarray(w), "b": jnp.zeros((1, 8))}, None
        for _ in range(calls):
            state, value = steps[name](state, x)
        return state, value

    first, second = (jax.tree.leaves(run(name, 5)) for name in steps)
    if not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)):
        sys.exit("offload with Policy.never() changed a result; not timed")
    calls = 2000
    times = paired_times(
        {name: functools.partial(run, name, calls) for name in steps}, rounds=rounds, seconds=60
    )
    if traces != {"plain": 1, "offload": 1}:
        sys.exit(f"a cached call traced again: {traces}")
    return {name: [t / calls for t in taken] for name, taken in times.items()}


def main() -> None:
    """Prints both tables; `--json` also writes them. Exits with 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    parser.add_argument("--preset", default="gpt2", choices=PRESETS, help="model to trace")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    args = parser.parse_args()
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, jax {about['jax']}\n")

    traced = trace_times(args.preset, args.rounds)
    print(
        f"train step of {args.preset}, {traced['dots']} dots, all offloaded; CPU seconds (median)"
    )
    rows: dict[str, dict[str, float]] = {}
    for stage in STAGES:
        plain, ours = (traced["times"][f"{name} {stage}"] for name in ("plain", "offload"))
        rows[stage] = compared(plain, ours)
        row = rows[stage]
        print(
            f"  {stage:<6} plain {row['plain']:.2f}  offload {row['offload']:.2f}  "
            f"ratio {row['ratio']:.2f}"
        )
    calls = call_times(max(args.rounds, 9))
    rows["cached call"] = row = compared(calls["plain"], calls["offload"])
    print(
        f"\ncached call of a tiny step, µs (median)\n  plain {1e6 * row['plain']:.1f}  "
        f"offload {1e6 * row['offload']:.1f}  ratio {row['ratio']:.3f}"
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": about, "dots": traced["dots"], "rows": rows}, file, indent=1)
    if rows["trace"]["ratio"] > TARGET:
        sys.exit(f"tracing takes {rows['trace']['ratio']:.2f}× as long; the target is {TARGET}")


def compared(plain: list[float], ours: list[float]) -> dict[str, float]:
    """Medians, and the median over rounds of offload / plain."""
    return {
        "plain": statistics.median(plain),
        "offload": statistics.median(ours),
        "ratio": paired_ratio(ours, plain),
    }


if __name__ == "__main__":
    main()
