"""The compiled half: the XLA FFI handler, its devices and counters; the NPU's plans and streams."""

from typing import Any

import numpy as np

def registrations() -> dict[str, object]:
    """FFI target name → capsule for `jax.ffi.register_ffi_target(platform="cpu")`.

    The one target, "jax_xdna_gemm", computes C = A · B by the contract of docs/numerics.md.

    Operands a and b are float32 or bfloat16, row-major, of rank 2, or of rank 3 with a leading
    batch; one of rank 2 is shared by the batch of the other. The result c is float32 or bfloat16,
    (batch,) M, N. Any size may be 0; K = 0 gives zeros. Attributes, all strings:

    - layout: NN, NT, TN or TT. a is stored (M, K) for N and (K, M) for T as the first letter, b
      (K, N) for N and (N, K) for T as the second.
    - numerics: bf16 or bfp16. rounding: nearest or floor.
    - device: a name that `devices()` lists.

    Errors: INVALID_ARGUMENT names the operand and the shapes, or the attribute; UNAVAILABLE the
    device; RESOURCE_EXHAUSTED when memory is short; INTERNAL for the rest.
    """

def devices() -> list[tuple[str, str]]:
    """(name, description) of every device of this process."""

def cpu_features() -> list[str]:
    """SIMD features of this CPU that the emulated device knows, for example "avx2"."""

def isa() -> str:
    """Micro-kernel in use: "avx512bf16", "avx512", "avx2", "neon" or "baseline".

    The environment variable JAX_XDNA_ISA picks another one that this CPU has.
    """

def counters() -> list[dict[str, object]]:
    """One row per (device, layout, numerics, batch, m, k, n) since import; rows only grow.

    Keys: device, layout, numerics, batch, m, k, n, calls, flops, seconds (wall), pack_a, pack_b,
    run, unpack (seconds, summed over the threads that worked), threads (summed over calls).
    """

def plan(
    arch: str,
    m: int,
    k: int,
    n: int,
    numerics: str = "bf16",
    tile: tuple[int, int, int, int] | None = None,
    result: str = "f32",
    resident: bool = False,
    power: str = "turbo",
) -> dict[str, Any]:
    """How the NPU computes an (m, k) by (k, n) product in the least predicted time.

    arch is "npu1" or "npu2", numerics "bf16" or "bfp16". tile (m, k, n, C buffers in L1) restricts
    the choice to one design; switching designs between products costs milliseconds. result, "f32"
    or "bf16", is the dtype in which C leaves the cores. power, "turbo" or "default", is the NPU's
    power mode, for the predictions. resident plans for the second kind of
    design, which keeps A in L2 and has not run on hardware.

    The product that runs is L · R, padded: (A, B), or (Bᵀ, Aᵀ) when transposed. Keys: arch,
    numerics, result, m, k, n, transposed, tile, micro_tile (r, s, t), columns, padded (rows, depth
    and cols of the product that runs), tiles (I, KK, J), feed (of A: fifo, held or ring),
    columns_outer (loop order), buffer_bytes (A, B, C), l1_bytes, l2_bytes, useful_share, seconds
    (predicted: dispatch, compute, dram, lanes, edges, total), dram_bytes, chunks_along ("m" or
    "n"), chunks ((start, size), for a pipeline of packing and running), steps (of the sequence) and
    stream (the bytes for the NPU).

    ValueError names the limit, its value and what the product would need.
    """

def best_tile(
    arch: str,
    shapes: list[tuple[int, int, int, int]],
    numerics: str = "bf16",
    result: str = "f32",
    resident: bool = False,
    power: str = "turbo",
) -> tuple[int, int, int, int]:
    """The tile with which products (m, k, n, calls) are predicted to run fastest together."""

def model_constants(
    arch: str, numerics: str = "bf16", power: str = "turbo"
) -> dict[str, tuple[float, str]]:
    """Constants of the time model in SI units, each with its source."""

def predict_design(
    *,
    tiles: tuple[int, int, int],
    tile: tuple[int, int, int, int],
    array: tuple[int, int],
    items: tuple[float, float],
    bytes: tuple[float, float, float],
    rates: tuple[float, float, float, float],
    rounds: bool,
) -> dict[str, float]:
    """The time model on another's design: seconds, with the keys of a plan's.

    tiles: of one core (rows, depth, columns); tile: m, k, n, C buffers; array: rows and columns of
    cores; items: bytes of an element of B and of C; bytes: of A, B and C that pass DRAM, repeats
    included; rates: clock in Hz, DRAM bandwidth in bytes/s, dispatch in s, multiply-adds a cycle of
    one core; rounds: a core rounds C out of an f32 tile of its own.
    """

def encode_stream(arch: str, ops: list[dict[str, Any]]) -> bytes:
    """The instruction stream of these operations, in the form that decode_stream gives."""

def decode_stream(stream: bytes) -> tuple[str, list[dict[str, Any]]]:
    """arch and operations. ValueError names the word at which a stream is damaged.

    Keys by kind: write (address, value), mask_write (address, value, mask), block_write (address,
    block), patch (address, argument, argument_offset), wait (column, row, direction, channel); and
    words, the length in the stream.
    """

def describe_stream(stream: bytes) -> list[str]:
    """One readable line per operation. ValueError as decode_stream."""

def pack_tiles(
    source: np.ndarray,
    packed: np.ndarray,
    tile: tuple[int, int, int, int],
    *,
    transposed: bool,
    rows_of_tiles: tuple[int, int],
) -> None:
    """Rounds `source` to bfloat16 and packs it into tile order, as an NPU reads operands.

    `source` (R, C) is float32, or uint16 with bfloat16's bits; the matrix packed is its transpose
    when `transposed`. `tile` is (rows, columns, micro-tile rows, micro-tile columns). `packed`, one
    vector of uint16 aligned to 64 bytes, takes the tiles row by row of tiles, each made of
    micro-tiles row by row, the last ones completed with zeros. Only the rows of tiles in the range
    `rows_of_tiles` are written, so that threads can share the work; the GIL is released.

    Raises ValueError for a tile that cannot be packed, or arrays that do not fit.
    """

def unpack_tiles(
    packed: np.ndarray,
    matrix: np.ndarray,
    tile: tuple[int, int, int, int],
    *,
    stream: bool,
    rows_of_tiles: tuple[int, int],
) -> None:
    """Writes float32 tiles, in the order of `pack_tiles`, to the row-major `matrix`.

    The micro-tile is 4×4, 4×8 or 8×8. `stream` bypasses the cache, for results that do not fit.
    Raises ValueError like `pack_tiles`.
    """

def kernel_rates(steps: int) -> tuple[float, float]:
    """Operations a second on this core: multiply-adds on registers alone, and the tile kernel with
    its panels in L1, each over `steps` steps of K."""
