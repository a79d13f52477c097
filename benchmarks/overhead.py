"""What a small call, the import and the first call cost, against plain JAX.

    python -m benchmarks.overhead [--json FILE] [--rounds 15]

Small products through jit against XLA's f32 dot, beside a jit that only returns its argument: no
product can be faster than that. Then, in fresh processes taken in turns: the import of JAX with and
without this package, and the first 256³ product, compiled and run, of each. Products are checked
against the contract before they are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_xdna
from benchmarks._measure import bf16_oracle, deny_amx, machine, paired_ratio, paired_times

SIZES = (64, 128, 256)
CALLS = 200

IMPORT = """
import time
start = time.perf_counter()
import jax
{more}
print(time.perf_counter() - start)
"""

FIRST = """
import time
import jax, jax.numpy as jnp
import jax_xdna
x = jnp.ones((256, 256)) + 1
jax.block_until_ready(x)
start = time.perf_counter()
jax.block_until_ready(jax.jit({dot})(x, x))
print(time.perf_counter() - start)
"""

PROGRAMS = {
    "import jax": IMPORT.format(more=""),
    "import jax, jax_xdna": IMPORT.format(more="import jax_xdna"),
    "first jnp.dot": FIRST.format(dot="jnp.dot"),
    "first jax_xdna.dot": FIRST.format(dot="jax_xdna.dot"),
}


def small_calls(n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per call, in batches of calls, of a product of n³ and of an empty jit."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((n, n), np.float32) for _ in range(2))
    x, y = jnp.asarray(a), jnp.asarray(b)
    runs = {
        "ours": jax.jit(jax_xdna.dot),
        "XLA f32": jax.jit(jnp.dot),
        "empty jit": jax.jit(lambda x, y: x),
    }
    if not np.array_equal(runs["ours"](x, y), bf16_oracle(a, b)):
        sys.exit(f"{n}³ differs from the contract; not timed")

    def many(run: Callable[..., Any]) -> Callable[[], Any]:
        def calls() -> None:
            for _ in range(CALLS):
                run(x, y).block_until_ready()

        return calls

    times = paired_times({k: many(run) for k, run in runs.items()}, rounds=rounds, seconds=20)
    return {name: [t / CALLS for t in taken] for name, taken in times.items()}


def fresh_process(program: str) -> float:
    """The seconds that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    """Prints both tables; `--json` also writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds")
    parser.add_argument("--without-amx", action="store_true", help="as on a CPU without AMX")
    args = parser.parse_args()
    if args.without_amx:
        deny_amx()
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, {about['kernel']} kernel, jax {about['jax']}\n")
    print("µs per call   ours  XLA f32  empty jit   XLA f32 / ours")
    rows = []
    for n in SIZES:
        times = small_calls(n, args.rounds)
        row = {name: 1e6 * statistics.median(taken) for name, taken in times.items()}
        ratio = paired_ratio(times["XLA f32"], times["ours"])
        print(
            f"  {n:>4}³ {row['ours']:>10.1f} {row['XLA f32']:>8.1f} {row['empty jit']:>10.1f} "
            f"{ratio:>16.2f}",
            flush=True,
        )
        rows.append({"n": n, "ratio": ratio, "microseconds": row})
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(max(3, args.rounds // 3)):
        for name, program in PROGRAMS.items():
            seconds[name].append(fresh_process(program))
    print("\nseconds in a fresh process")
    for name, taken in seconds.items():
        print(f"  {name:<22} {statistics.median(taken):.2f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"machine": about, "calls": rows}
                | {"seconds": {name: statistics.median(taken) for name, taken in seconds.items()}},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
