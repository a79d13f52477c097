"""Matrix products: ours, XLA f32, XLA bf16 and OpenBLAS sgemm in one run.

    python -m benchmarks.gemm [--json FILE] [--sets gpt2 cubes skinny batches] [--tokens 256 1024]
                              [--rounds 15] [--without-amx]

The sets: the 12 products of a GPT-2 124M training step, cubes, the thin ones of decoding (which
the default policy leaves to XLA), and batches as in attention. Every rival gets the operands in its
own dtype and returns float32: ours and XLA f32 read float32 (ours rounds inside the call), XLA bf16
reads bfloat16 that was rounded beforehand at no charge, OpenBLAS (SciPy, `pip install .[bench]`)
writes to an array at hand. It runs in a process of its own, in turns with the others.
XLA multiplies bf16 with the matrix units (AMX) of a Xeon that has them, which no Ryzen does;
`--without-amx` shows the rival that such a CPU would see.
Results are checked against the contract, bit for bit on sampled rows and columns, before timing.
Below the table: the FMA peak of one core and of all, and what the tile kernel and 2048³ make of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_xdna
from benchmarks._measure import (
    bf16_oracle,
    deny_amx,
    geometric_mean,
    has_amx,
    machine,
    paired_ratio,
    paired_times,
)
from benchmarks._openblas import OpenBlas
from jax_xdna import _ffi


@dataclass(frozen=True)
class Product:
    """C (m, n) = A (m, k) · B (k, n); a T in `layout`: that operand is stored transposed."""

    name: str
    layout: str
    m: int
    k: int
    n: int
    batch: int = 1


def gpt2_products(tokens: int) -> list[Product]:
    """The 12 distinct (M, K, N) of a GPT-2 124M step with `tokens` tokens, for the use named first.

    The head is tied to the token embedding (vocabulary padded to 50304), so its forward product is
    NT and its dX is NN; the dense layers are NN forward, NT for dX, TN for dW.
    """
    t = tokens
    return [
        Product("qkv", "NN", t, 768, 2304),
        Product("attention out", "NN", t, 768, 768),
        Product("mlp in", "NN", t, 768, 3072),
        Product("mlp out", "NN", t, 3072, 768),
        Product("head", "NT", t, 768, 50304),
        Product("qkv dX", "NT", t, 2304, 768),
        Product("head dX", "NN", t, 50304, 768),
        Product("qkv dW", "TN", 768, t, 2304),
        Product("attention out dW", "TN", 768, t, 768),
        Product("mlp in dW", "TN", 768, t, 3072),
        Product("mlp out dW", "TN", 3072, t, 768),
        Product("head dW", "TN", 50304, t, 768),
    ]


def products(name: str, tokens: list[int]) -> list[Product]:
    """One of the sets."""
    if name == "gpt2":
        return [product for t in tokens for product in gpt2_products(t)]
    if name == "cubes":
        return [Product(f"{n} cubed", "NN", n, n, n) for n in (64, 128, 256, 512, 1024, 2048)]
    if name == "skinny":
        return [Product(f"decode {t}", "NN", t, 768, 3072) for t in (1, 4, 16)]
    heads = 4 * 12
    return [
        Product("attention scores", "NT", 256, 64, 256, heads),
        Product("attention values", "NN", 256, 256, 64, heads),
        Product("batch of 8", "NN", 256, 256, 256, 8),
    ]


SETS = ("gpt2", "cubes", "skinny", "batches")


@dataclass(frozen=True)
class Row:
    """A line of the table: GFLOP/s of the median call, and medians of the ratios of rounds."""

    set: str
    name: str
    layout: str
    batch: int
    m: int
    k: int
    n: int
    ours_gflops: float
    xla_f32_gflops: float
    xla_bf16_gflops: float
    openblas_gflops: float | None
    ratio_f32: float
    ratio_bf16: float
    ratio_openblas: float | None
    threads: float


def measure(
    group: str, product: Product, rounds: int, seconds: float, openblas: OpenBlas | None
) -> Row:
    """Checks one product and times it against its rivals."""
    m, k, n, batch = product.m, product.k, product.n, product.batch
    ta, tb = product.layout[0] == "T", product.layout[1] == "T"
    random = np.random.default_rng(0)
    lead = (batch,) if batch > 1 else ()
    a = random.standard_normal((*lead, k, m) if ta else (*lead, m, k), np.float32)
    b = random.standard_normal((*lead, n, k) if tb else (*lead, k, n), np.float32)
    at = len(lead)
    both = tuple(range(at))
    dims = (((at + (0 if ta else 1),), (at + (1 if tb else 0),)), (both, both))

    ours = jax.jit(lambda x, y: jax_xdna.dot_general(x, y, dims))
    xla = jax.jit(lambda x, y: lax.dot_general(x, y, dims, preferred_element_type=jnp.float32))
    wide = jnp.asarray(a), jnp.asarray(b)
    narrow = wide[0].astype(jnp.bfloat16), wide[1].astype(jnp.bfloat16)
    got, last = np.asarray(ours(*wide)), -1 if batch > 1 else ...
    check(product, got[last], a[last].T if ta else a[last], b[last].T if tb else b[last])

    runs = {
        "ours": lambda: ours(*wide),
        "f32": lambda: xla(*wide),
        "bf16": lambda: xla(*narrow),
    }
    with jax_xdna.profile() as profile:
        times = paired_times(runs, rounds=rounds, seconds=seconds)
        rate = {name: 2e-9 * batch * m * k * n / np.median(taken) for name, taken in times.items()}
        threads = sum(row.threads for row in profile.rows) / profile.calls
        pairs = []
        if openblas is not None and batch == 1:
            # Blocks of calls in turns: OpenBLAS's threads spin for a while after each of theirs.
            calls = max(2, min(10, round(0.1 / float(np.median(times["ours"])))))
            for _ in range(5):
                block = paired_times({"ours": runs["ours"]}, rounds=calls, seconds=60)["ours"]
                rivals = openblas.times(product.layout, m, k, n, calls)
                pairs.append((statistics.median(block), statistics.median(rivals)))
    blas = statistics.median(rival for _, rival in pairs) if pairs else None
    return Row(
        set=group,
        **asdict(product),
        ours_gflops=float(rate["ours"]),
        xla_f32_gflops=float(rate["f32"]),
        xla_bf16_gflops=float(rate["bf16"]),
        openblas_gflops=2e-9 * m * k * n / blas if blas else None,
        ratio_f32=paired_ratio(times["f32"], times["ours"]),
        ratio_bf16=paired_ratio(times["bf16"], times["ours"]),
        ratio_openblas=statistics.median(r / o for o, r in pairs) if pairs else None,
        threads=threads,
    )


def check(product: Product, got: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Exits unless sampled elements have the bits of the contract."""
    random = np.random.default_rng(1)
    rows = np.unique(np.append(random.integers(0, product.m, 30), [0, product.m - 1]))
    columns = np.unique(np.append(random.integers(0, product.n, 30), [0, product.n - 1]))
    want = bf16_oracle(a[rows], b[:, columns])
    wrong = int(np.sum(got[np.ix_(rows, columns)] != want))
    if wrong or not np.isfinite(got).all():
        sys.exit(
            f"{product.name}: {wrong} of {want.size} sampled elements differ from the contract; "
            "not timed"
        )


