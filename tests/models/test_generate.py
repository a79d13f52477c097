"""Sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import checkpoint, tokenizer
from models.decode import choose, generate
from models.generate import main
from models.gpt2 import GPT2, Config

LOGITS = jnp.log(jnp.asarray([0.1, 0.4, 0.05, 0.3, 0.15]))


def frequencies(temperature=1.0, top_k=0, top_p=1.0, draws=4000):
    keys = jax.random.split(jax.random.key(0), draws)
    ids = jax.vmap(lambda key: choose(LOGITS, key, temperature, top_k, top_p))(keys)
    return np.bincount(ids, minlength=5) / draws


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.5}, np.square([0.1, 0.4, 0.05, 0.3, 0.15]) / 0.285),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_p": 0.39}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.8}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_k": 2, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
    ],
)
def test_choice_has_the_right_distribution(options, wanted):
    # Three and a half standard errors of 4000 draws.
    np.testing.assert_allclose(frequencies(**options), wanted, atol=0.028)
    assert (frequencies(**options)[np.asarray(wanted) == 0] == 0).all()


def test_greedy_continuation_equals_the_models_own_choice(config, params):
    model = GPT2(config)
    prompt = [5, 17, 3]
    ids = list(generate(model, params, prompt, max_tokens=60, temperature=0))
    assert len(ids) == 60
    context = prompt[:]
    apply = jax.jit(model.apply)
    for token in ids:
        window = context[-config.n_positions :]
        padded = np.pad(window, (0, config.n_positions - len(window)))
        logits = apply({"params": params}, padded[None])[0, len(window) - 1]
        assert token == int(logits.argmax())
        context.append(token)


def test_generation_stops_at_the_end_token(config, params):
    ids = list(generate(GPT2(config), params, [5], max_tokens=20, seed=1))
    assert list(generate(GPT2(config), params, [5], max_tokens=20, seed=1)) == ids
    assert list(generate(GPT2(config), params, [5], max_tokens=20, seed=2)) != ids
    end = ids[4]
    stopped = list(generate(GPT2(config), params, [5], max_tokens=20, seed=1, end=end))
    assert stopped == ids[: ids.index(end)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    config = Config(vocab_size=257, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    params = jax.jit(GPT2(config).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    checkpoint.save_config(folder, config, end_token=256)
    checkpoint.save_params(folder, config, params)
    return folder


def test_command(folder, capsys):
    (folder / "tokenizer.json").write_text(tokenizer.load("bytes").to_json())
    flags = [str(folder), "--prompt", "žlutý ", "--max-tokens", "12"]
    assert main(flags) == 0
    out, err = capsys.readouterr()
    assert out.startswith("žlutý ") and len(out) > len("žlutý \n")
    assert "tokens in" in err
    assert main(flags) == 0
    assert capsys.readouterr().out == out
    assert main([*flags, "--seed", "7"]) == 0
    assert capsys.readouterr().out != out
    # No prompt: a new document.
    assert main([str(folder), "--max-tokens", "3"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
        (["--temperature", "-1"], "--temperature is -1.0; it must be at least 0"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--top-p", "0"], "--top-p is 0.0; it must be above 0 and at most 1"),
        (["--top-k", "x"], "argument --top-k: invalid int value: 'x'"),
        (["--tokenizer", "nowhere"], "no tokenizer in nowhere"),
    ],
)
def test_bad_flags(folder, flags, message, capsys):
    assert main([str(folder), *flags]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_a_folder_without_a_model(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
