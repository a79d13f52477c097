"""The compiled half: the XLA FFI handler, its devices and its counters."""

def registrations() -> dict[str, object]:
    """FFI target name → capsule for `jax.ffi.register_ffi_target(platform="cpu")`."""

def devices() -> list[tuple[str, str]]:
    """(name, description) of every device of this process."""

def cpu_features() -> list[str]:
    """SIMD features of this CPU that the emulated device knows, for example "avx2"."""

def isa() -> str:
    """Micro-kernel in use: "avx512", "avx2", "baseline" or "neon"; JAX_XDNA_ISA lowers it."""

def counters() -> list[dict[str, object]]:
    """One row per (device, layout, numerics, batch, m, k, n) since import; rows only grow.

    Keys: device, layout, numerics, batch, m, k, n, calls, flops, seconds (wall), pack_a, pack_b,
    run, unpack (seconds, summed over the threads that worked), threads (summed over calls).
    """
