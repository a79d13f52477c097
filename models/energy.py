"""Energy of the processor packages, by the RAPL counters that Linux shows in /sys/class/powercap.

They count all that runs on the package, other programs too; an NPU is part of it and has no counter
of its own.
"""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class Meter:
    """Sums energy from its construction on.

    A counter starts anew at its largest value, after about an hour at full power: `update` must be
    called more often than that.

    Attributes:
      packages: joules of each package by name, such as "package-0".
      missing: why there is none to read, "" when there is.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self.packages: dict[str, float] = {}
        self.missing = ""
        self._zones: dict[str, tuple[Path, int]] = {}
        self._last: dict[str, int] = {}
        # Of a package's parts (core, dram), its second interface (mmio) and the whole platform
        # (psys) each would be counted twice.
        for zone in sorted(root.glob("intel-rapl:*")):  # The kernel's name for it, also on AMD.
            try:
                name = (zone / "name").read_text().strip()
                if zone.name.count(":") != 1 or not name.startswith("package"):
                    continue
                limit = int((zone / "max_energy_range_uj").read_text())
                self._last[name] = int((zone / "energy_uj").read_text())
            except PermissionError:
                self.missing = (
                    f"{zone}/energy_uj is for root alone on most systems: to allow everyone, "
                    f"sudo chmod a+r {zone}/energy_uj"
                )
                continue
            except (OSError, ValueError) as error:
                self.missing = f"{zone} cannot be read: {error}"
                continue
            self._zones[name] = zone / "energy_uj", limit
            self.packages[name] = 0.0
        if self.missing:  # Some of the packages would look like all of them.
            self._zones, self.packages = {}, {}
        elif not self._zones:
            self.missing = f"no RAPL package in {root}, as in most virtual machines"

    @property
    def joules(self) -> float | None:
        """Of all packages together, up to the last `update`; None when there is no counter."""
        return sum(self.packages.values()) if self.packages else None

    def update(self) -> None:
        """Reads the counters. One that cannot be read any more ends the measurement."""
        for name, (path, limit) in self._zones.items():
            try:
                now = int(path.read_text())
            except (OSError, ValueError) as error:
                self._zones, self.packages = {}, {}
                self.missing = f"{path} could be read at first, then no more: {error}"
                return
            spent = now - self._last[name]
            self.packages[name] += (spent if spent >= 0 else spent + limit) / 1e6
            self._last[name] = now
