"""One optimizer step: accumulation, decay, skipping, dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from models import train
from models.gpt2 import GPT2


@pytest.fixture(scope="module")
def batch(config):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, config.vocab_size, (6, 17)).astype(np.int32)
    # Unequal weights, so that a mean of means would be wrong.
    weights = (rng.random((6, 16)) < np.linspace(0.2, 1, 6)[:, None]).astype(np.float32)
    return tokens, weights


def stepper(config, seed=0, lr=1e-2):
    learning_rate = optax.constant_schedule(lr)
    tx = train.optimizer(learning_rate)
    step = train.make_train_step(GPT2(config), tx, learning_rate, seed)
    return jax.jit(step), tx


def assert_close(a, b, rtol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


def assert_identical(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_accumulation_equals_one_large_batch(config, params, batch):
    # Plain SGD, so that parameters show gradients as they are: Adam would divide small ones by
    # their size, and rounding errors with them.
    tx = optax.apply_if_finite(optax.sgd(1.0), 1)
    step = jax.jit(train.make_train_step(GPT2(config), tx, optax.constant_schedule(1.0), 0))
    state = train.init_state(params, tx)
    tokens, weights = batch
    whole, metrics = step(state, tokens[None], weights[None])
    parts, metrics_of_parts = step(state, tokens.reshape(3, 2, 17), weights.reshape(3, 2, 16))
    assert_close(parts.params, whole.params, 1e-5)
    assert_close(metrics_of_parts, metrics, 1e-5)

    evaluate = jax.jit(train.make_eval_step(GPT2(config)))
    by_hand = evaluate(params, tokens, weights) / weights.sum()
    np.testing.assert_allclose(metrics["loss"], by_hand, rtol=1e-5)
    mean_of_means = np.mean(
        [
            evaluate(params, t, w) / w.sum()
            for t, w in zip(tokens.reshape(3, 2, 17), weights.reshape(3, 2, 16), strict=True)
        ]
    )
    assert abs(mean_of_means - by_hand) > 1e-3


def test_the_step_is_adamw_with_clipping(config, params, batch):
    tokens, weights = batch
    step, tx = stepper(config)
    state, metrics = step(train.init_state(params, tx), tokens[None], weights[None])

    def loss(params):
        return train.loss_sum(GPT2(config), params, tokens, weights, None) / weights.sum()

    grads = jax.jit(jax.grad(loss))(params)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    assert norm > 1  # Clipping acts.
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)

    for name, p in flatten_dict(params).items():
        g = np.asarray(flatten_dict(grads)[name], np.float64) / norm
        decay = 0.1 * p if name[-1] in ("kernel", "embedding") else 0.0
        # The first step of Adam: moments are (1 − β) of the gradient, and corrected for that.
        wanted = p - 1e-2 * (g / (np.abs(g) + 1e-8) + decay)
        got = flatten_dict(state.params)[name]
        clear = np.abs(g) > 1e-6  # Where the sign of the gradient is not rounding error.
        np.testing.assert_allclose(
            np.where(clear, got, 0), np.where(clear, wanted, 0), atol=2e-5, err_msg=str(name)
        )


def test_decay_mask(params):
    mask = flatten_dict(train.decay_mask(params))
    assert {name[-1] for name, on in mask.items() if on} == {"kernel", "embedding"}
    assert {name[-1] for name, on in mask.items() if not on} == {"bias", "scale"}


def test_without_gradient_only_masked_parameters_decay(params):
    tx = train.optimizer(1e-2, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    after = flatten_dict(optax.apply_updates(params, updates))
    for name, before in flatten_dict(params).items():
        factor = 1 - 0.5 * 1e-2 if name[-1] in ("kernel", "embedding") else 1.0
        np.testing.assert_allclose(after[name], factor * before, rtol=1e-6)


def test_a_step_that_is_not_finite_is_skipped_and_counted(config, params, batch):
    tokens, weights = batch
    step, tx = stepper(config)
    good, _ = step(train.init_state(params, tx), tokens[None], weights[None])
    skipped, metrics = step(good, tokens[None], weights[None] * np.float32("inf"))
    assert not np.isfinite(metrics["loss"])
    assert_identical(skipped.params, good.params)
    assert_identical(skipped.opt_state.inner_state, good.opt_state.inner_state)
    assert int(skipped.opt_state.total_notfinite) == 1
    assert int(skipped.step) == 2
    # Training goes on as if nothing had happened.
    after, _ = step(skipped, tokens[None], weights[None])
    wanted, _ = step(good, tokens[None], weights[None])
    assert_identical(after.params, wanted.params)
    assert int(after.opt_state.notfinite_count) == 0
    assert int(after.opt_state.total_notfinite) == 1


def test_schedule():
    lr = train.schedule(1.0, warmup=10, steps=100)
    assert float(lr(0)) == pytest.approx(1 / 11)
    assert float(lr(10)) == pytest.approx(1.0)
    assert float(lr(55)) == pytest.approx(0.55)
    assert float(lr(100)) == pytest.approx(0.1)
    assert all(float(lr(i)) < float(lr(i + 1)) for i in range(10))
    assert all(float(lr(i)) > float(lr(i + 1)) for i in range(10, 100))
    for warmup, steps in ((0, 1), (5, 1), (5, 5), (0, 3)):
        short = train.schedule(1.0, warmup, steps)
        assert all(0 < float(short(i)) <= 1 for i in range(steps))


def test_dropout_follows_seed_step_and_micro_batch(config, params, batch):
    tokens = np.repeat(batch[0][:1], 4, axis=0).reshape(2, 2, 17)
    weights = np.ones((2, 2, 16), np.float32)
    dropped = dataclasses.replace(config, dropout=0.3)

    def losses(seed):
        step, tx = stepper(dropped, seed, lr=0.0)
        state = train.init_state(params, tx)
        found = []
        for _ in range(2):
            state, metrics = step(state, tokens, weights)
            found.append(float(metrics["loss"]))
        return found

    assert losses(1) == losses(1)
    assert len({*losses(1), *losses(2)}) == 4
    # Equal micro-batches get different masks: their mean is not the loss of the first.
    step, tx = stepper(dropped, 1, lr=0.0)
    _, metrics = step(train.init_state(params, tx), tokens[:1], weights[:1])
    assert float(metrics["loss"]) != losses(1)[0]


def test_evaluation_sums_weighted_losses_without_dropout(config, params, batch):
    tokens, weights = batch
    evaluate = jax.jit(train.make_eval_step(GPT2(dataclasses.replace(config, dropout=0.5))))
    logits = jax.jit(GPT2(config).apply)({"params": params}, tokens[:, :-1])
    logp = jax.nn.log_softmax(logits[..., : config.vocab_size])
    picked = np.take_along_axis(np.asarray(logp), tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        evaluate(params, tokens, weights), -(picked * weights).sum(), rtol=1e-5
    )
