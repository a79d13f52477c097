"""One optimizer step: accumulation, decay, skipping, dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from models import optimizers, train
from models.gpt2 import GPT2


@pytest.fixture(scope="module")
def config(config):
    return dataclasses.replace(config, n_layer=1)


@pytest.fixture(scope="module")
def batch(config):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, config.vocab_size, (6, 17)).astype(np.int32)
    # Unequal weights, so that a mean of means would be wrong.
    weights = (rng.random((6, 16)) < np.linspace(0.2, 1, 6)[:, None]).astype(np.float32)
    return tokens, weights


CLIP = 0.1


@pytest.fixture(scope="module")
def adamw():
    return optimizers.optimizer(optax.constant_schedule(1e-2), clip=CLIP)


@pytest.fixture(scope="module")
def step(config, adamw):
    return jax.jit(train.make_train_step(GPT2(config), adamw, optax.constant_schedule(1e-2), 0))


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


def test_the_step_is_adamw_with_clipping(config, params, batch, step, adamw):
    tokens, weights = batch
    state, metrics = step(train.init_state(params, adamw), tokens[None], weights[None])

    def loss(params):
        return train.loss_sum(GPT2(config), params, tokens, weights, None) / weights.sum()

    grads = jax.jit(jax.grad(loss))(params)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    assert norm > CLIP
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)

    for name, p in flatten_dict(params).items():
        g = np.asarray(flatten_dict(grads)[name], np.float64) * CLIP / norm
        decay = 0.1 * p if name[-1] in ("kernel", "embedding") else 0.0
        # The first step of Adam: moments are (1 − β) of the gradient, and corrected for that.
        wanted = p - 1e-2 * (g / (np.abs(g) + 1e-8) + decay)
        got = flatten_dict(state.params)[name]
        clear = np.abs(g) > 1e-6  # Where the sign of the gradient is not rounding error.
        np.testing.assert_allclose(
            np.where(clear, got, 0), np.where(clear, wanted, 0), atol=2e-5, err_msg=str(name)
        )


def test_decay_mask(params):
    mask = flatten_dict(optimizers.decay_mask(params))
    assert {name[-1] for name, on in mask.items() if on} == {"kernel", "embedding"}
    assert {name[-1] for name, on in mask.items() if not on} == {"bias", "scale"}


@pytest.mark.parametrize("name", optimizers.BETAS)
def test_without_gradient_only_masked_parameters_decay(params, name):
    tx = optimizers.optimizer(1e-2, weight_decay=0.5, name=name)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    after = flatten_dict(optax.apply_updates(params, updates))
    for name, before in flatten_dict(params).items():
        factor = 1 - 0.5 * 1e-2 if name[-1] in ("kernel", "embedding") else 1.0
        np.testing.assert_allclose(after[name], factor * before, rtol=1e-6)


def test_lion_is_the_sign_of_what_moves_and_takes_betas():
    """Two steps by hand, of Chen et al. (2023), algorithm 2."""
    tx = optimizers.optimizer(0.1, weight_decay=0.0, clip=0, name="lion", betas=(0.5, 0.75))
    params = {"w": jnp.zeros((1, 3))}
    state = tx.init(params)
    first, state = tx.update({"w": jnp.asarray([[4.0, -4.0, 4.0]])}, state, params)
    np.testing.assert_allclose(first["w"], [[-0.1, 0.1, -0.1]], rtol=1e-6)
    # The mean is (1 − 0.75) · 4 = 1 in size; half of it and half of the gradient decide.
    second, state = tx.update({"w": jnp.asarray([[-0.9, 0.9, -1.1]])}, state, params)
    np.testing.assert_allclose(second["w"], [[-0.1, 0.1, 0.1]], rtol=1e-6)


def test_adafactor_remembers_a_row_and_a_column_per_kernel():
    """The first step by hand, of Shazeer and Stern (2018), algorithm 4, where β₂ is 0."""
    rng = np.random.default_rng(4)
    grad = rng.standard_normal((128, 192)).astype(np.float32)
    tx = optimizers.optimizer(0.1, weight_decay=0.0, clip=0, name="adafactor")
    params = {"w": jnp.zeros((128, 192))}
    state = tx.init(params)
    large = [leaf.shape for leaf in jax.tree.leaves(state) if leaf.size > 1]
    assert sorted(large) == [(128,), (192,)]
    update, _ = tx.update({"w": jnp.asarray(grad)}, state, params)
    square = np.square(grad, dtype=np.float64)
    rows, columns = square.mean(1, keepdims=True), square.mean(0, keepdims=True)
    scaled = grad / np.sqrt(rows * columns / square.mean())
    scaled /= max(1.0, np.sqrt(np.square(scaled).mean()))
    np.testing.assert_allclose(update["w"], -0.1 * scaled, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_clipping(params, clip):
    tx = optimizers.optimizer(1.0, 0.0, clip, name="adamw")
    grads = jax.tree.map(lambda p: jnp.ones_like(p), params)
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    norm = optax.tree.norm(optax.tree.get(state, "mu")) / (1 - 0.9)
    whole = np.sqrt(sum(leaf.size for leaf in jax.tree.leaves(params)))
    assert float(norm) == pytest.approx(clip or whole, rel=1e-4)


def test_a_step_that_is_not_finite_is_skipped_and_counted(params, batch, step, adamw):
    tokens, weights = batch
    good, _ = step(train.init_state(params, adamw), tokens[None], weights[None])
    skipped, metrics = step(good, tokens[None], np.full_like(weights, np.inf)[None])
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


SHAPES = {
    # At half and at four fifths of the way from the warm-up's end to the last step, and there.
    "cosine": (0.55, 0.1859423, 0.1),
    "linear": (0.55, 0.28, 0.1),
    "constant": (1.0, 1.0, 1.0),
    "wsd": (1.0, 1 - 0.9 * 2 / 22, 0.1),
}


@pytest.mark.parametrize(("shape", "values"), SHAPES.items())
def test_shapes_of_the_schedule(shape, values):
    lr = optimizers.schedule(1.0, 10, 110, shape)
    assert [float(lr(i)) for i in (60, 90, 110)] == pytest.approx(values)
    assert [float(lr(i)) for i in range(11)] == pytest.approx([(i + 1) / 11 for i in range(11)])
    if shape != "constant":
        assert float(optimizers.schedule(1.0, 10, 110, shape, 0.0)(110)) == pytest.approx(0)
    for warmup, steps in ((0, 1), (5, 1), (5, 5), (0, 3), (7, 9)):
        short = optimizers.schedule(1.0, warmup, steps, shape)
        assert all(0 < float(short(i)) <= 1 for i in range(steps))


def test_schedule():
    lr = optimizers.schedule(1.0, warmup=10, steps=100)
    assert float(lr(0)) == pytest.approx(1 / 11)
    assert float(lr(10)) == pytest.approx(1.0)
    assert float(lr(55)) == pytest.approx(0.55)
    assert float(lr(100)) == pytest.approx(0.1)
    assert all(float(lr(i)) < float(lr(i + 1)) for i in range(10))
    assert all(float(lr(i)) > float(lr(i + 1)) for i in range(10, 100))
    theirs = optax.warmup_cosine_decay_schedule(1 / 11, 1.0, 10, 100, 0.1)
    assert [float(lr(i)) for i in range(100)] == [float(theirs(i)) for i in range(100)]


def test_dropout_follows_seed_step_and_micro_batch(config, params, batch):
    model = GPT2(dataclasses.replace(config, dropout=0.3))
    tx, constant = optax.apply_if_finite(optax.sgd(0.0), 1), optax.constant_schedule(0.0)
    tokens = np.broadcast_to(batch[0][0], (2, 2, 17))
    ones = np.ones((1, 2, 16), np.float32)

    @jax.jit
    def loss(seed, step, weights):
        state = train.init_state(params, tx)._replace(step=step)
        return train.make_train_step(model, tx, constant, seed)(state, tokens, weights)[1]["loss"]

    first, second = (np.concatenate([x * ones, (1 - x) * ones]) for x in (1, 0))
    # The same text each time, so that only the masks can make a difference.
    cases = [(1, 0, first), (1, 0, second), (1, 1, first), (2, 0, first)]
    losses = [float(loss(*case)) for case in cases]
    assert losses == [float(loss(*case)) for case in cases]
    assert len(set(losses)) == len(cases)


def test_evaluation_sums_weighted_losses_without_dropout(config, params, batch):
    tokens, weights = batch
    evaluate = jax.jit(train.make_eval_step(GPT2(dataclasses.replace(config, dropout=0.5))))
    logits = jax.jit(GPT2(config).apply)({"params": params}, tokens[:, :-1])
    logp = jax.nn.log_softmax(logits[..., : config.vocab_size])
    picked = np.take_along_axis(np.asarray(logp), tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        evaluate(params, tokens, weights), -(picked * weights).sum(), rtol=1e-5
    )
