"""What a product costs on the CPU and through the NPU, and the rule that takes the cheaper way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _ffi
from ._host import Host
from ._policy import Dot, Verdict

Plan = dict[str, Any]
_BYTES = {"float32": 4, "bfloat16": 2}
# (M, K, N, calls) of a GPT-2 layer: one design serves a program, and a policy sees one dot only.
_TYPICAL = [(256, 768, 2304, 1), (256, 2304, 768, 1), (2304, 256, 768, 1)]


@dataclass(frozen=True)
class Cost:
    """Predicted figures of one call of a dot, its batch included.

    Attributes:
      cpu: seconds on the CPU, by XLA.
      npu: seconds of the array, dispatch included.
      total: seconds through the NPU, packing and unpacking included: what `cpu` compares with.
      intensity: FLOPs asked for over bytes that pass the NPU's DRAM interface.
      bound: what `total` has most of: compute, DRAM, lanes (the busiest stream), dispatch or
        packing (and unpacking).
      useful_share: FLOPs asked for over FLOPs computed.
    """

    cpu: float
    npu: float
    total: float
    intensity: float
    bound: str
    useful_share: float


def cpu_seconds(dot: Dot, host: Host) -> float:
    """Seconds of one product by XLA: FLOPs at its measured rate, or bytes at the host's bandwidth.

    The rate is that of f32 operands; XLA's bf16 dots on CPUs are rarely faster.
    """
    return max(2 * dot.m * dot.k * dot.n / host.flops, sum(_operand_bytes(dot)) / host.pack)


def _operand_bytes(dot: Dot) -> tuple[int, int, int]:
    """Bytes of A, B and C as JAX holds them."""
    return (
        _BYTES[dot.lhs_dtype] * dot.m * dot.k,
        _BYTES[dot.rhs_dtype] * dot.k * dot.n,
        _BYTES[dot.out_dtype] * dot.m * dot.n,
    )


def predict(plan: Plan, host: Host, jax_bytes: tuple[int, int, int]) -> tuple[float, float]:
    """Seconds of a product by `plan` with its host side, and seconds that the host works of them.

    The pieces of the plan form a pipeline: the host packs piece i + 1 and unpacks piece i - 1 while
    the array runs piece i. A dispatch is a delay before a piece starts, hidden for all pieces but
    the first where pieces run longer than that. The operand that is not cut is packed before.

    `jax_bytes` are the sizes of A, B and C outside, read or written once each at the host's rates.
    """
    a, b, c = plan["buffer_bytes"]
    if plan["transposed"]:
        a, b = b, a
    pack_a, pack_b = (jax_bytes[0] + a) / host.pack, (jax_bytes[1] + b) / host.pack
    unpack = (jax_bytes[2] + c) / host.unpack
    along_m = plan["chunks_along"] == "m"
    whole, cut = (pack_b, pack_a) if along_m else (pack_a, pack_b)
    seconds = plan["seconds"]
    run = seconds["total"] - seconds["dispatch"] - seconds["edges"]
    shares = [size / plan["m" if along_m else "n"] for _, size in plan["chunks"]]

    now, array, ends = whole, 0.0, list[float]()
    for i in range(len(shares) + 1):
        if i < len(shares):
            now += cut * shares[i]
            array = max(array, now + seconds["dispatch"]) + seconds["edges"] + run * shares[i]
            ends.append(array)
        if i > 0:
            now = max(now, ends[i - 1]) + unpack * shares[i - 1]
    return now, pack_a + pack_b + unpack


@dataclass(frozen=True)
class CostModel:
    """The rule of `Policy.cost_model`: products of one design of one NPU beside one CPU."""

    host: Host
    arch: str
    numerics: str
    power: str
    tile: tuple[int, int, int, int]

    @staticmethod
    def of(
        host: Host,
        arch: str,
        numerics: str,
        power: str,
        shapes: list[tuple[int, int, int, int]] = _TYPICAL,
    ) -> CostModel:
        """With the tile that is predicted to serve `shapes`, (M, K, N, calls), best."""
        tile = _ffi.best_tile(arch, shapes, numerics, power=power)
        return CostModel(host, arch, numerics, power, tile)

    def cost(self, dot: Dot) -> Cost | None:
        """None for a product that the NPU cannot compute."""
        if not {dot.lhs_dtype, dot.rhs_dtype, dot.out_dtype} <= _BYTES.keys():
            return None
        try:
            plan = _ffi.plan(
                self.arch, dot.m, dot.k, dot.n, self.numerics, self.tile, power=self.power
            )
        except ValueError:
            return None
        seconds = plan["seconds"]
        total, host = predict(plan, self.host, _operand_bytes(dot))
        parts = {
            "compute": seconds["compute"],
            "DRAM": seconds["dram"],
            "lanes": seconds["lanes"],
            "dispatch": seconds["dispatch"] + seconds["edges"],
            "packing": host,
        }
        return Cost(
            cpu=dot.batch * cpu_seconds(dot, self.host),
            npu=dot.batch * seconds["total"],
            total=dot.batch * total,
            intensity=2 * dot.m * dot.k * dot.n / plan["dram_bytes"],
            bound=max(parts, key=lambda name: parts[name]),
            useful_share=plan["useful_share"],
        )

    def __call__(self, dot: Dot) -> Verdict:
        """Whether the way through the NPU is predicted to be the faster one."""
        if (cost := self.cost(dot)) is None:
            return False, f"{self.arch} cannot compute it"
        verdict = cost.total < cost.cpu
        return verdict, f"{self.arch} {1e3 * cost.total:.3g} ms, CPU {1e3 * cost.cpu:.3g} ms"
