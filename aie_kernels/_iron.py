"""The one place that knows how IRON, the Python side of mlir-aie, spells things.

Written for the release pinned in toolchain.py, after its sources; other releases of the 1.4 series
differ in the cases handled here. Importing this module needs mlir-aie; nothing in jax_xdna does.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import aie.iron as iron
from aie.helpers.taplib import TensorAccessPattern
from aie.iron import Buffer, Kernel, ObjectFifo, Program, Runtime, TaskGroup, Worker
from aie.iron.controlflow import range_
from aie.iron.device import NPU1, NPU2, Tile
from aie.iron.lock import Lock

__all__ = [
    "Buffer",
    "Kernel",
    "Lock",
    "ObjectFifo",
    "TaskGroup",
    "Tile",
    "Worker",
    "linear",
    "module_text",
    "range_",
]


def linear(total: int, start: int, count: int) -> Any:
    """`count` elements from `start` of a one-dimensional buffer of `total`."""
    return TensorAccessPattern((total,), start, [1, 1, 1, count], [0, 0, 0, 1])


def module_text(
    arch: str,
    workers: Sequence[Any],
    locks: Sequence[Any],
    sequence: Callable[..., None],
    types: Sequence[Any],
    handles: Sequence[Any],
) -> str:
    """The design as MLIR text; `sequence` gets the buffers of `types`, then the handles."""
    iron.set_current_device(NPU1() if arch == "npu1" else NPU2())
    if "inputs" in inspect.signature(Runtime.__init__).parameters:
        runtime = Runtime(sequence, list(types), list(handles))
    else:
        runtime = Runtime(sequence, [*types, *handles])
    for lock in locks:
        runtime.add_lock(lock)
    program = Program(iron.get_current_device(), runtime, workers=list(workers))
    return str(program.resolve_program())
