"""This machine's rates, for predictions: measured once, kept in the user's cache directory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aie_kernels.artifact import cache_directory

from . import _ffi


@dataclass(frozen=True)
class Host:
    """What all cores together reach.

    Attributes:
      flops: FLOP/s of XLA's own f32 dot.
      pack: bytes/s, read plus written, of rounding f32 to bf16 in tile order.
      unpack: bytes/s, read plus written, of bringing f32 tiles into rows.
    """

    flops: float
    pack: float
    unpack: float


def host(directory: str | os.PathLike[str] | None = None) -> Host:
    """The rates kept in `directory` (default: jax-xdna in XDG_CACHE_HOME or ~/.cache).

    A file that is missing, torn or of another machine is as none: the rates are measured, in about
    two seconds, and written there. A directory that cannot be written costs a measurement in every
    process, nothing else.
    """
    return _host(Path(directory) if directory is not None else cache_directory())


@cache
def _host(directory: Path) -> Host:
    machine = _machine()
    path = directory / f"host-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"
    if (known := _read(path, machine)) is not None:
        return known
    measured = measure()
    _write(path, {"machine": machine, **dataclasses.asdict(measured)})
    return measured


def _machine() -> str:
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as info:
            model = next(line.split(":", 1)[1].strip() for line in info if "model name" in line)
    except (OSError, StopIteration):
        pass
    return f"{platform.machine()}, {model}, {_cores()} cores, {_ffi.isa()}, jax {jax.__version__}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: Path, machine: str) -> Host | None:
    try:
        found = json.loads(path.read_text())
        if found.pop("machine") != machine:
            return None
        rates = Host(**{name: float(value) for name, value in found.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return rates if all(0 < r < math.inf for r in dataclasses.astuple(rates)) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """All of the file or nothing, whoever else writes it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        pass  # Then the next process measures again.


def measure() -> Host:
    """Measures, best of several runs: a busy moment should not count for ever."""
    rng = np.random.default_rng(0)
    m, k, n = 256, 768, 2304  # a GPT-2 layer's
    with jax.ensure_compile_time_eval():  # also when a policy is made while JAX traces
        a = jnp.asarray(rng.standard_normal((m, k)), jnp.float32)
        b = jnp.asarray(rng.standard_normal((k, n)), jnp.float32)
        dot = jax.jit(jnp.matmul)
        product = _best(lambda: dot(a, b).block_until_ready())

    # Larger than a laptop's caches, as a model's weights are.
    rows, columns = 16384, 768
    matrix = rng.standard_normal((rows, columns), np.float32)
    packed = _aligned(matrix.size, np.uint16)
    tiles = _aligned(matrix.size, np.float32)
    with ThreadPoolExecutor(_cores()) as pool:
        pack = partial(_ffi.pack_tiles, matrix, packed, (64, 32, 4, 8), transposed=False)
        unpack = partial(_ffi.unpack_tiles, tiles, matrix, (64, 96, 4, 4), stream=True)
        packing, unpacking = (
            _best(partial(_share, pool, work, rows // 64)) for work in (pack, unpack)
        )
    return Host(2 * m * k * n / product, 6 * matrix.size / packing, 8 * matrix.size / unpacking)


def _aligned(count: int, dtype: type) -> np.ndarray:
    raw = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def _share(pool: ThreadPoolExecutor, work: Callable[..., None], rows: int) -> None:
    cuts = [rows * i // _cores() for i in range(_cores() + 1)]
    list(pool.map(lambda i: work(rows_of_tiles=(cuts[i], cuts[i + 1])), range(_cores())))


def _best(call: Callable[[], object], seconds: float = 0.4) -> float:
    """Seconds of the fastest of at least five calls."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
