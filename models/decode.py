"""Text generation with a key-value cache: one jitted step makes one token of every prompt.

A step is memory-bound: it reads every weight once for a few rows. So it stays in fp32 on the CPU,
whatever `offload` does elsewhere: XLA's products of few rows are many times slower in bf16.
Reading a prompt is a large product, and goes through `offload`.

When a context reaches n_positions, its newer half is read again from position 0, and generation
goes on: GPT-2 knows no later positions, and a cache cannot be shifted under learned ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_xdna

from .errors import UserError
from .gpt2 import GPT2, Config

Params = Any
# Arrays (rows, n_head, positions, n_embd / n_head) named as the attention modules name them.
Cache = dict[str, Any]
# Sizes of compiled programs are multiples of this, so that few are compiled.
_MULTIPLE = 64


def init_cache(config: Config, rows: int, positions: int) -> Cache:
    """A cache of zeros, fp32."""
    shape = (rows, config.n_head, positions, config.n_embd // config.n_head)
    block = {"attn": {"key": jnp.zeros(shape), "value": jnp.zeros(shape)}}
    return {"h": {str(i): jax.tree.map(jnp.copy, block) for i in range(config.n_layer)}}


def extend(
    model: GPT2, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, Cache]:
    """Adds tokens, int32 (B, T), to the cache at `positions`, int32 (B, T).

    Returns the hidden states (B, T, n_embd) and the new cache. Each row has a context of its own:
    a token sees the positions up to its own, so padding behind a row's last token changes nothing
    that is written over before it is seen.
    """
    hidden, changed = model.apply(
        {"params": params, "cache": cache},
        tokens,
        positions=positions,
        method=GPT2.hidden,
        mutable=["cache"],
    )
    return hidden, changed["cache"]


def prefill(model: GPT2, params: Params, cache: Cache, tokens: jax.Array) -> Cache:
    """The cache with tokens (B, T) at the positions from 0 on."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return extend(model, params, cache, tokens, positions)[1]


def decode_step(
    model: GPT2, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, Cache]:
    """Logits, fp32 (B, padded_vocab_size), after one more token of each row, and the new cache.

    `tokens` and `positions` are int32 (B,).
    """
    # Also when the caller's default precision asks for bf16.
    with jax.default_matmul_precision("highest"):
        hidden, cache = extend(model, params, cache, tokens[:, None], positions[:, None])
        return model.apply({"params": params}, hidden, method=GPT2.logits)[:, 0], cache


def choose(
    logits: jax.Array, keys: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """One token id for each row of logits (B, V), or -1 where a logit is NaN.

    Args:
      keys: a random key for each row.
      temperature: 0 takes the likeliest; higher flattens the distribution.
      top_k: only tokens that fewer than k others surpass; 0 means all.
      top_p: only tokens surpassed by others of less than this probability together; 1 means all.
    """

    def sampled() -> jax.Array:
        scores = logits / jnp.maximum(temperature, 1e-6)
        limited = (top_k > 0) | (top_p < 1)
        kept = jax.lax.cond(limited, lambda: _likeliest(scores, top_k, top_p), lambda: scores)
        return jax.vmap(jax.random.categorical)(keys, kept)

    ids = jax.lax.cond(temperature > 0, sampled, lambda: jnp.argmax(logits, axis=-1))
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, ids)


