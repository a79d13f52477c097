"""The compiled half: the XLA FFI handler, its devices and its counters."""

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

    The micro-tile is 4×4 or 8×8. `stream` bypasses the cache, for results that do not fit in it.
    Raises ValueError like `pack_tiles`.
    """

def kernel_rates(steps: int) -> tuple[float, float]:
    """Operations a second on this core: multiply-adds on registers alone, and the tile kernel with
    its panels in L1, each over `steps` steps of K."""
