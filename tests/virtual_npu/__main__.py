"""The tests that need XRT, on a virtual NPU of each generation: python -m tests.virtual_npu ROOT …

Makes the Debian root when it is not there, builds the device, and runs the tests of this directory
with the Python that this runs on. Further arguments go to pytest. Exit code 0 when all passed, or,
with a printed reason, where debootstrap cannot run.
"""

import sys
from pathlib import Path

from tests.sid import sid_root
from tests.virtual_npu.bench import bench, build_directory


def main() -> int:
    root, *arguments = sys.argv[1:]
    reason = sid_root(Path(root))
    if reason is not None:
        print(f"virtual NPU: skipped, {reason}")
        return 0
    with bench(Path(root)) as made:
        for npu in ("npu1", "npu2"):
            print(f"virtual {npu}:", flush=True)
            done = made.run(
                [sys.executable, "-m", "pytest", "-q", "tests/virtual_npu", *arguments],
                npu,
                VIRTUAL_NPU=npu,
                VIRTUAL_NPU_BUILD=f"{build_directory()}/tests/virtual_npu",
            )
            if done.returncode != 0:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
