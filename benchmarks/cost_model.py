"""The plan's time model against published measurements of bf16 products on NPUs.

    python -m benchmarks.cost_model [--rows] [--json FILE]

`benchmarks/data/npu_gemm.csv` holds what was published, 120 rows whose design is known: size, array
and tile, and which rows of the data belong together (`series`: one design, machine and power mode).
Each row is predicted by the model that the plan uses, `_ffi.predict_design`, with the row's own
design. A series of six products or more gets three rates (multiply-adds a cycle, DRAM bandwidth,
dispatch), fitted on one half of its products and tested on the other; the half follows from a hash.
A product that was published in several layouts or by several runs is in one half with all its rows.
Nothing is fitted to a smaller series: it takes the kernel rate that its source states and the
plan's other constants, and all its rows are test rows but those that the constants come from.

Exit code 1 when the median error over all test rows is above 15 %.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_xdna import _ffi

DATA = Path(__file__).parent / "data" / "npu_gemm.csv"
LIMIT = 0.15
SMALLEST = 6  # products of a series that gets rates of its own

# What is tried: steps of about 5 %, and within what was published for the arch.
KERNELS = np.geomspace(5, 300, 84)  # multiply-adds a cycle
BANDWIDTHS = {
    "npu1": np.array([17.0, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5]) * 1e9,
    "npu2": np.array([65.0, 60, 55, 50, 45, 40, 35, 30, 25, 20, 17, 14, 12, 10]) * 1e9,
}
DISPATCHES = np.geomspace(50e-6, 900e-6, 60)
CLOCK = {arch: _ffi.model_constants(arch)["clock"][0] for arch in BANDWIDTHS}

# The runs that the plan's own bandwidths were taken from (ffi/predict.cc) test nothing.
CONSTANTS = {
    "4224×4032×4224 on 4×4, tile 96×56×96",
    "4032×4224×4608 on 4×8, tile 112×48×96",
}

# Why a series is not met, where its source or the rows tell.
WHY = {
    "flm.GEMM, npu1, Phoenix CI": "a busy machine: the median of five runs is up to 3 × the least, "
    "and 256×512×512 takes 0.7 to 2.2 ms; the published rates are those of turbo mode",
    "iron.operators.GEMM, npu1, Phoenix CI": "a busy machine; 64×512×256 runs as four parts",
    "iron.operators.GEMM, npu2, Krackan CI, default": "64×512×256 runs as four parts, and the half "
    "with them sets the dispatch; the kernel for 8×16×32 is slow",
    "iron.operators.GEMM, npu2, Strix Halo, default": "one row, of an early version: three times "
    "slower than the same design on Krackan",
    "Taka et al., npu1, Chess, turbo": "the row with short runs in DRAM, which the model, made for "
    "packed operands, knows nothing of",
}


class Row(NamedTuple):
    """A measurement: seconds, and the design in the arguments of `_ffi.predict_design`."""

    series: str
    arch: str
    name: str
    seconds: float
    kernel: float | None  # multiply-adds a cycle, where the source states it
    design: dict[str, Any]
    key: str
    remark: str


def read(path: Path = DATA) -> list[Row]:
    """The rows of the file."""
    with path.open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> Row:
    size = [int(line[x]) for x in ("m", "k", "n")]
    tile = [int(line[x]) for x in ("tile_m", "tile_k", "tile_n")]
    rows, columns = int(line["rows"]), int(line["columns"])
    b_item, c_item = float(line["b_bytes"]), float(line["c_bytes"])
    block = (tile[0] * rows, tile[1], tile[2] * columns)
    i, kk, j = (-(-s // b) for s, b in zip(size, block, strict=True))
    height, depth, width = i * block[0], kk * block[1], j * block[2]
    passes = {"once": 1, "every row": i}[line["b_read"]]
    design = {
        "tiles": (i, kk, j),
        "tile": (*tile, 1 if line["c_tile"] == "single" else 2),
        "array": (rows, columns),
        "items": (b_item, c_item),
        "bytes": (
            2.0 * height * depth * j,
            b_item * depth * width * passes,
            c_item * height * width,
        ),
        "rounds": line["c_tile"] == "rounded",
    }
    key = hashlib.sha256(",".join(line.values()).encode()).hexdigest()
    kernel = float(line["kernel_macs_per_cycle"]) if line["kernel_macs_per_cycle"] else None
    name = f"{'×'.join(map(str, size))} on {rows}×{columns}, tile {'×'.join(map(str, tile))}"
    seconds = 1e-6 * float(line["microseconds"])
    return Row(line["series"], line["arch"], name, seconds, kernel, design, key, line["remark"])


def halves(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """To fit and to test: every second product in the order of their hashes."""
    products: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        products.setdefault(row.name, []).append(row)
    ordered = list(products.values())
    return sum(ordered[::2], []), sum(ordered[1::2], [])


Rates = tuple[float, float, float]  # multiply-adds a cycle, bytes/s, seconds of a dispatch


def predict(row: Row, rates: Rates) -> dict[str, float]:
    """Seconds by the model."""
    kernel, bandwidth, dispatch = rates
    machine = (CLOCK[row.arch], bandwidth, dispatch, kernel)
    return _ffi.predict_design(rates=machine, **row.design)


def fit(rows: list[Row]) -> Rates:
    """The rates with the least mean |log(predicted / measured)|; the first of equals."""
    bandwidths = BANDWIDTHS[rows[0].arch]
    error: Any = 0.0
    for row in rows:
        # total = dispatch + edges + max(compute, DRAM, lanes): each depends on one rate at most.
        at = [predict(row, (kernel, 1e9, 0.0)) for kernel in KERNELS]
        busy = np.maximum(
            np.array([s["compute"] for s in at])[:, None],
            np.maximum(at[0]["lanes"], 1e9 * at[0]["dram"] / bandwidths)[None, :],
        )
        total = at[0]["edges"] + busy[:, :, None] + DISPATCHES
        error = error + abs(np.log(total / row.seconds))
    best = np.unravel_index(np.argmin(error), error.shape)
    return float(KERNELS[best[0]]), float(bandwidths[best[1]]), float(DISPATCHES[best[2]])


def published(row: Row) -> Rates:
    """The rate that the row's source states for its kernel, and the plan's other constants."""
    constants = _ffi.model_constants(row.arch)
    kernel = row.kernel or constants["macs_per_cycle"][0]
    return kernel, constants["dram_bandwidth"][0], constants["dispatch"][0]


class Result(NamedTuple):
    """A series: its rates (None: published ones), and error of each row, predicted/measured − 1."""

    series: str
    rates: Rates | None
    fitted: list[tuple[Row, float]]
    tested: list[tuple[Row, float]]


def evaluate(rows: list[Row]) -> list[Result]:
    """Every series of the data, fitted and tested."""
    results = []
    ordered = sorted(rows, key=lambda row: row.series)
    for series, group in itertools.groupby(ordered, key=lambda row: row.series):
        members = list(group)
        products = len({row.name for row in members})
        if products >= SMALLEST:
            train, test = halves(members)
            rates = fit(train)
        else:
            train = [row for row in members if row.name in CONSTANTS]
            test = [row for row in members if row.name not in CONSTANTS]
            rates = None
        errors = [
            [
                (row, predict(row, rates or published(row))["total"] / row.seconds - 1)
                for row in part
            ]
            for part in (train, test)
        ]
        results.append(Result(series, rates, *errors))
    return results


def median(errors: list[tuple[Row, float]]) -> float:
    """Median of the absolute errors."""
    return statistics.median(abs(error) for _, error in errors)


def main() -> int:
    """Prints the table; 1 when the median error of the test rows is above 15 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print every row, too")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    args = parser.parse_args()
    results = evaluate(read())
    print(f"{'':<48} rows to  median error, %  worst  fitted rates")
    print(f"{'series':<48} fit test   fit   test    test  MAC/cycle  GB/s  dispatch µs")
    for r in results:
        kept = f"{100 * median(r.fitted):>5.1f}" if r.fitted else "    –"
        rates = "  published ones"
        if r.rates:
            rates = f"{r.rates[0]:>11.1f} {1e-9 * r.rates[1]:>5.0f} {1e6 * r.rates[2]:>12.0f}"
        worst = max((error for _, error in r.tested), key=abs)
        print(
            f"{r.series:<48} {len(r.fitted):>3} {len(r.tested):>4} {kept}"
            f" {100 * median(r.tested):>6.1f} {100 * worst:>+7.0f}{rates}"
        )
        if args.rows:
            for what, part in (("fit", r.fitted), ("test", r.tested)):
                for row, error in part:
                    remark = f"   ({row.remark})" if row.remark else ""
                    print(
                        f"    {what:<5} {row.name:<52} {1e3 * row.seconds:>8.3f} ms "
                        f"{100 * error:>+6.1f} %{remark}"
                    )
    tested = [pair for r in results for pair in r.tested]
    for r in results:
        if median(r.tested) > LIMIT or max(abs(e) for _, e in r.tested) > 0.5:
            print(f"{r.series}: {WHY.get(r.series, 'no reason is known')}")
    error = median(tested)
    print(f"all {len(tested)} test rows: median error {100 * error:.1f} %")
    if args.json:
        with open(args.json, "w") as file:
            table = [
                {"series": r.series, "rates": r.rates, "test": median(r.tested)} for r in results
            ]
            json.dump({"median": error, "series": table}, file, indent=1)
    return int(error > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
