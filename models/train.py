"""One optimizer step and one evaluation step, as pure functions for `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .gpt2 import GPT2
from .lora import Adapted

Params = Any


class State(NamedTuple):
    """All that changes in training. Dropout and data order follow from the seed and `step`."""

    step: jax.Array
    params: Params
    opt_state: Any


def init_state(params: Params, tx: optax.GradientTransformation) -> State:
    return State(jnp.zeros((), jnp.int32), params, jax.jit(tx.init)(params))


def loss_sum(
    model: GPT2 | Adapted,
    params: Params,
    tokens: jax.Array,
    weights: jax.Array,
    key: jax.Array | None,
    base: Params = None,
) -> jax.Array:
    """Cross-entropy in nats summed over the targets tokens[:, 1:], each times its weight.

    Without a key there is no dropout. With `base`, `params` are the adapters of an `Adapted`.
    """
    if base is not None:
        params = {"base": base, "adapters": params}
    rngs = None if key is None else {"dropout": key}
    logits = model.apply({"params": params}, tokens[:, :-1], key is None, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * weights)


def make_train_step(
    model: GPT2 | Adapted,
    tx: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    seed: int,
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """The step (state, tokens (A, B, T + 1), weights (A, B, T)[, base]) → (state, metrics).

    Gradients of the A micro-batches are summed before they are divided by the sum of all
    weights, so the step equals one large batch also when weights differ.
    """

    def train_step(
        state: State, tokens: jax.Array, weights: jax.Array, base: Params = None
    ) -> tuple[State, dict[str, jax.Array]]:
        total = jnp.maximum(jnp.sum(weights), 1)  # Nothing may count in a batch of questions.
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def micro_batch(sums: Any, batch: Any) -> tuple[Any, None]:
            index, tokens, weights = batch
            dropout = jax.random.fold_in(key, index) if model.config.dropout else None

            def loss(params: Params) -> jax.Array:
                return loss_sum(model, params, tokens, weights, dropout, base) / total

            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(state.params)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        batches = (jnp.arange(len(tokens)), tokens, weights)
        (loss, grads), _ = jax.lax.scan(micro_batch, zeros, batches)

        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "lr": learning_rate(state.step - state.opt_state.total_notfinite),
            "grad_norm": optax.tree.norm(grads),
        }
        return State(state.step + 1, params, opt_state), metrics

    return train_step


def make_eval_step(model: GPT2 | Adapted) -> Callable[..., jax.Array]:
    """The step (params, tokens (B, T + 1), weights (B, T)[, base]) → summed loss in nats."""
    return lambda params, tokens, weights, base=None: loss_sum(
        model, params, tokens, weights, None, base
    )
