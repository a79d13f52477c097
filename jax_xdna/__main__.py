"""`python -m jax_xdna`: what this machine has, whether it computes right, and how fast."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_xdna

from . import _ffi
from ._mode import mode
from ._selftest import self_test


def _versions() -> str:
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return f"Python {platform.python_version()}, " + ", ".join(found)


def _best(call: Callable[[], jax.Array], seconds: float = 1.0) -> float:
    """Median time of one call, in seconds."""
    call().block_until_ready()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _timing(size: int = 1024) -> None:
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((size, size)), jnp.float32) for _ in range(2))
    a16, b16 = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    ours = jax.jit(jax_xdna.dot)
    theirs = jax.jit(jnp.matmul)
    calls: list[tuple[str, Callable[[], jax.Array]]] = [
        ("jax_xdna.dot, f32 operands", lambda: ours(a, b)),
        ("XLA dot, f32", lambda: theirs(a, b)),
        ("XLA dot, bf16", lambda: theirs(a16, b16)),
    ]
    print(f"\n{size}×{size}×{size}, median of about a second each:")
    for name, call in calls:
        seconds = _best(call)
        print(f"  {name:<28} {1e3 * seconds:7.2f} ms  {2 * size**3 / seconds / 1e9:7.1f} GFLOP/s")


def main() -> int:
    """Prints the report. Returns 1 when the self-test fails, else 0."""
    print(f"jax_xdna {jax_xdna.__version__}\n{_versions()}")
    print(
        f"{platform.system()} {platform.machine()}; CPU features: {', '.join(_ffi.cpu_features())}"
    )
    print(f"micro-kernel in use: {_ffi.isa()} (JAX_XDNA_ISA lowers it)")
    print("\nDevices:")
    found = jax_xdna.devices()
    for device in found:
        print(f"  {device.name:<12} {device.description}")
    if not any(device.name.startswith("xrt") for device in found):
        print("  No NPU is used: there is no XRT device in this build. Products run emulated,")
        print("  with the same numbers, on CPU cores.")
    try:
        how = mode(None, None, None)
    except ValueError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1

    checks = self_test(how)
    failed = [check for check in checks if not check.passed]
    print(f"\nSelf-test on {how.device}: {len(checks) - len(failed)} of {len(checks)} cases pass")
    for out in ("float32", "bfloat16"):
        cases = [check for check in checks if check.name.endswith(f"→{out}")]
        print(
            f"  {out} results: error at most {max(c.worst for c in cases):.1e} of the accumulated "
            f"mass, signed mean {max((c.mean for c in cases), key=abs):+.1e}"
        )
    for check in failed:
        print(
            f"  FAILED {check.name}: error {check.worst:.1e}, mean {check.mean:+.1e}, allowed "
            f"{check.bound:.1e}"
        )
    _timing()
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["predict"]:
        from ._predict import main as predict

        sys.exit(predict(sys.argv[2:]))
    sys.exit(main())
