"""GPT-2 train steps on four devices: the single device's loss and gradients, and no gathers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_xdna
from models import train
from models.gpt2 import GPT2, Config

ALWAYS = jax_xdna.Policy.always()
CONFIG = Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=2, n_head=4)
MODEL = GPT2(CONFIG)


def loss_and_gradients(params, tokens):
    def loss(params):
        weights = jnp.ones(tokens[:, 1:].shape)
        return train.loss_sum(MODEL, params, tokens, weights, None) / weights.size

    return jax.value_and_grad(loss)(params)


def micro_batches(params, tokens):
    """The same inside a scan over micro-batches (A, B, T + 1), as the fine-tuner accumulates."""

    def add(total, tokens):
        return jax.tree.map(jnp.add, total, loss_and_gradients(params, tokens)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, tokens)
    return jax.tree.map(lambda x: x / len(tokens), total)


@pytest.fixture(scope="module")
def state():
    tokens = np.random.default_rng(0).integers(0, 128, (8, 17)).astype(np.int32)
    params = MODEL.init(jax.random.key(0), tokens[:1, :-1])["params"]
    # Larger than at the start of training, so that attention is not uniform.
    params = jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, params)
    want = jax.jit(jax_xdna.offload(loss_and_gradients, policy=ALWAYS))(params, tokens)
    return params, tokens, want


def mesh_of(*shape, kind=AxisType.Auto):
    kinds = (kind,) * len(shape)
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], kinds, devices=jax.devices()[:4])


def tensor_parallel(path):
    """Megatron's split: first layers by columns, second ones by rows (Shoeybi et al., 2019)."""
    if path[-1] == "kernel":
        return P(None, "model") if path[-2] in ("c_attn", "c_fc") else P("model", None)
    if path[-1] == "bias" and path[-2] in ("c_attn", "c_fc"):
        return P("model")
    return P()


def run(mesh, params, tokens, spec=lambda path: P(), step=loss_and_gradients, policy=ALWAYS):
    """The results of the step on a mesh, and its HLO."""
    batch = P("data") if tokens.ndim == 2 else P(None, "data")
    put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))  # noqa: E731
    flat = flatten_dict(params)
    args = (
        unflatten_dict({path: put(x, spec(path)) for path, x in flat.items()}),
        put(tokens, batch),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax_xdna.offload(step, policy=policy)).lower(*args).compile()
        return compiled(*args), compiled.as_text()


def same(got, want):
    """Equal up to the order of float32 sums, far below what bf16 operands cost."""
    (loss, grads), (want_loss, want_grads) = got, want
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    grads, want_grads = flatten_dict(grads), flatten_dict(want_grads)
    for path, g in want_grads.items():
        error = np.linalg.norm(np.asarray(grads[path]) - g) / (np.linalg.norm(g) + 1e-6)
        assert error < 4e-3, ("/".join(path), error)


def gathers(text):
    """Shapes that an all-gather or an all-to-all makes."""
    return re.findall(r"= (\w+\[[\d,]*\])\S* all-(?:gather|to-all)(?:-start)?\(", text)


def products(text):
    """Result shapes of our calls, as every device runs them."""
    return re.findall(r"= f32\[([\d,]+)\]\S* custom-call\(.*jax_xdna_gemm", text)


@pytest.mark.parametrize("step", [loss_and_gradients, micro_batches])
def test_data_parallel(state, step):
    params, tokens, want = state
    tokens = tokens.reshape(2, 4, -1) if step is micro_batches else tokens
    got, text = run(mesh_of(4), params, tokens, step=step)
    same(got, want)
    assert gathers(text) == [] and "all-reduce" in text
    rows = tokens.shape[-2] * 16 // 4  # a quarter of the tokens
    assert f"{rows},96" in products(text) and f"{4 * rows},96" not in products(text)


def test_data_parallel_with_explicit_axes(state):
    params, tokens, want = state
    got, text = run(mesh_of(4, kind=AxisType.Explicit), params, tokens)
    same(got, want)
    assert gathers(text) == [] and "all-reduce" in text
    assert "32,96" in products(text) and "128,96" not in products(text)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_tensor_parallel(state, shape):
    params, tokens, want = state
    got, text = run(mesh_of(*shape), params, tokens, tensor_parallel)
    same(got, want)
    assert gathers(text) == []
    data, model = shape
    rows, heads, features = 128 // data, 32 // data // model, 96 // model
    assert {f"{rows},{features}", f"{heads},16,16"} <= set(products(text))