RATIOS = {"f32": "ratio_f32", "bf16": "ratio_bf16", "openblas": "ratio_openblas"}


def summarize(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Geometric means and minima of the ratios, per set and, for GPT-2, per layout."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.set, []).append(row)
        if row.set == "gpt2":
            groups.setdefault(f"gpt2 {row.layout}", []).append(row)
    summary: dict[str, dict[str, float]] = {}
    for name, group in groups.items():
        summary[name] = {}
        for rival, field in RATIOS.items():
            values = [value for row in group if (value := getattr(row, field)) is not None]
            if values:
                summary[name] |= {
                    f"{rival}_geomean": geometric_mean(values),
                    f"{rival}_min": min(values),
                }
    return summary


def peaks(rounds: int = 40, steps: int = 20000) -> dict[str, float]:
    """FMA peak and tile kernel of one core, and the FMA peaks of all cores at once, in GFLOP/s.

    The kernel's share is the best of its paired samples: other guests of a shared machine slow
    both, and not alike.
    """
    pairs = [_ffi.kernel_rates(steps) for _ in range(rounds)]
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        sums = [
            sum(peak for peak, _ in pool.map(_ffi.kernel_rates, [steps] * cores))
            for _ in range(rounds)
        ]
    return {
        "fma_peak": 1e-9 * statistics.median(peak for peak, _ in pairs),
        "tile_kernel": 1e-9 * statistics.median(tile for _, tile in pairs),
        "tile_share_median": statistics.median(tile / peak for peak, tile in pairs),
        "tile_share_p90": sorted(tile / peak for peak, tile in pairs)[int(0.9 * rounds)],
        "fma_peak_all_cores": 1e-9 * statistics.median(sums),
    }


def main() -> None:
    """Prints the table; `--json` also writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write rows and summary there")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="what to multiply")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 1024], help="M of the GPT-2 products"
    )
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds per product")
    parser.add_argument("--seconds", type=float, default=3.0, help="time limit per product")
    parser.add_argument(
        "--without-amx", action="store_true", help="run as on a CPU without matrix units"
    )
    args = parser.parse_args()
    amx = has_amx() and not args.without_amx
    if args.without_amx:
        deny_amx()
    about = {**machine(), "amx": amx}
    print(f"{about['cpu']}, {about['cores']} cores, {about['kernel']} kernel, jax {about['jax']}")
    if amx:
        print(
            "XLA bf16 runs on this CPU's matrix units, as it cannot on a Ryzen: see --without-amx"
        )
    try:
        openblas = OpenBlas()
    except ImportError:
        openblas = None
        print("no SciPy here, so no OpenBLAS: pip install .[bench]")
    print("GFLOP/s of the median call; ratios above 1 say that ours is faster\n")
    print(
        f"{'product':<17} {'layout':<6} {'batch':>5} {'M':>6} {'K':>6} {'N':>6} {'ours':>6} "
        f"{'f32':>6} {'bf16':>6} {'BLAS':>6} {'vs f32':>7} {'vs bf16':>8} {'vs BLAS':>8} "
        f"{'threads':>8}"
    )
    rows = []
    for group in args.sets:
        for product in products(group, args.tokens):
            row = measure(group, product, args.rounds, args.seconds, openblas)
            rows.append(row)
            blas, ratio = row.openblas_gflops, row.ratio_openblas
            print(
                f"{row.name:<17} {row.layout:<6} {row.batch:>5} {row.m:>6} {row.k:>6} {row.n:>6} "
                f"{row.ours_gflops:>6.1f} {row.xla_f32_gflops:>6.1f} {row.xla_bf16_gflops:>6.1f} "
                + (f"{blas:>6.1f}" if blas else f"{'-':>6}")
                + f" {row.ratio_f32:>7.2f} {row.ratio_bf16:>8.2f} "
                + (f"{ratio:>8.2f}" if ratio else f"{'-':>8}")
                + f" {row.threads:>8.2f}",
                flush=True,
            )
    summary = summarize(rows)
    print("\nratio            " + "".join(f"{rival + ' mean':>15}{'min':>6}" for rival in RATIOS))
    for name, group in summary.items():
        cells = [
            f"{group[f'{r}_geomean']:>15.2f}{group[f'{r}_min']:>6.2f}"
            if f"{r}_geomean" in group
            else f"{'-':>15}{'-':>6}"
            for r in RATIOS
        ]
        print(f"{name:<17}" + "".join(cells))
    peak = peaks()
    print(
        f"\nFMA peak of a core {peak['fma_peak']:.0f} GFLOP/s; the tile kernel reaches "
        f"{peak['tile_share_median']:.3f} of it (90th percentile {peak['tile_share_p90']:.3f}); "
        f"all cores {peak['fma_peak_all_cores']:.0f}"
    )
    for row in rows:
        if row.name == "2048 cubed":
            share = row.ours_gflops / peak["fma_peak_all_cores"]
            print(f"2048 cubed reaches {share:.2f} of all cores' peak")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"machine": about, "peak": peak, "summary": summary}
                | {"rows": [asdict(row) for row in rows]},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
