"""From gradients to updates: learning rates over the steps, optimizers that skip bad ones."""

from __future__ import annotations

from typing import Any

import jax
import optax

# Skips updates that are not finite, however many; the training loop decides when to give up.
_FOREVER = 2**31 - 1

SCHEDULES = ("cosine", "linear", "constant", "wsd")
# By name, the usual rates of both moving averages; Adafactor has none to choose.
BETAS: dict[str, tuple[float, float] | None] = {
    "adamw": (0.9, 0.95),
    "adafactor": None,
    "lion": (0.9, 0.99),
}


def schedule(
    lr: float, warmup: int, steps: int, shape: str = "cosine", min_lr: float | None = None
) -> optax.Schedule:
    """Linear warm-up to `lr`, then its way to `min_lr` (a tenth of `lr`) at `steps`.

    Args:
      shape: "cosine" and "linear" fall all the way; "constant" stays at `lr`; "wsd" (Hu et al.,
        "MiniCPM", 2024: warm-up, stable, decay) stays, and falls linearly in the last fifth.
    """
    warmup = min(warmup, steps - 1)
    end = lr / 10 if min_lr is None else min_lr
    rising = optax.linear_schedule(lr / (warmup + 1), lr, warmup)
    left = steps - warmup
    if shape == "cosine":
        after = optax.cosine_decay_schedule(lr, left, alpha=end / lr)
    elif shape == "linear":
        after = optax.linear_schedule(lr, end, left)
    elif shape == "constant":
        after = optax.constant_schedule(lr)
    else:
        falling = max(1, min(steps // 5, left))
        after = optax.linear_schedule(lr, end, falling, transition_begin=left - falling)
    return optax.join_schedules([rising, after], [warmup])


def decay_mask(params: Any) -> Any:
    """True for kernels and embeddings; biases and layer norms do not decay, as in GPT-2."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def optimizer(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    name: str = "adamw",
    betas: tuple[float, float] | None = None,
) -> optax.GradientTransformation:
    """A key of `BETAS`, after clipping by global norm. A step that is not finite changes nothing.

    Args:
      learning_rate: also the factor of the decay, whichever the optimizer.
      clip: the largest norm; 0 does not clip.
      name: "adamw" (Loshchilov and Hutter, 2019), "lion" (Chen et al., 2023), or "adafactor"
        (Shazeer and Stern, 2018), whose state is a row and a column per kernel; like AdamW's, its
        updates are about as large as the learning rate, not relative to the parameters.
      betas: instead of those of `BETAS`.
    """
    b1, b2 = betas or BETAS[name] or (0.0, 0.0)
    if name == "adafactor":
        # Not optax.adafactor: it decays weights by the whole rate, not times the learning rate.
        rule = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(weight_decay, decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    else:
        rules = {"adamw": optax.adamw, "lion": optax.lion}
        rule = rules[name](learning_rate, b1, b2, weight_decay=weight_decay, mask=decay_mask)
    if clip:
        rule = optax.chain(optax.clip_by_global_norm(clip), rule)
    return optax.apply_if_finite(rule, max_consecutive_errors=_FOREVER)
