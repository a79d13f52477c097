"""Flax linen and nnx: offload without touching their code, and dot_general as their hook."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import same_bits
from programs import ALWAYS, NEVER, normal, primitives

import jax_xdna


class Linen(nn.Module):
    dot_general: object = None

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(16, dot_general=self.dot_general)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.MultiHeadDotProductAttention(2)(x)
        x = nn.Dropout(0.3, deterministic=not train)(nn.LayerNorm()(x))
        return nn.DenseGeneral((2, 4), axis=-1, dot_general=self.dot_general)(x)


def relative(got, want):
    return max(
        float(jnp.linalg.norm(a - b) / (jnp.linalg.norm(b) + 1e-6))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def test_linen_apply_with_mutable_state_and_rngs(rng):
    x = normal(rng, 3, 5, 8)
    model = Linen()
    variables = model.init(jax.random.key(0), x)

    def run(apply):
        return apply(
            variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)}
        )

    want = run(model.apply)
    assert relative(run(jax_xdna.offload(model.apply, policy=ALWAYS)), want) < 0.02
    never = run(jax_xdna.offload(model.apply, policy=NEVER))
    same_bits(never[0], want[0])


def test_linen_train_step(rng):
    x = normal(rng, 3, 5, 8)
    model, tx = Linen(), optax.adamw(1e-2)
    variables = model.init(jax.random.key(0), x)
    params, stats = variables["params"], variables["batch_stats"]

    def step(params, opt_state, x):
        def loss(params):
            return jnp.mean(model.apply({"params": params, "batch_stats": stats}, x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return value, grads, optax.apply_updates(params, updates), opt_state

    offloaded = jax.jit(jax_xdna.offload(step, policy=ALWAYS), donate_argnums=1)
    value, grads, _, _ = offloaded(params, tx.init(params), x)
    want_value, want_grads, _, _ = jax.jit(step)(params, tx.init(params), x)
    assert abs(value - want_value) < 0.02 * abs(want_value)
    flat, want_flat = (
        jnp.concatenate([g.ravel() for g in jax.tree.leaves(t)]) for t in (grads, want_grads)
    )
    assert jnp.linalg.norm(flat - want_flat) < 0.03 * jnp.linalg.norm(want_flat)
    names = primitives(
        jax.make_jaxpr(jax_xdna.offload(step, policy=ALWAYS))(params, tx.init(params), x)
    )
    assert "dot_general" not in names


def test_dot_general_as_the_hook_of_layers(rng):
    x = normal(rng, 3, 5, 8)
    model = Linen(dot_general=jax_xdna.dot_general)
    variables = model.init(jax.random.key(0), x)
    assert relative(model.apply(variables, x), Linen().apply(variables, x)) < 0.02
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0), dot_general=jax_xdna.dot_general)
    same_bits(layer(x), jax_xdna.dot(x, layer.kernel[...]) + layer.bias[...].reshape(1, 1, -1))


class Module(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)
        self.tied = self.second
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        return self.tied(self.dropout(self.norm(nnx.relu(self.first(x)))))


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def train(step, x, steps=3):
    model = Module(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with jax_xdna.profile() as p:
        losses = [float(step(model, optimizer, x)) for _ in range(steps)]
    return losses, model, p.calls


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: jax_xdna.offload(nnx_step, policy=ALWAYS),
        lambda: nnx.jit(jax_xdna.offload(nnx_step, policy=ALWAYS)),
        lambda: jax_xdna.offload(nnx.jit(nnx_step), policy=ALWAYS),
    ],
)
def test_nnx_objects_are_updated_in_place(rng, wrap):
    x = normal(rng, 6, 8)
    want, reference, _ = train(nnx_step, x)
    losses, model, calls = train(wrap(), x)
    assert calls == 3 * 5
    np.testing.assert_allclose(losses, want, rtol=0.02)
    assert int(model.count[...]) == 3 and model.tied is model.second
    assert relative(model.norm.mean[...], reference.norm.mean[...]) < 0.02
    assert not np.array_equal(model.first.kernel[...], Module(nnx.Rngs(0)).first.kernel[...])


def test_nnx_loss_offloaded_inside_the_gradient(rng):
    x = normal(rng, 6, 8)
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    got = nnx.value_and_grad(jax_xdna.offload(loss, policy=ALWAYS))(Module(nnx.Rngs(0)), x)
    want = nnx.value_and_grad(loss)(Module(nnx.Rngs(0)), x)
    assert relative(got, want) < 0.05


def test_nnx_attention_and_einsum(rng):
    x = normal(rng, 2, 5, 8)
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    einsum = nnx.Einsum("bti,io->bto", (8, 4), None, rngs=nnx.Rngs(0))
    for model in (attention, einsum):
        f = jax_xdna.offload(lambda m, x: m(x), policy=ALWAYS)
        assert relative(f(model, x), model(x)) < 0.02
        rows = jax_xdna.explain(lambda m, x: m(x), model, x, policy=ALWAYS, print=False)
        assert rows and all(row.offloaded for row in rows)


def test_an_nnx_module_or_method_as_the_function(rng):
    x = normal(rng, 6, 8)
    model, reference = Module(nnx.Rngs(0)), Module(nnx.Rngs(0))
    want = reference(x)
    assert relative(jax_xdna.offload(model, policy=ALWAYS)(x), want) < 0.02
    assert int(model.count[...]) == 1  # updated in place, with arrays and not with tracers
    assert relative(jax_xdna.offload(model.__call__, policy=ALWAYS)(x), reference(x)) < 0.02
    assert int(model.count[...]) == 2
    rows = jax_xdna.explain(model, x, policy=ALWAYS, print=False)
    assert len(rows) == 2 and int(model.count[...]) == 2
