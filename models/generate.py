"""Samples text from a trained model: `python -m models.generate FOLDER --prompt "def "`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from . import checkpoint, tokenizer
from .errors import UserError
from .gpt2 import GPT2


def choose(
    logits: jax.Array, key: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """One token id from logits (V,).

    Args:
      temperature: 0 takes the likeliest; higher flattens the distribution.
      top_k: only the k likeliest tokens; 0 means all.
      top_p: only the likeliest tokens that together first reach this probability; 1 means all.
    """
    ranked = jnp.argsort(-logits)
    scores = logits[ranked] / jnp.maximum(temperature, 1e-6)
    before = jnp.cumsum(jax.nn.softmax(scores)) - jax.nn.softmax(scores)
    rank = jnp.arange(len(logits))
    kept = (rank < jnp.where(top_k > 0, top_k, len(logits))) & ((before < top_p) | (top_p >= 1))
    sampled = jax.random.categorical(key, jnp.where(kept.at[0].set(True), scores, -jnp.inf))
    return ranked[jnp.where(temperature > 0, sampled, 0)]


def make_next_token(model: GPT2) -> Callable[..., jax.Array]:
    """The jitted function (params, tokens (T,), length, key, temperature, top_k, top_p) → id.

    Only the first `length` tokens count; the model is causal, so what follows does not matter.
    """

    @jax.jit
    def next_token(
        params: Any, tokens: jax.Array, length: jax.Array, key: jax.Array, *choice: jax.Array
    ) -> jax.Array:
        hidden = model.apply({"params": params}, tokens[None], method=GPT2.hidden)
        last = jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1)
        logits = model.apply({"params": params}, last, method=GPT2.logits)[0, 0]
        return choose(logits, key, *choice)

    return next_token


def generate(
    model: GPT2,
    params: Any,
    prompt: Sequence[int] | np.ndarray,
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Yields token ids that continue `prompt`, which has at least one token.

    Stops after `max_tokens`, or before the token `end`. Of a context longer than the model's,
    the last n_positions tokens count.
    """
    window = min(model.config.n_positions, len(prompt) + max_tokens)
    next_token = make_next_token(model)
    context, key = list(map(int, prompt)), jax.random.key(seed)
    for number in range(max_tokens):
        recent = context[-window:]
        tokens = np.zeros(window, np.int32)
        tokens[: len(recent)] = recent
        step = jax.random.fold_in(key, number)
        token = int(next_token(params, tokens, len(recent), step, temperature, top_k, top_p))
        if token == end:
            return
        context.append(token)
        yield token


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = _Parser(prog="python -m models.generate", description="Samples text from a GPT-2.")
    p.add_argument("checkpoint", type=Path, help="a run's folder or a Hugging Face folder")
    p.add_argument("--prompt", default="", help="text to continue; default: a new document")
    p.add_argument("--max-tokens", type=int, default=200, help="default %(default)s")
    p.add_argument("--temperature", type=float, default=0.8, help="default %(default)s; 0: greedy")
    p.add_argument("--top-k", type=int, default=0, help="default: all tokens")
    p.add_argument("--top-p", type=float, default=0.95, help="default %(default)s")
    p.add_argument("--seed", type=int, default=0, help="default %(default)s")
    p.add_argument("--tokenizer", help="default: the one in the folder")
    args = p.parse_args(argv)
    for name, low in (("max_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if not low <= getattr(args, name) < float("inf"):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(args, name)}; it must be at least {low}")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}; it must be above 0 and at most 1")
    return args


def _run(args: argparse.Namespace) -> None:
    config = checkpoint.load_config(args.checkpoint)
    tokens = tokenizer.load(args.tokenizer or str(args.checkpoint))
    if tokens.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokens.vocab_size} ids, but the model only {config.vocab_size}"
        )
    params = checkpoint.load_params(args.checkpoint, config)
    (prompt,) = tokens.encode([args.prompt])
    ids = generate(
        GPT2(config),
        params,
        prompt if len(prompt) else [tokens.end],
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        end=tokens.end,
    )
    shown, written, start = [], tokens.decode(prompt), time.perf_counter()
    sys.stdout.write(args.prompt)
    for token in ids:
        shown.append(token)
        # Held back while the last character is still in pieces.
        text = tokens.decode([*prompt, *shown])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(tokenizer.printable(text[len(written) :]))
            sys.stdout.flush()
            written = text
    rest = tokens.decode([*prompt, *shown])[len(written) :]
    sys.stdout.write(tokenizer.printable(rest) + "\n")
    seconds = time.perf_counter() - start
    sys.stderr.write(f"{len(shown)} tokens in {seconds:.1f} s\n")


def main(argv: list[str] | None = None) -> int:
    try:
        _run(_parse(argv))
    except UserError as error:
        print(f"models.generate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
