"""The matrix products of a GPT-2 124M training step: ours, XLA f32 and XLA bf16 in one run.

    python -m benchmarks.gemm [--json FILE] [--tokens 256] [--rounds 15] [--without-amx]

Every rival gets the operands in its own dtype and returns float32: ours and XLA f32 read float32
(ours rounds inside the call), XLA bf16 reads bfloat16 that was rounded beforehand at no charge.
XLA multiplies bf16 with the matrix units (AMX) of a Xeon that has them, which no Ryzen does;
`--without-amx` shows the rival that such a CPU would see.
Results are checked against the contract, bit for bit on sampled rows and columns, before timing.
"""

from __future__ import annotations

import argparse
import json
import sys
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


@dataclass(frozen=True)
class Product:
    """C (m, n) = A (m, k) · B (k, n); a T in `layout`: that operand is stored transposed."""

    name: str
    layout: str
    m: int
    k: int
    n: int


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


CUBES = [
    Product("1024 cubed", "NN", 1024, 1024, 1024),
    Product("2048 cubed", "NN", 2048, 2048, 2048),
]


@dataclass(frozen=True)
class Row:
    """A line of the table: GFLOP/s of the median call, and medians of the ratios of rounds."""

    name: str
    layout: str
    m: int
    k: int
    n: int
    ours_gflops: float
    xla_f32_gflops: float
    xla_bf16_gflops: float
    ratio_f32: float
    ratio_bf16: float
    threads: float


def measure(product: Product, rounds: int, seconds: float) -> Row:
    """Checks one product and times it against its rivals."""
    m, k, n = product.m, product.k, product.n
    ta, tb = product.layout[0] == "T", product.layout[1] == "T"
    random = np.random.default_rng(0)
    a = random.standard_normal((k, m) if ta else (m, k), np.float32)
    b = random.standard_normal((n, k) if tb else (k, n), np.float32)
    dims = (((0 if ta else 1,), (1 if tb else 0,)), ((), ()))

    ours = jax.jit(lambda x, y: jax_xdna.dot_general(x, y, dims))
    xla = jax.jit(lambda x, y: lax.dot_general(x, y, dims, preferred_element_type=jnp.float32))
    wide = jnp.asarray(a), jnp.asarray(b)
    narrow = wide[0].astype(jnp.bfloat16), wide[1].astype(jnp.bfloat16)
    check(product, np.asarray(ours(*wide)), a.T if ta else a, b.T if tb else b)

    with jax_xdna.profile() as profile:
        times = paired_times(
            {
                "ours": lambda: ours(*wide),
                "f32": lambda: xla(*wide),
                "bf16": lambda: xla(*narrow),
            },
            rounds=rounds,
            seconds=seconds,
        )
    rate = {name: 2e-9 * m * k * n / float(np.median(taken)) for name, taken in times.items()}
    return Row(
        **asdict(product),
        ours_gflops=rate["ours"],
        xla_f32_gflops=rate["f32"],
        xla_bf16_gflops=rate["bf16"],
        ratio_f32=paired_ratio(times["f32"], times["ours"]),
        ratio_bf16=paired_ratio(times["bf16"], times["ours"]),
        threads=sum(row.threads for row in profile.rows) / profile.calls,
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


def summarize(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Geometric means and minima of the ratios, over all rows and per layout."""
    groups = {"all": rows}
    for row in rows:
        groups.setdefault(row.layout, []).append(row)
    return {
        name: {
            "f32_geomean": geometric_mean([row.ratio_f32 for row in group]),
            "f32_min": min(row.ratio_f32 for row in group),
            "bf16_geomean": geometric_mean([row.ratio_bf16 for row in group]),
            "bf16_min": min(row.ratio_bf16 for row in group),
        }
        for name, group in groups.items()
    }


def main() -> None:
    """Prints the table; `--json` also writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write rows and summary there")
    parser.add_argument("--tokens", type=int, default=256, help="batch times block length, M")
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds per product")
    parser.add_argument("--seconds", type=float, default=4.0, help="time limit per product")
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
    print("GFLOP/s of the median call; ratios above 1 say that ours is faster\n")
    print(
        f"{'product':<17} {'layout':<6} {'M':>6} {'K':>6} {'N':>6} {'ours':>7} {'XLA f32':>8} "
        f"{'XLA bf16':>9} {'vs f32':>7} {'vs bf16':>8} {'threads':>8}"
    )
    rows = []
    for product in gpt2_products(args.tokens) + CUBES:
        row = measure(product, args.rounds, args.seconds)
        rows.append(row)
        print(
            f"{row.name:<17} {row.layout:<6} {row.m:>6} {row.k:>6} {row.n:>6} "
            f"{row.ours_gflops:>7.1f} {row.xla_f32_gflops:>8.1f} {row.xla_bf16_gflops:>9.1f} "
            f"{row.ratio_f32:>7.2f} {row.ratio_bf16:>8.2f} {row.threads:>8.2f}",
            flush=True,
        )
    summary = summarize(rows)
    print("\nratio             f32 mean  f32 min  bf16 mean  bf16 min   (geometric means)")
    for name, group in summary.items():
        print(
            f"{name:<17} {group['f32_geomean']:>8.2f} {group['f32_min']:>8.2f} "
            f"{group['bf16_geomean']:>10.2f} {group['bf16_min']:>9.2f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"machine": about, "rows": [asdict(row) for row in rows], "summary": summary},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
