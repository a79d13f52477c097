"""`profile`: what ran on the devices, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from . import _ffi
from ._table import si, table

_KEY = ("device", "layout", "numerics", "batch", "m", "k", "n")
_SUMS = ("calls", "flops", "seconds", "pack_a", "pack_b", "run", "unpack", "threads")


@dataclass(frozen=True)
class ProfileRow:
    """All calls of one shape. Stage times are seconds summed over the threads that worked.

    `seconds` is wall time in the call; `threads` sums over the calls the threads that took work.
    """

    device: str
    layout: str
    numerics: str
    batch: int
    m: int
    k: int
    n: int
    calls: int
    flops: float
    seconds: float
    pack_a: float
    pack_b: float
    run: float
    unpack: float
    threads: int


def _snapshot() -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in _KEY): row for row in _ffi.counters()}


class profile:
    """Records the GEMM calls of the whole process inside a `with` block.

        with jax_xdna.profile() as p:
            jax.block_until_ready(step(state, batch))
        print(p)

    JAX dispatches asynchronously: wait for results inside the block, or calls that still run are
    missed. Reading never stops or resets anything, so blocks may nest and overlap. Inside the
    block the figures are those up to now.

    Attributes:
      rows: one `ProfileRow` per device, layout, numerics and shape, longest first.
      calls, flops, seconds, pack_a, pack_b, run, unpack: sums over the rows. Times in seconds.
    """

    def __init__(self) -> None:
        self._start: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._stop: dict[tuple[Any, ...], dict[str, Any]] | None = None

    def __enter__(self) -> profile:
        self._start, self._stop = _snapshot(), None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop = _snapshot()

    @property
    def rows(self) -> list[ProfileRow]:
        rows = []
        for key, now in (_snapshot() if self._stop is None else self._stop).items():
            before = self._start.get(key, dict.fromkeys(_SUMS, 0))
            spent = {name: now[name] - before[name] for name in _SUMS}
            if spent["calls"]:
                rows.append(ProfileRow(**dict(zip(_KEY, key, strict=True)), **spent))
        return sorted(rows, key=lambda row: -row.seconds)

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def pack_a(self) -> float:
        return sum(row.pack_a for row in self.rows)

    @property
    def pack_b(self) -> float:
        return sum(row.pack_b for row in self.rows)

    @property
    def run(self) -> float:
        return sum(row.run for row in self.rows)

    @property
    def unpack(self) -> float:
        return sum(row.unpack for row in self.rows)

    def __str__(self) -> str:
        rows = self.rows
        if not rows:
            return "no calls"
        head = ("device", "batch×M×K×N", "layout", "numerics", "calls", "FLOP/s", "ms")
        stages = ("pack A", "pack B", "run", "unpack", "threads")
        body = [
            (
                row.device,
                f"{row.batch}×{row.m}×{row.k}×{row.n}",
                row.layout,
                row.numerics,
                str(row.calls),
                si(row.flops / row.seconds) if row.seconds else "-",
                f"{1e3 * row.seconds:.2f}",
                *(f"{1e3 * t:.2f}" for t in (row.pack_a, row.pack_b, row.run, row.unpack)),
                f"{row.threads / row.calls:.1f}",
            )
            for row in rows
        ]
        seconds = self.seconds
        rate = si(self.flops / seconds) if seconds else "- "
        return (
            table((*head, *stages), body, right=range(4, 12))
            + f"\n{self.calls} calls, {si(self.flops)}FLOP in {1e3 * seconds:.2f} ms, "
            f"{rate}FLOP/s; ms is wall time, stages are summed over threads"
        )
