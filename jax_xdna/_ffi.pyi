"""The compiled half: the XLA FFI handler, its devices and its counters."""

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
