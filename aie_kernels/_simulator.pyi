"""The exact simulator of the NPU array."""

from typing import Any

import numpy as np

class SimulationError(RuntimeError):
    """The stream does what the hardware cannot do or would get wrong without a word."""

class Report:
    """What one dispatch did; as text, a utilisation table per lane and core."""

    cycles: float  # of the array, until the last wait of the stream
    dram_cycles: float  # bytes over bandwidth, in the same cycles
    clock_hz: float
    bytes_read: int
    bytes_written: int

class Simulator:
    """The array with a design loaded; keeps its state between dispatches."""

    def __init__(
        self,
        arch: str,
        numerics: str,
        m: int,
        k: int,
        n: int,
        c_buffers: int,
        result: str = "f32",
        resident: bool = False,
    ) -> None:
        """arch "npu1" or "npu2", numerics "bf16" or "bfp16", the design's tile, then the dtype in
        which C leaves the cores, "f32" or "bf16". resident: the second kind of design, with A in a
        buffer of the memory tiles that the stream programs.

        ValueError when the kernel has no such tile.
        """

    def run(
        self,
        stream: np.ndarray[Any, np.dtype[np.uint32]],
        a: np.ndarray[Any, np.dtype[np.uint16]],
        b: np.ndarray[Any, np.dtype[np.uint16]],
        c: np.ndarray[Any, np.dtype[np.uint8]],
    ) -> Report:
        """Executes the stream on the packed buffers: bf16 bits, and the bytes of the result.

        Raises SimulationError, after which the array must be loaded anew, and ValueError for words
        that are no stream.
        """
