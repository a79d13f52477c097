"""sgemm of SciPy's OpenBLAS in a process of its own: its idle threads spin and slow the next rival.

Run as a program it answers each line "layout m k n calls" with the seconds of every call.
"""

from __future__ import annotations

import subprocess
import sys
import time

# Longer than OpenBLAS's threads spin after a call.
PAUSE = 0.15


class OpenBlas:
    """The process that multiplies; None of it runs between calls of `times`."""

    def __init__(self) -> None:
        """Raises ImportError where SciPy is missing (it comes with the extra `bench`)."""
        import scipy  # noqa: F401

        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def times(self, layout: str, m: int, k: int, n: int, calls: int) -> list[float]:
        """Seconds of `calls` calls with a result array at hand; pauses afterwards."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(layout, m, k, n, calls, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that runs OpenBLAS has ended")
        time.sleep(PAUSE)
        return [float(word) for word in answer.split()]


def serve() -> None:
    """Answers lines on standard input until it ends."""
    import numpy as np
    from scipy.linalg.blas import sgemm

    last, operands = "", (None, None, None)
    for line in sys.stdin:
        layout, *sizes = line.split()
        m, k, n, calls = map(int, sizes)
        shape = f"{layout} {m} {k} {n}"
        random = np.random.default_rng(0)
        if shape != last:
            a = random.standard_normal((k, m) if layout[0] == "T" else (m, k), np.float32)
            b = random.standard_normal((n, k) if layout[1] == "T" else (k, n), np.float32)
            last, operands = shape, (a, b, np.zeros((m, n), np.float32))
            multiply(sgemm, layout, *operands)
            want = (a.T if layout[0] == "T" else a)[:4] @ (b.T if layout[1] == "T" else b)
            np.testing.assert_allclose(operands[2][:4], want, rtol=1e-3, atol=1e-3)
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            multiply(sgemm, layout, *operands)
            seconds.append(time.perf_counter() - start)
        print(*seconds, flush=True)


def multiply(sgemm, layout, a, b, c) -> None:  # type: ignore[no-untyped-def]
    """C = A·B for row-major arrays: to BLAS, which is column-major, Cᵀ = Bᵀ·Aᵀ; no copies."""
    sgemm(
        1.0, b.T, a.T, 0.0, c.T, trans_a=layout[1] == "T", trans_b=layout[0] == "T", overwrite_c=1
    )


if __name__ == "__main__":
    serve()
