"""Models of several libraries through offload, untouched: values, gradients, decisions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import ALWAYS, normal

import jax_xdna


def compiled(fn):
    """jit that spends less on optimizing code that runs once."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def norm(tree):
    return np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(tree)))


def check(fn, *args, dots):
    """`fn(*args)` and a gradient by args[0], offloaded, against XLA; and every dot is taken."""

    def step(*args):
        def loss(p):
            y = fn(p, *args[1:])
            return jnp.mean(y**2), y

        return jax.grad(loss, has_aux=True)(args[0])

    want_grad, want = compiled(step)(*args)
    with jax_xdna.profile() as p:
        grad, got = jax.block_until_ready(compiled(jax_xdna.offload(step, policy=ALWAYS))(*args))
    assert got.shape == want.shape and got.dtype == want.dtype
    assert 0 < norm(got - want) < 0.02 * norm(want)  # not equal: it did run in bf16
    assert jax.tree.structure(grad) == jax.tree.structure(want_grad)
    assert norm(jax.tree.map(jnp.subtract, grad, want_grad)) < 0.05 * norm(want_grad)

    forward = jax_xdna.explain(fn, *args, policy=ALWAYS, print=False)
    rows = jax_xdna.explain(step, *args, policy=ALWAYS, print=False)
    assert len(forward) == dots and all(row.offloaded for row in rows)
    assert p.calls == len(rows) >= 2 * dots


LINEN = {
    "Dense": (nn.Dense(12), 1),
    "DenseGeneral": (nn.DenseGeneral((3, 4), axis=(-2, -1)), 1),
    "Conv-free MLP": (nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(8)]), 2),
    "MultiHeadDotProductAttention": (nn.MultiHeadDotProductAttention(2), 6),
    "Embed.attend": (None, 1),
}


@pytest.mark.parametrize("name", LINEN)
def test_flax_linen(rng, name):
    x = normal(rng, 2, 6, 8)
    model, dots = LINEN[name]
    if name == "Embed.attend":
        model = nn.Embed(20, 8)
        params = model.init(jax.random.key(0), jnp.zeros((1,), jnp.int32))
        return check(lambda p, x: model.apply(p, x, method="attend"), params, x, dots=1)
    params = model.init(jax.random.key(0), x)
    check(model.apply, params, x, dots=dots)


NNX = {
    "Linear": (lambda rngs: nnx.Linear(8, 12, rngs=rngs), 1),
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral((6, 8), (3, 4), axis=(-2, -1), rngs=rngs), 1),
    "MultiHeadAttention": (lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), 6),
    "Einsum": (lambda rngs: nnx.Einsum("btd,dhk->bthk", (8, 2, 5), (2, 5), rngs=rngs), 1),
}


@pytest.mark.parametrize("name", NNX)
def test_flax_nnx(rng, name):
    make, dots = NNX[name]
    graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
    x = normal(rng, 2, 6, 8)
    check(lambda p, x: nnx.merge(graph, p, rest)(x), params, x, dots=dots)
    # The module as an argument, as nnx users pass it.
    model = make(nnx.Rngs(0))
    got = jax_xdna.offload(lambda model, x: model(x), policy=ALWAYS)(model, x)
    assert jnp.linalg.norm(got - model(x)) < 0.02 * jnp.linalg.norm(got)


def test_an_equinox_mlp(rng):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    x = normal(rng, 6, 8)
    check(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params, x, dots=3)
    # A whole eqx module through offload, its activation functions among the leaves.
    got = jax_xdna.offload(lambda model, x: jax.vmap(model)(x), policy=ALWAYS)(model, x)
    assert jnp.linalg.norm(got - jax.vmap(model)(x)) < 0.02 * jnp.linalg.norm(got)

    @eqx.filter_jit
    @jax_xdna.offload
    def step(model, x):
        return eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)

    loss, grads = step(model, x)
    assert float(loss) > 0 and grads.layers[0].weight.shape == (16, 8)


class Layer(nn.Module):
    """A pre-norm transformer layer, with cross-attention when there is a memory."""

    heads: int = 2

    @nn.compact
    def __call__(self, x, memory=None, mask=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(y, mask=mask)
        if memory is not None:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads)(y, memory)
        y = nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. (2021): patches by reshape and a dense layer, class token, two layers."""

    @nn.compact
    def __call__(self, images):
        b, h, w, c = images.shape
        x = images.reshape(b, h // 4, 4, w // 4, 4, c).swapaxes(2, 3).reshape(b, -1, 16 * c)
        x = nn.Dense(16)(x)
        token = self.param("class", nn.initializers.normal(0.02), (1, 1, 16))
        x = jnp.concatenate([jnp.broadcast_to(token, (b, 1, 16)), x], 1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], 16))
        for _ in range(2):
            x = Layer()(x)
        return nn.Dense(5)(nn.LayerNorm()(x)[:, 0])


class EncoderDecoder(nn.Module):
    """Tokens to tokens (Vaswani et al., 2017), one layer on each side, a tied output."""

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(20, 16, embedding_init=nn.initializers.normal(1.0))
        memory = Layer()(embed(source))
        causal = nn.make_causal_mask(target)
        return embed.attend(Layer()(embed(target), memory, causal))


def test_a_vision_transformer(rng):
    images, model = normal(rng, 3, 12, 12, 3), VisionTransformer()
    params = model.init(jax.random.key(0), images)
    check(model.apply, params, images, dots=1 + 2 * 8 + 1)


def test_an_encoder_decoder(rng):
    source, target = (jnp.asarray(rng.integers(0, 20, (2, n))) for n in (7, 5))
    model = EncoderDecoder()
    params = model.init(jax.random.key(0), source, target)
    check(model.apply, params, source, target, dots=8 + 14 + 1)
