"""Compiles the packed GEMM for an NPU.

    python -m aie_kernels.build --arch npu1|npu2|auto [--numerics bfp16] [--result bf16]
    python -m aie_kernels.build --arch npu1 --emit-mlir design.mlir

The artifact is a directory in the cache: gemm.xclbin, the design it was made from, the tools' own
stream for one macro-tile and a JSON manifest. Before it is kept, the design must have the structure
that the plans assume, and that stream must give the right bits on the simulated array. --emit-mlir
needs no tools: it writes the design as text, with the sequence of 256x768x2304.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from aie_kernels import artifact, mlir, simulate, structure, toolchain
from aie_kernels._simulator import SimulationError, Simulator
from jax_xdna import _ffi

_SOURCES = Path(__file__).parent
_KERNEL = ("gemm_kernel.cc", "micro_tiles.h")


class BuildError(RuntimeError):
    """The design could not be compiled, or is not the one the plans are made for."""


def detect(devices: Path = Path("/sys/bus/pci/devices")) -> str:
    """The NPU of this machine, "npu1" or "npu2". Raises BuildError when there is none."""
    for device in sorted(devices.glob("*")):
        try:
            ids = [int((device / name).read_text(), 16) for name in ("vendor", "device")]
        except (OSError, ValueError):
            continue
        if ids == [0x1022, 0x1502]:
            return "npu1"
        if ids == [0x1022, 0x17F0]:
            return "npu2"
        if ids in ([0x1022, 0x17F1], [0x1022, 0x17F2]):
            raise BuildError(f"{device.name} is an NPU of a generation that has no design here")
    raise BuildError("no AMD NPU on the PCI bus; name the target with --arch npu1 or npu2")


def describe(plan: dict[str, Any], tools: toolchain.Toolchain) -> dict[str, Any]:
    """All that the artifact for this plan depends on, and what its user must know."""
    sources = hashlib.sha256()
    for name in (*_KERNEL, "design.py", "_iron.py"):
        sources.update((_SOURCES / name).read_bytes())
    return {
        "layout_version": artifact.LAYOUT_VERSION,
        "arch": plan["arch"],
        "numerics": plan["numerics"],
        "result": plan["result"],
        "tile": list(plan["tile"]),
        "micro_tile": list(plan["micro_tile"]),
        "rounding": "conv_even",
        "runtime_words_address": structure.RUNTIME_ADDRESS,
        "go_lock": structure.GO_LOCK,
        "stack_bytes": structure.STACK_BYTES,
        "mlir_aie": tools.mlir_aie,
        "llvm_aie": tools.llvm_aie,
        "sources_sha256": sources.hexdigest(),
    }


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def check_design(text: str, plan: dict[str, Any]) -> None:
    """Raises BuildError listing where the design is not the one that streams are made for."""
    differences = structure.parse(text).differences(
        structure.packed_gemm(plan["arch"], plan["tile"], plan["result"])
    )
    if differences:
        raise BuildError("\n  ".join(["the design is not the packed one:", *differences]))


def check_stream(stream: bytes, plan: dict[str, Any]) -> None:
    """Runs the tools' stream for one macro-tile on the simulated array.

    It wires channels, words and locks as our own streams do. Raises BuildError when the stream does
    anything else or its result is not that of ours.
    """
    m, k, n, _ = plan["tile"]
    shape = (structure.CORE_ROWS * m, k, n * plan["columns"])
    rng = np.random.default_rng(0)
    a = rng.standard_normal(shape[:2], np.float32)
    b = rng.standard_normal(shape[1:], np.float32)
    own = _ffi.plan(plan["arch"], *shape, plan["numerics"], plan["tile"], plan["result"])
    want, _ = simulate.simulate(own, a, b)
    try:
        got, _ = simulate.simulate({**own, "stream": stream}, a, b)
    except (SimulationError, ValueError) as error:
        raise BuildError(
            f"the tools' stream is not for the array of our streams: {error}"
        ) from error
    if got.tobytes() != want.tobytes():
        raise BuildError("the tools' stream gives another result than ours")


def compile_design(directory: Path, plan: dict[str, Any], tools: toolchain.Toolchain) -> None:
    """Writes gemm.xclbin, design.mlir and macro_tile.bin."""
    from aie_kernels.design import design  # mlir-aie, which has just been found

    text = design(plan["arch"], plan["tile"], plan["result"])
    check_design(text, plan)
    (directory / "design.mlir").write_text(text)
    target = "aie2" if plan["arch"] == "npu1" else "aie2p"
    m, k, n, _ = plan["tile"]
    defines = [f"-DDIM_M={m}", f"-DDIM_K={k}", f"-DDIM_N={n}"]
    if plan["numerics"] == "bfp16":
        defines.append("-DAIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16=1")
    compiler = [
        str(tools.peano / "bin" / "clang++"),
        *("-O2", "-std=c++20", "-DNDEBUG", "-D__AIE_API_AIE_ADF_HPP__"),
        f"--target={target}-none-unknown-elf",
        f"-I{tools.include}",
        *("-Wno-parentheses", "-Wno-attributes", "-Wno-macro-redefined", "-Wno-empty-body"),
        *defines,
        *("-c", str(_SOURCES / "gemm_kernel.cc"), "-o", "packed_gemm.o"),
    ]
    aiecc = [
        str(tools.aiecc),
        f"--peano={tools.peano}",
        *("--get-xclbin", f"--xclbin-name={directory / 'gemm.xclbin'}"),
        *("--get-npu-insts", f"--npu-insts-name={directory / 'macro_tile.bin'}"),
        str(directory / "design.mlir"),
    ]
    with tempfile.TemporaryDirectory() as work:
        _run(compiler, Path(work))
        _run(aiecc, Path(work))
    for name in ("gemm.xclbin", "macro_tile.bin"):
        if not (directory / name).exists():
            raise BuildError(f"aiecc wrote no {name}")
    if not (directory / "gemm.xclbin").read_bytes().startswith(b"xclbin2"):
        raise BuildError("what aiecc wrote as gemm.xclbin is no xclbin")
    check_stream((directory / "macro_tile.bin").read_bytes(), plan)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aie_kernels.build", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", choices=["npu1", "npu2", "auto"], required=True)
    simulate.add_design_flags(parser)
    parser.add_argument("--cache-dir", type=Path, default=artifact.cache_directory())
    parser.add_argument("--emit-mlir", type=Path, metavar="FILE")
    got = parser.parse_args(arguments)
    try:
        arch = detect() if got.arch == "auto" else got.arch
        tile = tuple(got.tile) if got.tile else None
        plan = _ffi.plan(arch, 256, 768, 2304, got.numerics, tile, got.result)
        Simulator(arch, got.numerics, *plan["tile"])  # refuses what the kernel cannot do
        if got.emit_mlir:
            got.emit_mlir.write_text(mlir.emit(plan))
            return 0
        tools = toolchain.find()
        directory, built = artifact.build(
            got.cache_dir,
            describe(plan, tools),
            lambda work: compile_design(work, plan, tools),
        )
    except (BuildError, toolchain.ToolchainError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{'built' if built else 'found'} {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
