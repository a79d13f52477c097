"""`offload`: a function whose large dots run on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from . import _policy
from ._mode import Mode, mode
from ._rewrite import Rewriter
from ._trace import trace

P = ParamSpec("P")
R = TypeVar("R")


def offload(
    fn: Callable[P, R],
    *,
    policy: _policy.Rule | None = None,
    device: str | None = None,
    numerics: str | None = None,
    rounding: str | None = None,
) -> Callable[P, R]:
    """`fn` with every eligible dot that `policy` takes computed on the device.

    Put it around the **whole train step**: `jax.jit(jax_xdna.offload(train_step))` sees forward
    and backward dots. `jax.grad(offload(loss))` works too; then the dots in the rules of a user's
    own custom_vjp or custom_jvp stay on the CPU.

    Dots of other dtypes, and those whose precision asks for more than bfloat16, stay on the CPU.
    Whatever stays is the very same program as without `offload`. `jax_xdna.explain` tells which
    dots go where, and why.

    The result has the signature of `fn`. Arguments that are not arrays (Python scalars, strings,
    functions …) reach `fn` as they are. Every call traces `fn`, so jit the result, or `fn`.

    Args:
      fn: any function that JAX can trace.
      policy: `Policy.threshold()` by default, which takes dots of mean size 256 and more; another
        `Policy`; or a callable on a `Dot` that returns a bool, or a bool and a reason.
      device, numerics, rounding: as in `jax_xdna.dot`, for all of the dots.

    Raises:
      TypeError: fn or policy is not callable, or the policy returns something else.
      ValueError: an unknown device (also at the call) or mode.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; offload takes a function")
    rule = _policy.check(policy)
    mode(device, numerics, rounding)  # wrong values show up here rather than at the first call
    rewriter = functools.lru_cache(maxsize=8)(lambda how: Rewriter(rule, how))

    @functools.wraps(fn)
    def offloaded(*args: P.args, **kwargs: P.kwargs) -> R:
        how: Mode = mode(device, numerics, rounding)
        traced = trace(fn, args, kwargs)
        jaxpr, _ = rewriter(how).rewrite(traced.jaxpr)
        outputs = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *traced.inputs)
        result: R = traced.finish(outputs)
        return result

    return offloaded
