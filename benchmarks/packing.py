"""Packing for the NPU against memcpy: fp32 → bf16 with padding, in the order the array reads.

    python -m benchmarks.packing [--json FILE] [--rounds 15]

GB/s count bytes read plus bytes written; the share is that rate over memcpy's of the same source,
in the same rounds. "unpack" takes fp32 tiles of C apart. Two sources: the weight of a GPT-2 MLP
(9 MB, cached) and the token embedding (154 MB, from memory), with rows that do not fill the
last tile, so that every layout pads. Every result is compared, bit for bit, before it is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks._measure import machine, paired_ratio, paired_times
from jax_xdna import _ffi

# rows, columns, micro-tile rows and columns: how the arrays of npu1 and npu2 take A and B.
OPERANDS = {
    "row-major": (64, 64, 1, 8),
    "A tiles, 4×8": (64, 64, 4, 8),
    "B tiles, 8×4": (64, 48, 8, 4),
    "A, B tiles, 8×8": (64, 48, 8, 8),
}
RESULTS = {
    "unpack C, 4×4": (64, 48, 4, 4),
    "unpack C, 4×8": (64, 48, 4, 8),
    "unpack C, 8×8": (64, 48, 8, 8),
}
SOURCES = {"MLP weight": (3070, 768), "embedding": (50257, 768)}
Tile = tuple[int, int, int, int]


def aligned(count: int, dtype: type) -> np.ndarray:
    """A vector of `count` zeros on a page of its own, touched."""
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + 4096, np.uint8)
    raw[::4096] = 1
    start = -raw.ctypes.data % 4096
    vector = raw[start : start + size].view(dtype)
    vector[:] = 0
    return vector


def in_tiles(matrix: np.ndarray, tile: Tile) -> np.ndarray:
    """`matrix` padded with zeros and cut into tiles of micro-tiles, by NumPy: the oracle."""
    rows, columns, u, v = tile
    down, across = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)
    padded = np.zeros((down * rows, across * columns), matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    shape = (down, rows // u, u, across, columns // v, v)
    return padded.reshape(shape).transpose(0, 3, 1, 4, 2, 5).reshape(-1)


class Workers:
    """Runs a piece of work on each of `count` threads, with ranges that cover 0 … n."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pool = ThreadPoolExecutor(count)

    def __call__(self, work: Callable[..., Any], n: int) -> None:
        cuts = [n * i // self.count for i in range(self.count + 1)]
        pieces = zip(cuts[:-1], cuts[1:], strict=True)
        list(self.pool.map(lambda piece: work(rows_of_tiles=piece), pieces))


def runs_for(matrix: np.ndarray, workers: Workers) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name → what to time and the bytes that it moves; checked."""
    copy = np.empty_like(matrix)
    copy[:] = 0
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def memcpy(rows_of_tiles: tuple[int, int]) -> None:
        piece = slice(*rows_of_tiles)
        libc.memcpy(copy[piece].ctypes.data, matrix[piece].ctypes.data, matrix[piece].nbytes)

    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "memcpy": (partial(workers, memcpy, matrix.shape[0]), 2 * matrix.nbytes)
    }
    bits = matrix.astype(ml_dtypes.bfloat16).view(np.uint16)
    for name, tile in OPERANDS.items():
        for transposed in (False, True):
            if transposed and tile[2] == 1:
                continue
            want = in_tiles(bits.T if transposed else bits, tile)
            packed = aligned(want.size, np.uint16)
            down = -(-matrix.shape[1 if transposed else 0] // tile[0])
            pack = partial(_ffi.pack_tiles, matrix, packed, tile, transposed=transposed)
            run = partial(workers, pack, down)
            run()
            label = name + (", transposed" if transposed else "")
            if not np.array_equal(packed, want):
                sys.exit(f"{label}: not the bits of the oracle; not timed")
            runs[label] = run, matrix.nbytes + packed.nbytes
    for name, tile in RESULTS.items():
        tiles = aligned(in_tiles(matrix, tile).size, np.float32)
        tiles[:] = in_tiles(matrix, tile)
        rows = aligned(matrix.size, np.float32).reshape(matrix.shape)
        unpack = partial(_ffi.unpack_tiles, tiles, rows, tile, stream=True)
        run = partial(workers, unpack, -(-matrix.shape[0] // tile[0]))
        run()
        if not np.array_equal(rows, matrix):
            sys.exit(f"{name}: not the matrix that was packed; not timed")
        runs[name] = run, rows.nbytes + tiles.nbytes
    return runs


def main() -> None:
    """Prints a table per source and number of threads; `--json` also writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds")
    args = parser.parse_args()
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores")
    rows = []
    for source, shape in SOURCES.items():
        matrix = aligned(shape[0] * shape[1], np.float32).reshape(shape)
        matrix[:] = np.random.default_rng(0).standard_normal(shape, np.float32)
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            runs = runs_for(matrix, Workers(threads))
            times = paired_times(
                {name: run for name, (run, _) in runs.items()}, rounds=args.rounds, seconds=60
            )
            print(f"\n{source} {shape[0]}×{shape[1]}, {threads} threads   GB/s   of memcpy")
            for name, (_, moved) in runs.items():
                rate = 1e-9 * moved / statistics.median(times[name])
                share = paired_ratio(times["memcpy"], times[name]) * moved / runs["memcpy"][1]
                print(f"  {name:<30} {rate:>8.1f} {share:>8.2f}", flush=True)
                rows.append(
                    {"source": source, "threads": threads, "what": name}
                    | {"gigabytes_per_second": rate, "share_of_memcpy": share}
                )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
