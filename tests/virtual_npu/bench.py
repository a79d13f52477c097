"""Runs programs in a Debian sid with a virtual NPU.

    python -m tests.virtual_npu.bench ROOT npu1|npu2 COMMAND …

builds the device and runs the command, in the current directory, with the Python that this runs on
and its packages. XRT and its NPU driver library are Debian's, unmodified; ROOT is made by
debootstrap when it is not there.
"""

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.sid import sid_root

REPOSITORY = Path(__file__).resolve().parents[2]
_PCI = "0000:c5:00.1"
_DEVICE = f"/sys/devices/pci0000:00/0000:00:08.1/{_PCI}"
_NPUS = {
    "npu1": {"device": "0x1502", "revision": "0x00", "vbnv": "NPU Phoenix"},
    "npu2": {"device": "0x17f0", "revision": "0x11", "vbnv": "NPU Strix Halo"},
}


def _write_files(directory: Path, npu: str) -> None:
    """What XRT looks for in /sys and /dev/accel."""
    device = directory / _DEVICE.lstrip("/")
    (device / "accel" / "accel0").mkdir(parents=True)
    for name, text in {
        **_NPUS[npu],
        "vendor": "0x1022",
        "class": "0x118000",
        "device_type": "0",
        "fw_version": "1.1.2.64",
    }.items():
        (device / name).write_text(text + "\n")
    bus = directory / "sys/bus/pci"
    for link in (bus / "devices" / _PCI, bus / "drivers" / "amdxdna" / _PCI):
        link.parent.mkdir(parents=True)
        link.symlink_to(_DEVICE)
    module = directory / "sys/module/amdxdna"
    module.mkdir(parents=True)
    (module / "version").write_text("virtual\n")
    (directory / "accel").mkdir()
    (directory / "accel/accel0").touch()


def build_directory() -> str:
    """In the root: a checkout has its own."""
    return "/build/" + hashlib.sha256(str(REPOSITORY).encode()).hexdigest()[:12]


class Bench:
    """A root in which programs see the repository, this Python and one NPU."""

    def __init__(self, root: Path, files: Path) -> None:
        self._root = root
        self._files = files

    def run(
        self, command: list[str], npu: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there; `npu` is "npu1", "npu2" or None for no device at all.

        Mounts are private to the command and end with it.
        """
        shared = {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path.cwd()}
        lines = ["set -e"]
        if npu is not None:
            files = self._files / npu
            if not files.exists():
                _write_files(files, npu)
            lines += [
                f"mkdir -p {self._root}/dev/accel",
                f"mount --bind {files}/sys {self._root}/sys",
                f"mount --bind {files}/accel {self._root}/dev/accel",
            ]
            environment["LD_PRELOAD"] = f"{build_directory()}/tests/virtual_npu/libvirtual_npu.so"
        lines.append(f"mount --rbind /proc {self._root}/proc")
        for path in sorted(shared):
            lines.append(f"mkdir -p {self._root}{path} && mount --bind {path} {self._root}{path}")
        inner = shlex.join(
            ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        )
        inner = f"cd {shlex.quote(str(Path.cwd()))} && exec {inner}"
        lines.append(f"exec chroot {self._root} sh -c {shlex.quote(inner)}")
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines)],
            text=True,
            check=False,
            env={**os.environ, "PATH": f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )

    def build(self) -> None:
        """Compiles the device and the tests' programs against the root's XRT."""
        directory = build_directory()
        for command in (
            [
                *("cmake", "-G", "Ninja", "-S", str(REPOSITORY), "-B", directory),
                # Not the one of a virtual environment, which may be gone at the next build.
                "-DCMAKE_MAKE_PROGRAM=/usr/bin/ninja",
                *("-DJAX_XDNA_PYTHON=OFF", "-DJAX_XDNA_VIRTUAL_NPU=ON"),
            ],
            ["cmake", "--build", directory],
        ):
            script = f'log=$({shlex.join(command)} 2>&1) || {{ echo "$log"; exit 1; }}'
            self.run(["sh", "-c", script]).check_returncode()


@contextlib.contextmanager
def bench(root: Path) -> Iterator[Bench]:
    """The bench in a root that is there (see sid_root), with the device built."""
    with tempfile.TemporaryDirectory() as files:
        made = Bench(root.resolve(), Path(files))
        made.build()
        yield made


def main() -> int:
    root, npu, *command = sys.argv[1:]
    reason = sid_root(Path(root))
    if reason is not None:
        print(f"virtual NPU: {reason}", file=sys.stderr)
        return 1
    with bench(Path(root)) as made:
        return made.run(command, npu).returncode


if __name__ == "__main__":
    sys.exit(main())
