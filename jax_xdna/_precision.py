"""Whether a dot's `precision` allows operands to be rounded to bfloat16."""

from __future__ import annotations

from typing import Any

from jax.lax import DotAlgorithmPreset, Precision

_ENOUGH = (
    DotAlgorithmPreset.DEFAULT,
    DotAlgorithmPreset.BF16_BF16_BF16,
    DotAlgorithmPreset.BF16_BF16_F32,
)


def too_precise(precision: Any) -> str | None:
    """Why bfloat16 products are not what `precision` asks for; None when they are.

    `precision` is anything `lax.dot_general` takes: None, a name, a Precision, a pair of them, or
    a dot algorithm.
    """
    if precision is None:
        return None
    for part in precision if isinstance(precision, tuple) else (precision,):
        if isinstance(part, str):
            part = _parse(part)
        if part is None or part == Precision.DEFAULT or part in _ENOUGH:
            continue
        name = getattr(part, "name", None) or str(part)
        return f"precision {name} asks for more than bfloat16"
    return None


def _parse(name: str) -> Any:
    try:
        return Precision(name)
    except ValueError:
        return DotAlgorithmPreset[name]
