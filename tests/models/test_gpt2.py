"""The model computes GPT-2: against an independent implementation, on random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from models import checkpoint, train
from models.decode import generate
from models.gpt2 import GPT2, PRESETS, Config


def apply(config):
    return jax.jit(GPT2(config).apply)


def transformers_model(folder):
    pytest.importorskip("torch", reason="the independent GPT-2 needs torch")
    transformers = pytest.importorskip("transformers", reason="has the independent GPT-2")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert model.dtype.is_floating_point and model.dtype.itemsize == 4
    return model.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory, config, params):
    return export(tmp_path_factory.mktemp("export"), config, params)


def export(folder, config, params):
    checkpoint.save_config(folder, config, end_token=100)
    checkpoint.save_params(folder, config, params)
    return folder


def close(ours, wanted):
    assert ours.shape == wanted.shape
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_logits_and_loss_equal_those_of_transformers(exported, config, params, tokens):
    other = transformers_model(exported)
    import torch

    with torch.no_grad():
        theirs = other(torch.tensor(tokens).long(), labels=torch.tensor(tokens).long())
    close(
        apply(config)({"params": params}, tokens)[..., : config.vocab_size], theirs.logits.numpy()
    )

    weights = jnp.ones((3, config.n_positions - 1))
    loss = train.make_eval_step(GPT2(config))
    loss = jax.jit(loss)(params, tokens, weights) / weights.sum()
    np.testing.assert_allclose(loss, theirs.loss.item(), rtol=1e-5)


def test_the_export_is_complete_and_tied(exported, config):
    other = transformers_model(exported)
    assert other.lm_head.weight is other.transformer.wte.weight
    assert other.config.vocab_size == config.vocab_size
    assert other.config.layer_norm_epsilon == 1e-5
    assert other.config.activation_function == "gelu_new"
    count = sum(p.numel() for p in other.parameters())
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    shapes = checkpoint.abstract_params(config).values()
    assert count == sum(np.prod(s.shape) for s in shapes) - padding


VARIANTS = {
    "untied": {"tie_word_embeddings": False},
    "scaled": {"scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 0.1},
    "unscaled relu": {"scale_attn_weights": False, "n_inner": 40, "activation_function": "relu"},
    "exact gelu": {"activation_function": "gelu"},
    "silu": {"activation_function": "silu"},
    "tanh": {"activation_function": "tanh"},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_variants_go_out_and_come_back(tmp_path, config, tokens, settings):
    """Ours to transformers, and what transformers saves, in shards and as a pickle, to ours."""
    pytest.importorskip("torch", reason="the independent GPT-2 needs torch")
    config = dataclasses.replace(config, **settings)
    rng = np.random.default_rng(3)
    shapes = checkpoint.abstract_params(config)
    params = {key: 0.3 * rng.standard_normal(s.shape).astype("f") for key, s in shapes.items()}
    params = unflatten_dict(params)
    other = transformers_model(export(tmp_path, config, params))
    import torch

    with torch.no_grad():
        wanted = other(torch.tensor(tokens).long()).logits.numpy()
    close(apply(config)({"params": params}, tokens)[..., : config.vocab_size], wanted)
    assert (other.lm_head.weight is other.transformer.wte.weight) == config.tie_word_embeddings

    other.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "pickle").mkdir()
    torch.save(other.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    ours = flatten_dict(checkpoint.load_params(tmp_path, config))
    for name in ("shards", "pickle"):
        assert checkpoint.load_config(tmp_path / "shards") == config
        again = flatten_dict(checkpoint.load_params(tmp_path / name, config))
        assert again.keys() == ours.keys() == shapes.keys()
        for key, value in ours.items():
            np.testing.assert_array_equal(again[key], value, "/".join(key))


def test_greedy_text_equals_that_of_transformers(exported, config, params):
    other = transformers_model(exported)
    import torch

    prompt = [5, 17, 3, 88]
    theirs = other.generate(
        torch.tensor([prompt]),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ours = list(generate(GPT2(config), params, prompt, max_tokens=30, temperature=0))
    assert prompt + ours == theirs[0].tolist()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_sizes(name, count):
    config = PRESETS[name]
    shapes = checkpoint.abstract_params(config).values()
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    assert config.padded_vocab_size == 50304
    assert sum(np.prod(s.shape) for s in shapes) - padding == count


def test_parameters_are_named_as_in_the_checkpoint(config):
    names = {"/".join(path) for path in checkpoint.abstract_params(config)}
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    assert set(checkpoint.abstract_params(untied)) - set(checkpoint.abstract_params(config)) == {
        ("lm_head", "embedding")
    }
    assert {"wte/embedding", "wpe/embedding", "ln_f/scale", "ln_f/bias"} < names
    assert {"h/0/attn/c_attn/kernel", "h/1/mlp/c_proj/bias", "h/1/ln_2/scale"} < names


def test_padding_has_no_probability_and_no_gradient(config, params, tokens):
    assert config.padded_vocab_size == 128
    # Even with weights that would make the padding the likeliest token.
    table = params["wte"]["embedding"].at[config.vocab_size :].set(7.0)
    params = {**params, "wte": {"embedding": table}}
    logits = apply(config)({"params": params}, tokens)
    assert np.isfinite(logits).all()
    assert (jax.nn.softmax(logits)[..., config.vocab_size :] == 0).all()

    weights = jnp.ones((3, config.n_positions - 1))
    grads = jax.jit(jax.grad(train.make_eval_step(GPT2(config))))(params, tokens, weights)
    assert (grads["wte"]["embedding"][config.vocab_size :] == 0).all()


def test_later_tokens_change_nothing_before_them(config, params, tokens):
    changed = tokens.copy()
    changed[:, 20:] = (changed[:, 20:] + 1) % config.vocab_size
    a, b = (apply(config)({"params": params}, t) for t in (tokens, changed))
    np.testing.assert_array_equal(a[:, :20], b[:, :20])
    assert not np.allclose(a[:, 20], b[:, 20])


def test_dropout_needs_a_key_and_follows_it(config, params, tokens):
    model = GPT2(dataclasses.replace(config, dropout=0.5))

    @jax.jit
    def logits(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, tokens, deterministic=False, rngs=rngs)

    np.testing.assert_array_equal(logits(0), logits(0))
    assert not np.allclose(logits(0), logits(1))
    plain = apply(config)({"params": params}, tokens)
    np.testing.assert_array_equal(jax.jit(model.apply)({"params": params}, tokens), plain)


def test_errors_name_the_size():
    with pytest.raises(ValueError, match="n_embd is 10; it must be a multiple of n_head 4"):
        Config(n_embd=10, n_head=4)
    with pytest.raises(
        ValueError, match="activation_function is 'sin'; it must be one of gelu_new"
    ):
        Config(activation_function="sin")
    with pytest.raises(ValueError, match="tokens has length 9; the model has n_positions 8"):
        config = Config(vocab_size=5, n_positions=8, n_embd=4, n_layer=1, n_head=1)
        GPT2(config).init(jax.random.key(0), jnp.zeros((1, 9), jnp.int32))
