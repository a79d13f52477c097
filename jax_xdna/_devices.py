"""Which device computes, by argument, context, process-wide setting or environment."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from . import _ffi
from . import _jax_compat as compat

# Part of the key of jit's caches, so a program traced for one device is never reused for another.
_context = compat.make_user_context(None)
_environment = os.environ.get("XDNA_DEVICE") or None
_lock = threading.Lock()
_process_wide: list[default_device] = []


@dataclass(frozen=True)
class Device:
    """A device that can compute a GEMM: its name, as other functions take it, and what it is."""

    name: str
    description: str


def devices() -> list[Device]:
    """The devices of this process; the first is the default."""
    return [Device(name, description) for name, description in _ffi.devices()]


def resolve(name: str | None, argument: str = "device") -> str:
    """The device to use when a caller asked for `name`.

    Falls back to `default_device`, then the environment's XDNA_DEVICE, then the first device.
    Raises ValueError when there is no such device.
    """
    if name is None and (name := _context.value) is not None:
        argument = "default_device"
    if name is None and (name := _environment) is not None:
        argument = "XDNA_DEVICE"
    names = [device.name for device in devices()]
    if name is None:
        return names[0]
    if name not in names:
        raise ValueError(
            f"{argument} is {name!r}, but this process has no such device; it has: "
            f"{', '.join(names)}"
        )
    return name


class default_device:
    """Sets the device that `dot`, `dot_general` and `offload` use when none is named.

    As a plain call, `default_device("emulated")`, it holds for the whole process from then on; as
    a context manager, `with default_device("emulated"):`, for this thread inside the block. None
    means the environment's choice. Functions already compiled by `jax.jit` are traced anew when
    the default differs from the one they were traced with.

    Raises ValueError when there is no such device.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None:
            resolve(name, "default_device")
        self._name = name
        self._inside: Any = None
        with _lock:
            _process_wide.append(self)
            _context.set_global(name)

    def __enter__(self) -> None:
        # Used as a context, so the call was not meant for the process: take it back.
        with _lock:
            if self in _process_wide:
                _process_wide.remove(self)
            _context.set_global(_process_wide[-1]._name if _process_wide else None)
        self._inside = _context(self._name)
        self._inside.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inside.__exit__(kind, error, traceback)
