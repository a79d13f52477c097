"""Runs a product's instruction stream on the simulated array and shows where the cycles go.

    python -m aie_kernels.simulate --arch npu1 256 768 2304

The operands are random. The result is compared with the emulated device's, bit for bit; the exit
code tells. About 0.8 GMAC a second.
"""

import argparse
import sys
from typing import Any

import numpy as np

from aie_kernels import packing
from aie_kernels._simulator import Report, SimulationError, Simulator
from jax_xdna import _ffi


def simulate(
    plan: dict[str, Any], a: packing.Array, b: packing.Array
) -> tuple[packing.Array, Report]:
    """The (m, n) product of a (m, k) and b (k, n), and what the array did.

    The plan is what `jax_xdna._ffi.plan` gives. Raises SimulationError when its stream does what
    the hardware cannot do.
    """
    simulator = Simulator(
        plan["arch"], plan["numerics"], *plan["tile"], plan["result"], plan["feed"] != "fifo"
    )
    packed_a, packed_b = packing.pack(plan, a, b)
    c = np.full(plan["buffer_bytes"][2], 0xFF, np.uint8)  # NaN, in both dtypes
    report = simulator.run(np.frombuffer(plan["stream"], np.uint32), packed_a, packed_b, c)
    return packing.unpack(plan, c), report


def add_design_flags(parser: argparse.ArgumentParser) -> None:
    """What tells one design of an array from another: datapath, result, tile."""
    parser.add_argument("--numerics", choices=["bf16", "bfp16"], default="bf16")
    parser.add_argument("--result", choices=["f32", "bf16"], default="f32")
    parser.add_argument(
        "--tile",
        type=int,
        nargs=4,
        metavar=("m", "k", "n", "C_BUFFERS"),
        help="default: the plan's choice, for the product or for 256×768×2304",
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aie_kernels.simulate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", choices=["npu1", "npu2"], required=True)
    add_design_flags(parser)
    parser.add_argument("--resident", action="store_true", help="the design that keeps A in L2")
    for name in "MKN":
        parser.add_argument(name.lower(), type=int, metavar=name)
    got = parser.parse_args(arguments)
    tile = None if got.tile is None else tuple(got.tile)
    try:
        plan = _ffi.plan(
            got.arch, got.m, got.k, got.n, got.numerics, tile, got.result, got.resident
        )
        rng = np.random.default_rng(0)
        a = rng.standard_normal((got.m, got.k), np.float32)
        b = rng.standard_normal((got.k, got.n), np.float32)
        c, report = simulate(plan, a, b)
    except (ValueError, SimulationError) as error:
        print(error, file=sys.stderr)
        return 1
    import jax_xdna

    want = jax_xdna.dot(
        a, b, preferred_element_type=c.dtype, device="emulated", numerics=got.numerics
    )
    bits = np.uint32 if got.result == "f32" else np.uint16
    different = int((c.view(bits) != np.asarray(want).view(bits)).sum())
    m, k, n, buffers = plan["tile"]
    print(
        f"{got.arch} {got.numerics} to {got.result} {got.m}x{got.k}x{got.n}:"
        f" tile {m}x{k}x{n}, C x{buffers}, {'transposed, ' if plan['transposed'] else ''}"
        f"I, KK, J = {plan['tiles']}, A by {plan['feed']},"
        f" stream {len(plan['stream'])} bytes"
    )
    print(report, end="")
    predicted = ", ".join(
        f"{name} {1e3 * plan['seconds'][name]:.3f}"
        for name in ("compute", "lanes", "dram", "edges")
    )
    print(f"predicted by the plan, ms: {predicted}")
    print(f"elements that differ from the emulated device: {different} of {c.size}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
