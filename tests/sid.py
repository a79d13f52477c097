"""A Debian sid in a directory, made by debootstrap: AMD's tools and XRT, as packaged there."""

import os
import shutil
import subprocess
from pathlib import Path

# AMD's decoder and xclbinutil; XRT with the NPU's driver; what compiles against it.
_PACKAGES = (
    *("libxrt-utils", "libxrt-utils-npu"),
    *("libxrt2", "libxrt-npu2", "libxrt-dev", "uuid-dev"),
    *("g++", "cmake", "ninja-build"),
)


def sid_root(root: Path) -> str | None:
    """Makes the root unless it is there; the reason when that is impossible here.

    Takes root rights, 1 GB and one to two minutes.
    """
    stamp = root / "packages"
    if stamp.exists() and stamp.read_text().split() == list(_PACKAGES):
        return None
    if os.geteuid() != 0:
        return "debootstrap needs root rights"
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed"
    if os.uname().machine != "x86_64":
        return "XRT for NPUs is packaged for x86-64"
    if root.exists() and any(root.iterdir()):
        raise FileExistsError(f"{root} is not a complete root of these packages: remove it")
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}"]
    subprocess.run([*command, "sid", str(root)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["chroot", str(root), "apt-get", "clean"], check=True)
    stamp.write_text("\n".join(_PACKAGES) + "\n")
    return None
