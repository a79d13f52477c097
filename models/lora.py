"""Low-rank adapters: a frozen GPT-2 and small matrices that learn what is to be added to it.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021): a kernel W becomes
W + (alpha / rank) · A·B, with A random and B zero at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from .errors import UserError
from .gpt2 import GPT2, Config

# Kernels of a block that can have adapters, by their names in `GPT2`: in and out of attention, in
# and out of the MLP.
TARGETS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# The projections to queries, keys and values. Hu et al. adapt those to queries and values.
DEFAULT_TARGETS = ("attn.c_attn",)
# alpha / rank where alpha is not given, as in litgpt.
DEFAULT_SCALE = 2.0


@dataclass(frozen=True)
class Adapted:
    """A GPT-2 whose "params" are {"base": its own, "adapters": those of `init`}.

    x·A·B is added to the output of a layer, so no gradient of W is ever computed.
    """

    model: GPT2
    scale: float

    @property
    def config(self) -> Config:
        return self.model.config

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """As `GPT2.apply`."""
        params = variables["params"]
        adapters = flatten_dict(params["adapters"])

        def add(call: Any, inputs: Any, named: Any, context: nn.module.InterceptorContext) -> Any:
            out = call(*inputs, **named)
            path = context.module.path
            if context.method_name != "__call__" or (*path, "a") not in adapters:
                return out
            a, b = adapters[*path, "a"], adapters[*path, "b"]
            return out + (inputs[0] @ a) @ (self.scale * b)

        with nn.intercept_methods(add):
            return self.model.apply({"params": params["base"]}, *args, **kwargs)


def init(base: Any, rank: int, targets: Sequence[str], seed: int) -> Any:
    """New adapters of a model's parameters, fp32: per kernel (in, out) a (in, rank), b (rank, out).

    They leave the model as it is. A is normal with variance 1 / in, so that x·A is as large as x.

    Raises:
      UserError: a kernel is too small for the rank.
    """
    wanted = {tuple(target.split(".")) for target in targets}
    paths = [path for path in sorted(flatten_dict(base)) if path[2:-1] in wanted]
    paths = [path for path in paths if path[-1] == "kernel"]
    adapters = {}
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), rank), len(paths))
    for path, key in zip(paths, keys, strict=True):
        rows, columns = flatten_dict(base)[path].shape
        if rank > min(rows, columns):
            raise UserError(
                f"--lora is {rank}; it must be at most {min(rows, columns)}, as the kernel "
                f"{'.'.join(path[:-1])} is {rows} × {columns}"
            )
        adapters[*path[:-1], "a"] = jax.random.normal(key, (rows, rank)) * rows**-0.5
        adapters[*path[:-1], "b"] = jnp.zeros((rank, columns))
    return unflatten_dict(adapters)


def merge(base: Any, adapters: Any, scale: float) -> Any:
    """The parameters of the plain model that computes the same: W + scale · A·B."""
    merged, small = flatten_dict(base), flatten_dict(adapters)
    for path in {path[:-1] for path in small}:
        change = small[*path, "a"] @ small[*path, "b"]
        merged[*path, "kernel"] = merged[*path, "kernel"] + scale * change
    return unflatten_dict(merged)
