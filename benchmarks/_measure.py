"""What every benchmark shares: paired timing, the oracle, and a description of the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jax_xdna
from jax_xdna import _ffi


def paired_times(
    runs: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds per call of each run, taken in turns so that all see the same state of the machine.

    Every second round goes through the runs backwards, so none is always timed after the same
    rival. Stops after `rounds` rounds, or after `seconds` once five rounds are done.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    start = time.perf_counter()
    for done in range(rounds):
        if done >= 5 and time.perf_counter() - start > seconds:
            break
        for name in order:
            begin = time.perf_counter()
            jax.block_until_ready(runs[name]())
            times[name].append(time.perf_counter() - begin)
        order.reverse()
    return times


def paired_ratio(rival: list[float], ours: list[float]) -> float:
    """Median over rounds of rival / ours: above 1 when ours is faster."""
    return statistics.median(r / o for r, o in zip(rival, ours, strict=True))


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of positive values."""
    return float(np.exp(np.mean(np.log(values))))


def bf16_oracle(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The contract's bits for `a` (M, K) times `b` (K, N), float32: operands rounded to bf16, one
    fused multiply-add after another in order of k.

    A product of two bf16 numbers is exact in float64, and so is the sum's rounding through float64
    to float32 (docs/numerics.md), hence each step below is one fused multiply-add.
    """
    a64 = np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float64)
    b64 = np.asarray(b).astype(ml_dtypes.bfloat16).astype(np.float64)
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total = (total + a64[:, k : k + 1] * b64[k : k + 1]).astype(np.float32)
    return total


def has_amx() -> bool:
    """Whether this process may use AMX, the matrix units of recent Xeon CPUs."""
    try:
        with open("/proc/cpuinfo") as info:
            return "amx_bf16" in info.read()
    except OSError:
        return False


def deny_amx() -> None:
    """Has the kernel refuse AMX to this process; call it before anything else runs.

    Libraries then fall back to the vector instructions that laptop CPUs have too. A program asks
    for AMX by `arch_prctl(ARCH_REQ_XCOMP_PERM)`; a seccomp filter makes that call fail with EPERM.
    Raises OSError where the kernel takes no filter.
    """

    def instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    load, equal, give = 0x20, 0x15, 0x06
    program = b"".join(
        [
            instruction(load, 0, 0, 0),  # the number of the system call
            instruction(equal, 0, 3, 158),  # arch_prctl on x86-64
            instruction(load, 0, 0, 16),  # its first argument
            instruction(equal, 0, 1, 0x1023),  # ARCH_REQ_XCOMP_PERM
            instruction(give, 0, 0, 0x00050001),  # SECCOMP_RET_ERRNO with EPERM
            instruction(give, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
        ]
    )
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(seccomp, filter_mode, header, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel took no seccomp filter")


def machine() -> dict[str, Any]:
    """The machine and the versions that a table was made with."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as info:
            model = next(line.split(":", 1)[1].strip() for line in info if "model name" in line)
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "features": _ffi.cpu_features(),
        "kernel": _ffi.isa(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jax_xdna": jax_xdna.__version__,
    }
