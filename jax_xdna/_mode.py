"""How a GEMM is computed: numerics, rounding and device, checked once."""

from __future__ import annotations

from typing import NamedTuple

from ._devices import resolve
from ._primitive import NUMERICS, ROUNDINGS


class Mode(NamedTuple):
    """The attributes every GEMM of a call shares."""

    numerics: str
    rounding: str
    device: str


def mode(device: str | None, numerics: str | None, rounding: str | None) -> Mode:
    """Fills in the defaults. Raises ValueError for a value that does not exist."""
    for name, value, choices in (
        ("numerics", numerics, NUMERICS),
        ("rounding", rounding, ROUNDINGS),
    ):
        if value is not None and value not in choices:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
    return Mode(numerics or NUMERICS[0], rounding or ROUNDINGS[0], resolve(device))
