"""What the array is loaded with: tiles, fifos and their joins, pinned words and locks, cores.

`packed_gemm` says what the packed design consists of; `parse` reads the same from MLIR text, so
that a design made by mlir-aie can be compared with it whatever its names and its version.
"""

import re
from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, int]  # column, row: 0 shim, 1 memory tile, 2 to 5 cores

CORE_ROWS = 4
FIRST_CORE_ROW = 2
STACK_BYTES = 0xD00
RUNTIME_ADDRESS = 0xD00  # two int32 in L1, right after the stack: I·J and KK
GO_LOCK = 15  # the core takes it with AcquireGreaterEqual 1; the stream sets it to 1
FIFO_DEPTH = 2


@dataclass(frozen=True)
class Fifo:
    """An object fifo: `elements` of `dtype` an object, depths of the producer and of consumers."""

    name: str
    producer: Place
    consumers: tuple[Place, ...]
    elements: int
    dtype: str
    producer_depth: int = FIFO_DEPTH
    consumer_depth: int = FIFO_DEPTH


@dataclass(frozen=True)
class Link:
    """Fifos that share the buffers of a memory tile; offsets (elements) where several join."""

    sources: tuple[str, ...]
    sinks: tuple[str, ...]
    offsets: tuple[int, ...] = ()


@dataclass
class Structure:
    """A design without its runtime sequence. Cores: place → stack bytes."""

    device: str
    fifos: dict[str, Fifo] = field(default_factory=dict)
    links: set[Link] = field(default_factory=set)
    runtime_words: dict[Place, int] = field(default_factory=dict)  # place → address
    locks: dict[Place, tuple[int, int]] = field(default_factory=dict)  # place → id, initial value
    sums: dict[Place, int] = field(default_factory=dict)  # place → floats; when C leaves as bf16
    cores: dict[Place, int] = field(default_factory=dict)

    def differences(self, other: "Structure") -> list[str]:
        """What the other one has otherwise, a line each."""
        lines = []
        if self.device != other.device:
            lines.append(f"device {self.device}, not {other.device}")
        for name in ("fifos", "runtime_words", "locks", "sums", "cores"):
            here: dict[Any, Any] = getattr(self, name)
            there: dict[Any, Any] = getattr(other, name)
            for key in sorted(here.keys() | there.keys(), key=str):
                if here.get(key) != there.get(key):
                    lines.append(f"{name} {key}: {here.get(key)}, not {there.get(key)}")
        for link in sorted(self.links ^ other.links, key=str):
            lines.append(f"{'missing' if link in other.links else 'unexpected'} {link}")
        return lines


def columns_of(arch: str) -> int:
    """Columns of cores."""
    return {"npu1": 4, "npu2": 8}[arch]


def packed_gemm(arch: str, tile: tuple[int, int, int, int], result: str = "f32") -> Structure:
    """The packed GEMM for arch "npu1" or "npu2" and tile (m, k, n, buffers of C in L1).

    C leaves the cores as `result`, "f32" or "bf16".
    """
    m, k, n, c_buffers = tile
    columns = columns_of(arch)
    s = Structure(arch)

    def add(fifo: Fifo) -> None:
        s.fifos[fifo.name] = fifo

    for lane in range(CORE_ROWS):
        shim = lane * columns // CORE_ROWS
        row = tuple((column, FIRST_CORE_ROW + lane) for column in range(columns))
        add(Fifo(f"A_L3L2_{lane}", (shim, 0), ((shim, 1),), m * k, "bf16"))
        add(Fifo(f"A_L2L1_{lane}", (shim, 1), row, m * k, "bf16"))
        s.links.add(Link((f"A_L3L2_{lane}",), (f"A_L2L1_{lane}",)))
    for column in range(columns):
        cores = [(column, FIRST_CORE_ROW + row) for row in range(CORE_ROWS)]
        add(Fifo(f"B_L3L2_{column}", (column, 0), ((column, 1),), k * n, "bf16"))
        add(Fifo(f"B_L2L1_{column}", (column, 1), tuple(cores), k * n, "bf16"))
        s.links.add(Link((f"B_L3L2_{column}",), (f"B_L2L1_{column}",)))
        parts = tuple(f"C_L1L2_{column}_{row}" for row in range(CORE_ROWS))
        for part, core in zip(parts, cores, strict=True):
            add(Fifo(part, core, ((column, 1),), m * n, result, producer_depth=c_buffers))
        add(Fifo(f"C_L2L3_{column}", (column, 1), ((column, 0),), CORE_ROWS * m * n, result))
        offsets = tuple(row * m * n for row in range(CORE_ROWS))
        s.links.add(Link(parts, (f"C_L2L3_{column}",), offsets))
        for core in cores:
            s.runtime_words[core] = RUNTIME_ADDRESS
            s.locks[core] = (GO_LOCK, 0)
            s.cores[core] = STACK_BYTES
            if result == "bf16":
                s.sums[core] = m * n
    return s


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def parse(mlir: str) -> Structure:
    """The structure of a design in MLIR's text form. Raises ValueError when it is not one."""
    device = re.search(r"aie\.device\((\w+)\)", mlir)
    if device is None:
        raise ValueError("no aie.device in this MLIR")
    s = Structure(device[1])
    places: dict[str, Place] = {}
    for name, column, row in re.findall(
        r"(%[\w-]+) = aie\.(?:logical_)?tile(?:<\w+>)?\((\d+), *(\d+)\)", mlir
    ):
        places[name] = (int(column), int(row))
    for name, producer, consumers, depth, elements, dtype in re.findall(
        r"aie\.objectfifo @(\w+)\((%[\w-]+),\s*\{([^}]*)\},\s*(\[[^\]]*\]|\d+)(?: : i32)?\)"
        r"[^\n]*<memref<(\d+)x(\w+)>>",
        mlir,
    ):
        depths = _numbers(re.sub(r": *i32", "", depth))
        s.fifos[name] = Fifo(
            name,
            places[producer],
            tuple(places[consumer] for consumer in re.findall(r"%[\w-]+", consumers)),
            int(elements),
            dtype,
            depths[0],
            depths[-1],
        )
    for sources, sinks, joined, split in re.findall(
        r"aie\.objectfifo\.link \[([^\]]*)\] -> \[([^\]]*)\]\(\[([^\]]*)\] \[([^\]]*)\]\)", mlir
    ):
        s.links.add(
            Link(
                tuple(re.findall(r"@(\w+)", sources)),
                tuple(re.findall(r"@(\w+)", sinks)),
                _numbers(joined) + _numbers(split),
            )
        )
    for tile, attributes in re.findall(
        r"aie\.buffer\((%[\w-]+)\) \{([^}]*)\} : memref<2xi32>", mlir
    ):
        address = re.search(r"address = (\d+)", attributes)
        s.runtime_words[places[tile]] = int(address[1]) if address else -1
    for tile, count in re.findall(r"aie\.buffer\((%[\w-]+)\) \{[^}]*\} : memref<(\d+)xf32>", mlir):
        s.sums[places[tile]] = int(count)
    for tile, number, attributes in re.findall(r"aie\.lock\((%[\w-]+), *(\d+)\) \{([^}]*)\}", mlir):
        initial = re.search(r"init = (\d+)", attributes)
        s.locks[places[tile]] = (int(number), int(initial[1]) if initial else 0)
    for tile, stack in re.findall(
        r"aie\.core\((%[\w-]+)\).*?aie\.end\s*\} \{[^}]*stack_size = (\d+)", mlir, re.DOTALL
    ):
        s.cores[places[tile]] = int(stack)
    return s
