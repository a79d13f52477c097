"""The packed GEMM in IRON, mlir-aie's Python language. Needs mlir-aie (see toolchain.py).

One configuration of the array for all sizes: a core takes its trip counts from two runtime words
at a pinned address, behind a pinned lock that it takes by a consuming acquire, so that the next
dispatch waits again. A is broadcast along the rows of cores, B down the columns, C joined per
column in the memory tile. The operands come packed in the order of consumption: no fifo changes a
layout, every transfer of the host is a contiguous run.
"""

from typing import Any

import ml_dtypes
import numpy as np

from aie_kernels import _iron
from aie_kernels.structure import (
    CORE_ROWS,
    FIFO_DEPTH,
    FIRST_CORE_ROW,
    GO_LOCK,
    RUNTIME_ADDRESS,
    STACK_BYTES,
    columns_of,
    packed_gemm,
)


def _core(
    a: Any, b: Any, c: Any, zero: Any, step: Any, words: Any, go: Any, total: Any, narrow: Any
) -> None:
    """C is summed up in the buffer that leaves or, when it leaves as bf16, in `total`."""
    go.acquire(1)
    tiles = words[0]
    steps = words[1]
    for _ in _iron.range_(tiles):
        out = c.acquire(1) if total is None else total.op
        zero(out)
        for _ in _iron.range_(steps):
            left = a.acquire(1)
            right = b.acquire(1)
            step(left, right, out)
            a.release(1)
            b.release(1)
        if total is not None:
            narrow(out, c.acquire(1))
        c.release(1)


def design(arch: str, tile: tuple[int, int, int, int], result: str = "f32") -> str:
    """The design for arch "npu1" or "npu2" and tile (m, k, n, buffers of C in L1), as MLIR text.

    C leaves the cores as `result`, "f32" or "bf16".
    Its runtime sequence is the product of one macro-tile, (4m, k) by (k, n · columns).
    """
    m, k, n, c_buffers = tile
    columns = columns_of(arch)
    fifos = packed_gemm(arch, tile, result).fifos

    def array(count: int, dtype: Any) -> Any:
        return np.ndarray[(count,), np.dtype[dtype]]

    bf16 = ml_dtypes.bfloat16
    out = np.float32 if result == "f32" else bf16
    a_tile, b_tile, sums = array(m * k, bf16), array(k * n, bf16), array(m * n, np.float32)
    c_tile, c_block = array(m * n, out), array(CORE_ROWS * m * n, out)

    def kernel(name: str, *types: Any) -> Any:
        return _iron.Kernel(f"packed_gemm_{name}", "packed_gemm.o", list(types))

    zero = kernel("zero_f32", sums)
    step = kernel("step_bf16_f32", a_tile, b_tile, sums)
    narrow = kernel("epilogue_f32_bf16", sums, c_tile) if result == "bf16" else None

    def at(place: tuple[int, int]) -> Any:
        return _iron.Tile(*place)

    def input_lane(name: str, kind: Any) -> tuple[Any, Any]:
        """The host's end and the fifo to the cores."""
        outer = fifos[f"{name[0]}_L3L2_{name[1:]}"]
        fifo = _iron.ObjectFifo(kind, name=outer.name, depth=FIFO_DEPTH)
        inner = fifo.cons().forward(
            obj_type=kind,
            name=f"{name[0]}_L2L1_{name[1:]}",
            depth=FIFO_DEPTH,
            tile=at(outer.consumers[0]),
        )
        return fifo.prod(tile=at(outer.producer)), inner

    a_lanes = [input_lane(f"A{lane}", a_tile) for lane in range(CORE_ROWS)]
    b_lanes = [input_lane(f"B{column}", b_tile) for column in range(columns)]
    c_host, c_parts = [], []
    for column in range(columns):
        fifo = _iron.ObjectFifo(c_block, name=f"C_L2L3_{column}", depth=FIFO_DEPTH)
        parts = fifo.prod().join(
            [row * m * n for row in range(CORE_ROWS)],
            obj_types=[c_tile] * CORE_ROWS,
            names=[f"C_L1L2_{column}_{row}" for row in range(CORE_ROWS)],
            depths=[FIFO_DEPTH] * CORE_ROWS,
            tile=at((column, 1)),
        )
        c_host.append(fifo.cons(tile=at((column, 0))))
        c_parts.append(parts)

    words, locks, workers = [], [], []
    for row in range(CORE_ROWS):
        for column in range(columns):
            core = at((column, FIRST_CORE_ROW + row))
            words.append(
                _iron.Buffer(
                    array(2, np.int32),
                    name=f"rtp_{column}_{row}",
                    tile=core,
                    address=RUNTIME_ADDRESS,
                    use_write_rtp=True,
                )
            )
            locks.append(_iron.Lock(core, lock_id=GO_LOCK, init=0, name=f"go_{column}_{row}"))
            workers.append(
                _iron.Worker(
                    _core,
                    [
                        a_lanes[row][1].cons(),
                        b_lanes[column][1].cons(),
                        c_parts[column][row].prod(depth=c_buffers),
                        zero,
                        step,
                        words[-1],
                        locks[-1],
                        narrow and _iron.Buffer(sums, name=f"sum_{column}_{row}", tile=core),
                        narrow,
                    ],
                    tile=core,
                    stack_size=STACK_BYTES,
                    dynamic_objfifo_lowering=True,
                )
            )

    a_all, b_all, c_all = CORE_ROWS * m * k, columns * k * n, columns * CORE_ROWS * m * n

    def sequence(a: Any, b: Any, c: Any, a_in: Any, b_in: Any, c_out: Any) -> None:
        group = _iron.TaskGroup()
        for i, handle in enumerate(c_out):
            run = _iron.linear(c_all, i * CORE_ROWS * m * n, CORE_ROWS * m * n)
            handle.drain(c, tap=run, wait=True, group=group)
        for i, handle in enumerate(b_in):
            handle.fill(b, tap=_iron.linear(b_all, i * k * n, k * n), group=group)
        for i, handle in enumerate(a_in):
            handle.fill(a, tap=_iron.linear(a_all, i * m * k, m * k), group=group)
        for pair in words:
            pair[0] = 1
            pair[1] = 1
        for lock in locks:
            lock.set(1)
        group.finish()

    return _iron.module_text(
        arch,
        workers,
        locks,
        sequence,
        [array(a_all, bf16), array(b_all, bf16), array(c_all, out)],
        [[lane[0] for lane in a_lanes], [lane[0] for lane in b_lanes], c_host],
    )
