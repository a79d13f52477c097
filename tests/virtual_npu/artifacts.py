"""Artifacts for the virtual NPU: what the real build makes, but for the core program.

    python -m tests.virtual_npu.artifacts CACHE_DIR

inside the bench writes one per design into the cache directory. The xclbin is put together by AMD's
xclbinutil; where a real one carries the array's configuration (PDI), it says in plain text that
there is none and which design the virtual NPU is to simulate.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from aie_kernels import artifact, build, toolchain
from jax_xdna import _ffi

_NOTE = "jax-xdna's virtual NPU: this is no configuration of an array, there is no core program."
_BUFFERS = 5  # as many as mlir-aie declares
_KERNEL_ID = "0x901"


def _sections(columns: int) -> dict[str, Any]:
    """The JSON sections of an xclbin with the kernel MLIR_AIE on so many columns."""

    def memory(tag: str, size: str) -> dict[str, str]:
        return {
            "m_type": "MEM_DRAM",
            "m_used": "1",
            "m_sizeKB": size,
            "m_tag": tag,
            "m_base_address": "0x4000000",
        }

    def argument(name: str, kind: str, offset: int, where: str | None) -> dict[str, str]:
        place = {} if where is None else {"memory-connection": where}
        return {
            "name": name,
            "type": kind,
            "offset": hex(offset),
            "address-qualifier": "SCALAR" if where is None else "GLOBAL",
            **place,
        }

    arguments = [
        argument("opcode", "uint64_t", 0, None),
        argument("instr", "char *", 8, "SRAM"),
        argument("ninstr", "uint32_t", 16, None),
        *(argument(f"bo{i}", "void*", 20 + 8 * i, "HOST") for i in range(_BUFFERS)),
    ]
    return {
        "MEM_TOPOLOGY": {
            "mem_topology": {
                "m_count": "2",
                "m_mem_data": [memory("HOST", "0x10000"), memory("SRAM", "0xc000")],
            }
        },
        "kernel": {
            "ps-kernels": {
                "kernels": [
                    {
                        "name": "MLIR_AIE",
                        "type": "dpu",
                        "extended-data": {
                            "subtype": "DPU",
                            "functional": "0",
                            "dpu_kernel_id": _KERNEL_ID,
                        },
                        "arguments": arguments,
                        "instances": [{"name": "MLIRAIE"}],
                    }
                ]
            }
        },
        "AIE_PARTITION": {
            "aie_partition": {
                "name": "virtual",
                "operations_per_cycle": "2048",
                "inference_fingerprint": "0",
                "pre_post_fingerprint": "0",
                "partition": {"column_width": columns, "start_columns": [0]},
                "PDIs": [
                    {
                        "uuid": "00000000-0000-0000-0000-000000000000",
                        "file_name": "design.pdi",
                        "cdo_groups": [
                            {
                                "name": "DPU",
                                "type": "PRIMARY",
                                "pdi_id": "0x1",
                                "dpu_kernel_ids": [_KERNEL_ID],
                                "pre_cdo_groups": ["0xc1"],
                            }
                        ],
                    }
                ],
            }
        },
    }


def write_xclbin(path: Path, plan: dict[str, Any]) -> None:
    """The xclbin of the plan's design."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for section, content in _sections(plan["columns"]).items():
            (work / section).write_text(json.dumps(content))
        feed = "fifo" if plan["feed"] == "fifo" else "resident"
        words = [plan["arch"], plan["numerics"], plan["result"], feed, *plan["tile"]]
        (work / "design.pdi").write_text(f"{_NOTE}\n{' '.join(map(str, words))}\n")
        command = [
            *("xclbinutil", "--quiet", "--force", "--output", str(path.absolute())),
            *("--add-section", "MEM_TOPOLOGY:JSON:MEM_TOPOLOGY", "--add-kernel", "kernel"),
            *("--add-section", "AIE_PARTITION:JSON:AIE_PARTITION"),
        ]
        subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)


def write_artifact(cache: Path, plan: dict[str, Any]) -> Path:
    """The directory of the plan's artifact in the cache, with a manifest like a real one's."""
    none = Path()
    tools = toolchain.Toolchain("none: virtual NPU", "none: virtual NPU", none, none, none)
    made, _ = artifact.build(
        cache,
        build.describe(plan, tools),
        lambda directory: write_xclbin(directory / "gemm.xclbin", plan),
    )
    return made


def main() -> int:
    cache = Path(sys.argv[1])
    for arch, numerics in [("npu1", "bf16"), ("npu2", "bf16"), ("npu2", "bfp16")]:
        for result in ("f32", "bf16"):
            print(write_artifact(cache, _ffi.plan(arch, 256, 768, 2304, numerics, None, result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
