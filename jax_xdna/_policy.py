"""Which dots go to the device: a dot's description and the rules that judge it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

Verdict = tuple[bool, str]


@dataclass(frozen=True)
class Dot:
    """One matrix product of a traced program, as a policy sees it.

    Attributes:
      source: "file:line" of the user's code, "" when unknown.
      name_stack: JAX's name stack, for example "jit(step)/transpose(jvp(Dense_0))".
      batch: number of products.
      m, k, n: rows, summed dimension and columns of one product.
      layout: NN, NT, TN or TT: how the operands are stored.
      copies: operands whose dimensions are interleaved and must be transposed in memory first.
      lhs_dtype, rhs_dtype, out_dtype: dtype names.
      calls: executions per call of the function: the product of the enclosing scans' lengths.
        Loops of unknown length and branches of a cond count once.
    """

    source: str
    name_stack: str
    batch: int
    m: int
    k: int
    n: int
    layout: str
    copies: int
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    calls: int

    @property
    def flops(self) -> int:
        """Floating-point operations of all calls: 2 · batch · M · K · N · calls."""
        return 2 * self.batch * self.m * self.k * self.n * self.calls


# What a policy may be: it returns whether the dot goes to the device, or that and why.
Rule = Callable[[Dot], bool | Verdict]


@dataclass(frozen=True)
class Policy:
    """A named rule. `Policy.threshold()` is the default of `offload` and `explain`.

    Any callable on a `Dot` that returns a bool, or a bool and a reason, serves as well. It must
    depend on the dot alone: answers are remembered.
    """

    name: str
    rule: Rule

    def __call__(self, dot: Dot) -> bool | Verdict:
        return self.rule(dot)

    def __repr__(self) -> str:
        return f"Policy.{self.name}"

    @staticmethod
    def threshold(min_size: int = 256) -> Policy:
        """Takes dots whose geometric mean of M, K and N is at least `min_size`.

        And none of M, K, N below min_size / 8: a thin product moves more data than it computes
        with. The batch does not count. Raises ValueError for a negative size.
        """
        if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
            raise ValueError(f"min_size is {min_size!r}; it must be an integer of 0 or more")

        def rule(dot: Dot) -> Verdict:
            if min(dot.m, dot.k, dot.n) * 8 < min_size:
                return False, f"thin: a dimension is below {min_size}/8"
            # In integers: exact at the boundary.
            if dot.m * dot.k * dot.n < min_size**3:
                mean = (dot.m * dot.k * dot.n) ** (1 / 3)
                return False, f"small: mean size {mean:.0f} is below {min_size}"
            return True, f"mean size is at least {min_size}"

        return Policy(f"threshold({min_size})", rule)

    @staticmethod
    def cost_model(
        arch: str,
        numerics: str = "bf16",
        power: str = "turbo",
        cache: str | os.PathLike[str] | None = None,
    ) -> Policy:
        """Takes dots that are predicted to be faster through the NPU than by XLA on this CPU.

        Packing and unpacking count. The NPU's time is the plan's prediction, the CPU's follows from
        rates that are measured on this machine once, in about a second. `explain` shows the
        predictions of each dot. Which device computes does not matter.

        Args:
          arch: "npu1" (Phoenix, Hawk Point) or "npu2" (Strix, Strix Halo, Krackan).
          numerics: "bf16", or "bfp16" for the fast datapath of npu2.
          power: "turbo", or "default" for an NPU left in the mode in which it starts.
          cache: directory of the measured rates; default: jax-xdna in XDG_CACHE_HOME or ~/.cache.

        Raises ValueError for another arch, numerics or power, and bfp16 on npu1.
        """
        from ._cost import CostModel
        from ._host import host

        rule = CostModel.of(host(cache), arch, numerics, power)
        return Policy(f"cost_model({arch}, {numerics}, {power})", rule)

    @staticmethod
    def always() -> Policy:
        """Takes every dot the device can compute."""
        return Policy("always()", lambda dot: (True, "policy: always"))

    @staticmethod
    def never() -> Policy:
        """Takes none."""
        return Policy("never()", lambda dot: (False, "policy: never"))


def check(policy: object) -> Rule:
    """The rule to apply for a user's `policy`. Raises TypeError when it is not one."""
    if policy is None:
        return Policy.threshold()
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            f"policy is {policy!r}; it must be a Policy or a callable that takes a dot's "
            "description and returns a bool, or a bool and a reason"
        )
    return policy


def ask(rule: Rule, dot: Dot) -> Verdict:
    """The rule's verdict with a reason. Raises TypeError when it is not a verdict."""
    answer: object = rule(dot)
    if isinstance(answer, bool):
        return answer, f"policy: {getattr(rule, '__name__', None) or repr(rule)}"
    match answer:
        case (bool(verdict), str(reason)):
            return verdict, reason
    raise TypeError(
        f"policy {rule!r} returned {answer!r} for {dot}; it must return a bool, or a bool and a "
        "reason (str)"
    )