def _likeliest(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Scores (B, V) with -inf for tokens that top_k or top_p leaves out.

    Finds the least score that stays by bisection over the bits of a float, from the highest down:
    exact, and ten times faster than XLA sorts a vocabulary.
    """
    probabilities = jax.nn.softmax(scores)
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    # Integers in the order of the floats.
    order = bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0x80000000))
    k = jnp.where(top_k > 0, top_k, scores.shape[-1])
    p = jnp.where(top_p < 1, top_p, jnp.inf)

    def next_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << (31 - i).astype(jnp.uint32)
        above = order > (least | (bit - 1))[:, None]
        mass = jnp.sum(jnp.where(above, probabilities, 0), axis=-1)
        stays = (jnp.sum(above, axis=-1) < k) & (mass < p)
        return jnp.where(stays, least, least | bit)

    least = jax.lax.fori_loop(0, 32, next_bit, jnp.zeros(len(scores), jnp.uint32))
    return jnp.where(order >= least[:, None], scores, -jnp.inf)


# Programs are kept, so that generating again compiles nothing.


@lru_cache(maxsize=4)
def _reader(model: GPT2, policy: Any, device: str | None) -> Callable[..., Cache]:
    """The jitted `prefill`: (params, cache, tokens) → cache."""
    read = jax_xdna.offload(partial(prefill, model), policy=policy, device=device)
    return jax.jit(read, donate_argnums=1)


@lru_cache(maxsize=4)
def _stepper(model: GPT2) -> Callable[..., tuple[jax.Array, Cache]]:
    """The jitted step from the last token of each row to the next, and the new cache."""

    def step(
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        seeds: jax.Array,
        numbers: jax.Array,
        known: jax.Array,
        *choice: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        logits, cache = decode_step(model, params, cache, tokens, positions)
        logits = jnp.where(jnp.arange(logits.shape[-1])[None] < known, logits, -jnp.inf)
        keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.key(seed), n))(seeds, numbers)
        return choose(logits, keys, *choice), cache

    return jax.jit(step, donate_argnums=1)


def generate_batch(
    model: GPT2,
    params: Params,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    end: int | None = None,
    known: int | None = None,
    policy: Any = None,
    device: str | None = None,
) -> Iterator[list[int | None]]:
    """Yields, step by step, the next token id of every prompt, None where it has ended.

    A prompt ends after `max_tokens`, or before the token `end`. Prompts may differ in length and
    do not affect each other: prompt i gets what it would get alone with the seed `seed` + i. Of a
    prompt longer than n_positions, the last n_positions tokens count; how longer contexts go on is
    said at the top of this module.

    Args:
      prompts: token ids, at least one each.
      known: only ids below this one are made, for a tokenizer smaller than the model's vocabulary.
      policy, device: as in `jax_xdna.offload`, for reading prompts. With the default policy the
        large products of long prompts are rounded to bf16.

    Raises:
      ValueError: a prompt that is empty or has an id outside the vocabulary.
      UserError: logits that are NaN.
    """
    contexts = [_checked(i, prompt, model.config) for i, prompt in enumerate(prompts)]
    limit = model.config.n_positions
    longest = min(limit, max(map(len, contexts), default=1) + max_tokens)
    size = min(limit, -(-longest // _MULTIPLE) * _MULTIPLE)
    read, step = _reader(model, policy, device), _stepper(model)
    seeds = np.asarray([(seed + i) % 2**32 for i in range(len(contexts))], np.uint32)
    choice = (known or model.config.vocab_size, temperature, top_k, top_p)
    running = [True] * len(contexts)
    cache: Cache | None = None
    for number in range(max_tokens):
        if not any(running):
            return
        if cache is None or max(map(len, contexts)) > size:
            keep = limit if cache is None else max(1, limit // 2)
            contexts = [c[-keep:] if len(c) > size else c for c in contexts]
            cache = init_cache(model.config, len(contexts), size)
            if max(map(len, contexts)) > 1:
                cache = read(params, cache, _padded([c[:-1] for c in contexts], size))
        tokens = np.asarray([c[-1] for c in contexts], np.int32)
        positions = np.asarray([len(c) - 1 for c in contexts], np.int32)
        numbers = np.full(len(contexts), number, np.uint32)
        ids, cache = step(params, cache, tokens, positions, seeds, numbers, *choice)
        row: list[int | None] = []
        for i, token in enumerate(np.asarray(ids).tolist()):
            if token < 0:
                raise UserError("the model's logits are NaN: its weights are damaged")
            running[i] = running[i] and token != end
            row.append(token if running[i] else None)
            if running[i]:
                contexts[i].append(token)
        if any(running):
            yield row


def generate(
    model: GPT2, params: Params, prompt: Sequence[int] | np.ndarray, **how: Any
) -> Iterator[int]:
    """Yields the token ids that continue one prompt. The keywords are those of `generate_batch`."""
    for (token,) in generate_batch(model, params, [prompt], **how):
        if token is not None:
            yield token


def _checked(i: int, prompt: Sequence[int] | np.ndarray, config: Config) -> list[int]:
    """A prompt's ids. Out of range, JAX would make them others or NaN."""
    ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError(f"prompt {i} is empty; it needs at least one token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"prompt {i} has the token id {token}; the model's vocab_size is "
                f"{config.vocab_size}"
            )
    return ids


def _padded(contexts: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Contexts side by side, int32 (B, T), filled up with zeros on the right."""
    longest = max(map(len, contexts))
    tokens = np.zeros((len(contexts), min(size, -(-longest // _MULTIPLE) * _MULTIPLE)), np.int32)
    for row, context in zip(tokens, contexts, strict=True):
        row[: len(context)] = context
    return tokens
