"""Finds the tools that compile for the NPU, or says how to get them."""

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MLIR_AIE = "1.4.5"  # the release that design.py is written for
_RELEASES = "https://github.com/Xilinx/{}/releases/expanded_assets/{}"
_INSTALL = f"""\
It needs x86-64 Linux with glibc 2.35, about 2.3 GB, and:
  pip install mlir_aie=={MLIR_AIE} -f {_RELEASES.format("mlir-aie", f"v{MLIR_AIE}")}
  pip install llvm-aie -f {_RELEASES.format("llvm-aie", "nightly")}
with the version of llvm-aie that utils/peano-requirements.txt of that mlir-aie release names."""


class ToolchainError(RuntimeError):
    """Tools are missing or of another version; the message says which and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """Where the tools are, and their versions."""

    mlir_aie: str
    llvm_aie: str
    aiecc: Path
    peano: Path  # of llvm-aie: bin/clang++
    include: Path  # of mlir-aie: aie_api/aie.hpp


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first(paths: list[Path | None], part: str) -> Path | None:
    return next((path for path in paths if path is not None and (path / part).exists()), None)


def find(version: Callable[[str], str | None] = _version) -> Toolchain:
    """The tools of this Python environment, of PEANO_INSTALL_DIR and of MLIR_AIE_INSTALL_DIR.

    Raises ToolchainError that lists everything missing at once.
    """
    missing = []
    mlir_aie = version("mlir_aie")
    if mlir_aie is None:
        missing.append(f"mlir-aie {MLIR_AIE} is not installed in this Python environment")
    elif mlir_aie.split("+")[0] != MLIR_AIE:
        missing.append(f"mlir-aie {mlir_aie} is installed, the design is for {MLIR_AIE}")
    spec = importlib.util.find_spec("aie")
    home = os.environ.get("MLIR_AIE_INSTALL_DIR")
    # The wheel holds mlir_aie/python/aie beside mlir_aie/bin and mlir_aie/include.
    beside = Path(spec.origin).parents[2] if spec is not None and spec.origin else None
    homes = [Path(home) if home else None, beside]
    include = _first(homes, "include/aie_api/aie.hpp")
    if include is None and mlir_aie is not None:
        missing.append("aie_api/aie.hpp is not there: set MLIR_AIE_INSTALL_DIR")
    aiecc = shutil.which("aiecc") or next(
        (str(h / "bin" / "aiecc") for h in homes if h and (h / "bin" / "aiecc").exists()), None
    )
    if aiecc is None:
        missing.append("aiecc is neither on PATH nor in mlir-aie's bin")
    peano_home = os.environ.get("PEANO_INSTALL_DIR")
    wheel = beside.parent / "llvm-aie" if beside is not None else None
    peano = _first([Path(peano_home) if peano_home else None, wheel], "bin/clang++")
    if peano is None:
        missing.append("Peano (llvm-aie) is not installed: no bin/clang++ in PEANO_INSTALL_DIR")
    if missing or include is None or aiecc is None or peano is None or mlir_aie is None:
        raise ToolchainError(
            "the NPU toolchain is not complete:\n"
            + "".join(f"  - {line}\n" for line in missing)
            + _INSTALL
        )
    return Toolchain(
        mlir_aie, version("llvm-aie") or "unknown", Path(aiecc), peano, include / "include"
    )
