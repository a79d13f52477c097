"""GPT-2 through `offload`: every gradient tensor against fp32, within what bf16 operands cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jax_xdna
from models import train
from models.gpt2 import GPT2, Config

# An operand's rounding error is at most 2^-9 of it. Errors of a few products in a chain add up,
# as if independent, to a few times that; measured here: at most 0.009.
BOUND = 0.02


@pytest.fixture(scope="module")
def gradients():
    config = Config(vocab_size=257, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    model = GPT2(config)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    # Trained models have larger weights than the initial ones; so attention is not uniform.
    params = jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, params)
    tokens = np.random.default_rng(0).integers(0, 257, (4, 33)).astype(np.int32)
    weights = jnp.ones((4, 32))

    def loss(params):
        return train.loss_sum(model, params, tokens, weights, None) / weights.sum()

    step = jax.value_and_grad(loss)
    with jax_xdna.profile() as profile:
        offloaded = jax.jit(jax_xdna.offload(step, policy=jax_xdna.Policy.always()))(params)
        jax.block_until_ready(offloaded)
    dots = jax_xdna.explain(step, params, policy=jax_xdna.Policy.always(), print=False)
    return offloaded, jax.jit(step)(params), profile, dots


def test_every_gradient_is_within_bf16_bounds(gradients):
    (loss, offloaded), (fp32_loss, fp32), _, _ = gradients
    assert abs(loss - fp32_loss) < 2e-3 * fp32_loss
    offloaded, fp32 = flatten_dict(offloaded), flatten_dict(fp32)
    assert offloaded.keys() == fp32.keys() and len(fp32) == 28
    for name, wanted in fp32.items():
        error = jnp.linalg.norm(offloaded[name] - wanted) / jnp.linalg.norm(wanted)
        assert error < BOUND, f"{'/'.join(name)}: {error:.4f}"
    # The products did run in bf16.
    kernel = ("h", "0", "mlp", "c_fc", "kernel")
    assert not np.allclose(offloaded[kernel], fp32[kernel], rtol=1e-6, atol=0)


def test_every_dot_ran_on_the_device(gradients):
    *_, profile, dots = gradients
    # Per layer 6 products forward and twice as many backward; 3 for the logits.
    assert len(dots) == 2 * 18 + 3
    assert profile.calls == len(dots)
    assert profile.flops == sum(dot.flops for dot in dots)
