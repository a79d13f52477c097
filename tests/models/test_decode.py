"""Decoding with a cache: the full forward's logits, prompts that do not affect each other."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_xdna
from models import decode
from models.decode import choose, generate, generate_batch
from models.errors import UserError
from models.gpt2 import GPT2, Config

WEIGHTS = np.asarray([0.1, 0.4, 0.05, 0.3, 0.15])


def frequencies(temperature=1.0, top_k=0, top_p=1.0, draws=4000):
    keys = jax.random.split(jax.random.key(0), draws)
    logits = jnp.broadcast_to(jnp.log(WEIGHTS)[None], (draws, 5))
    ids = jax.jit(choose)(logits, keys, temperature, top_k, top_p)
    return np.bincount(ids, minlength=5) / draws


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.5}, np.square(WEIGHTS) / 0.285),
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
    got = frequencies(**options)
    # Three and a half standard errors of 4000 draws.
    np.testing.assert_allclose(got, wanted, atol=0.028)
    assert (got[np.asarray(wanted) == 0] == 0).all()


def test_what_top_k_and_top_p_keep_equals_a_sort():
    rng = np.random.default_rng(0)
    scores = (4 * rng.standard_normal((40, 999))).astype(np.float32)
    scores[:, ::7] = -np.inf
    scores[0, :5] = [0.0, -0.0, 1e-40, -1e-40, 3e38]
    order = np.sort(scores, axis=1)[:, ::-1]
    mass = np.exp(order - order[:, :1], dtype=np.float64)
    mass /= mass.sum(1, keepdims=True)
    for k, p in ((1, 1.0), (17, 1.0), (0, 0.9), (0, 0.3), (30, 0.95)):
        kept = np.isfinite(jax.jit(decode._likeliest)(scores, k, p))
        before = np.cumsum(mass, 1) - mass
        number = ((np.arange(999)[None] < (k or 999)) & (before < (p if p < 1 else 2))).sum(1)
        cut = order[np.arange(40), number - 1]
        np.testing.assert_array_equal(kept, (scores >= cut[:, None]) & np.isfinite(scores))


@pytest.fixture(scope="module")
def talkative(config, params):
    """The model with a head of its own, and tokens and positions that drown its biases.

    The plain one says the same word again and again.
    """
    config = dataclasses.replace(config, tie_word_embeddings=False)
    changed = {name: jax.tree.map(lambda x: 10 * x, params[name]) for name in ("wte", "wpe")}
    changed["ln_f"] = {"scale": jnp.ones(config.n_embd), "bias": jnp.zeros(config.n_embd)}
    head = jax.random.normal(jax.random.key(4), params["wte"]["embedding"].shape)
    return config, {**params, **changed, "lm_head": {"embedding": head}}


def test_logits_with_the_cache_equal_those_of_the_whole(config, params, tokens):
    """Also when prompts of several lengths, padded on the right, are read at once."""
    model = GPT2(config)
    whole = jax.jit(model.apply)({"params": params}, tokens)
    lengths = np.asarray([1, 13, 30])
    prompt = np.where(np.arange(30) < lengths[:, None], tokens[:, :30], 77)
    cache = decode.init_cache(config, 3, config.n_positions)
    cache = jax.jit(partial(decode.prefill, model))(params, cache, prompt)
    step = jax.jit(partial(decode.decode_step, model))
    bound = 1e-5 * np.abs(whole[..., : config.vocab_size]).max()
    for i in range(config.n_positions - 30):
        at = lengths + i
        logits, cache = step(params, cache, tokens[range(3), at], at)
        np.testing.assert_allclose(logits, whole[np.arange(3), at], rtol=0, atol=bound)
    assert step._cache_size() == 1  # one program for all positions


def reference(config, params, prompt, count):
    """Greedy tokens by the full forward, the context cut as the module says."""
    apply = jax.jit(GPT2(config).apply)
    context, made = list(prompt[-config.n_positions :]), []
    for _ in range(count):
        if len(context) > config.n_positions:
            context = context[-(config.n_positions // 2) :]
        padded = np.pad(context, (0, config.n_positions - len(context)))
        made.append(int(apply({"params": params}, padded[None])[0, len(context) - 1].argmax()))
        context.append(made[-1])
    return made


@pytest.mark.parametrize("length", [1, 3, 48, 70])
def test_greedy_tokens_equal_the_full_forwards_also_past_n_positions(talkative, length):
    config, params = talkative
    prompt = np.random.default_rng(length).integers(0, 101, length)
    made = list(generate(GPT2(config), params, prompt, max_tokens=90, temperature=0))
    assert made == reference(config, params, prompt.tolist(), 90)
    assert len(set(made)) > 10


def test_prompts_of_a_batch_are_as_if_alone(talkative):
    config, params = talkative
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 101, n).tolist() for n in (1, 40, 60)]
    model, how = GPT2(config), {"max_tokens": 60, "top_p": 0.9}
    rows = list(generate_batch(model, params, prompts, seed=5, **how))
    end = how["end"] = rows[30][1]
    rows = list(generate_batch(model, params, prompts, seed=5, **how))
    for i, prompt in enumerate(prompts):
        batch = [row[i] for row in rows]
        alone = list(generate(model, params, prompt, seed=5 + i, **how))
        assert batch == alone + [None] * (len(rows) - len(alone))
        assert end not in alone
    assert any(None in row for row in rows)
    # The same prompt twice is sampled twice.
    (a, b), *_ = zip(*generate_batch(model, params, [[5, 6]] * 2, max_tokens=20), strict=True), None
    assert a != b


def test_seeds_ends_and_limits(config, params):
    model = GPT2(config)
    draw = lambda **how: list(generate(model, params, [5], max_tokens=20, **how))  # noqa: E731
    ids = draw(seed=1)
    assert len(ids) == 20 and draw(seed=1) == ids != draw(seed=2)
    assert draw(seed=2**70)
    assert draw(seed=1, end=ids[4]) == ids[: ids.index(ids[4])]
    assert max(draw(temperature=9.0, top_p=1.0, known=7)) < 7 < max(ids)
    # Ids of the padding are never made, however hot.
    assert max(draw(temperature=1e6, top_p=1.0)) < config.vocab_size
    for prompt, message in (
        ([], "prompt 0 is empty"),
        ([3, 101], "prompt 0 has the token id 101; the model's vocab_size is 101"),
        ([-1], "prompt 0 has the token id -1"),
    ):
        with pytest.raises(ValueError, match=message):
            next(generate(model, params, prompt))
    damaged = {**params, "ln_f": jax.tree.map(lambda x: x * np.nan, params["ln_f"])}
    with pytest.raises(UserError, match="logits are NaN"):
        next(generate(model, damaged, [5]))


def test_generating_again_compiles_nothing(config, params):
    list(generate(GPT2(config), params, [5] * 20, max_tokens=8))
    programs = decode._reader(GPT2(config), None, None), decode._stepper(GPT2(config))
    before = [program._cache_size() for program in programs]
    how = {"max_tokens": 9, "temperature": 0.0, "top_k": 4, "top_p": 0.5}
    list(generate(GPT2(config), params, [6] * 15, seed=3, **how))
    assert [program._cache_size() for program in programs] == before


def decode_text(config):
    """The step that `generate` runs, compiled for one row."""
    shapes = jax.eval_shape(GPT2(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    step = decode._stepper(GPT2(config))
    cache = jax.eval_shape(lambda: decode.init_cache(config, 1, 64))
    one, key = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    args = (shapes["params"], cache, one, one, key, key, 50257, 0.8, 0, 0.95)
    return str(step.trace(*args).jaxpr), step.lower(*args).compile().as_text()


def test_decoding_stays_in_fp32_on_xla():
    """Products of few rows are many times slower in bf16: no caller's setting leads there."""
    config = Config(n_positions=64, n_embd=128, n_layer=1, n_head=2)
    lowest = "BF16_BF16_F32"
    with jax.default_matmul_precision(lowest):
        jaxpr, hlo = decode_text(config)
        plain = jax.jit(lambda a, b: a @ b).lower(jnp.ones((1, 8)), jnp.ones((8, 8)))
    assert "bf16" in plain.compile().as_text()  # the setting does what it says elsewhere
    # Four dense layers, the two products of attention, and the logits.
    assert jaxpr.count("dot_general[") == 7
    assert "bf16" not in jaxpr and "jax_xdna" not in jaxpr
    assert "bf16" not in hlo and "jax_xdna" not in hlo and "f32[1,1,50304]" in hlo


def test_reading_a_prompt_is_offloaded(config, params, tokens):
    def calls(policy):
        with jax_xdna.profile() as profile:
            how = {"max_tokens": 5, "temperature": 0, "policy": policy}
            assert len(list(generate(GPT2(config), params, tokens[0, :40], **how))) == 5
        return profile.calls

    # All six products of the first block; of the last one the keys and values alone are needed.
    assert calls(jax_xdna.Policy.always()) == 6 + 1
    assert calls(jax_xdna.Policy.never()) == 0
