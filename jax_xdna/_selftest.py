"""A short check of the device against float64, over layouts and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import jax.numpy as jnp
import numpy as np

from ._mode import Mode
from ._primitive import DTYPES, gemm
from ._shapes import LAYOUTS

# float32 accumulation in order of k: each of K roundings is at most 2^-24 of the running sum,
# itself at most the mass, so K · 2^-24 is the worst case; rounding errors of random sign give
# about its square root. Four times that is allowed.
_MARGIN = 4.0
_UNIT = 2.0**-24


@dataclass(frozen=True)
class Check:
    """One case. Errors are relative to the accumulated mass K · mean|a| · mean|b|."""

    name: str
    worst: float
    mean: float  # signed: a bias would show here
    bound: float

    @property
    def passed(self) -> bool:
        return bool(self.worst <= self.bound and abs(self.mean) <= self.bound / 4)


def self_test(how: Mode, shape: tuple[int, int, int] = (70, 301, 90)) -> list[Check]:
    """Multiplies random matrices in every layout and dtype on `how.device`.

    The oracle is the float64 product of the operands rounded to bfloat16.
    """
    m, k, n = shape
    rng = np.random.default_rng(0)
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = rng.standard_normal((k, n)).astype(np.float32)
    wide_a, wide_b = (x.astype(jnp.bfloat16).astype(np.float64) for x in (a, b))
    want = wide_a @ wide_b
    mass = k * np.abs(wide_a).mean() * np.abs(wide_b).mean()
    checks = []
    for layout, (dtype_a, dtype_b, dtype_c) in product(LAYOUTS, product(DTYPES, repeat=3)):
        got = gemm(
            jnp.asarray(a.T if layout[0] == "T" else a, dtype_a),
            jnp.asarray(b.T if layout[1] == "T" else b, dtype_b),
            layout=layout,
            out_dtype=dtype_c,
            **how._asdict(),
        )
        error = (np.asarray(got).astype(np.float64) - want) / mass
        bound = _MARGIN * k**0.5 * _UNIT
        if dtype_c == jnp.bfloat16:
            bound += float(np.abs(want).max() / mass) * 2.0**-8  # half a unit in the last place
        name = f"{layout} {dtype_a}·{dtype_b}→{dtype_c}"
        checks.append(Check(name, float(np.abs(error).max()), float(error.mean()), bound))
    return checks
