"""Samples text from a trained model: `python -m models.generate FOLDER --prompt "def "`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

import jax_xdna

from . import checkpoint, hub, tokenizer
from .decode import generate, generate_batch
from .errors import UserError
from .gpt2 import GPT2
from .options import parse_policy

__all__ = ["generate", "main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = _Parser(
        prog="python -m models.generate",
        description="Samples text from a GPT-2.",
        epilog="A text that reaches the model's n_positions goes on from its newer half.",
        allow_abbrev=False,
    )
    p.add_argument("model", help="a run's folder, a Hugging Face folder, or a name on the hub")
    p.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; again for a batch; default: a new document",
    )
    p.add_argument("--prompts", metavar="FILE", help="a prompt a line; - reads standard input")
    p.add_argument("--max-tokens", type=int, default=200, help="of each; default %(default)s")
    p.add_argument("--temperature", type=float, default=0.8, help="default %(default)s; 0: greedy")
    p.add_argument("--top-k", type=int, default=0, help="default: all tokens")
    p.add_argument("--top-p", type=float, default=0.95, help="default %(default)s")
    p.add_argument(
        "--seed", type=int, default=0, help="default %(default)s; the second prompt's is one more …"
    )
    p.add_argument("--tokenizer", help="default: the one in the folder")
    p.add_argument(
        "--special", action="store_true", help="special tokens spelled in a prompt are those tokens"
    )
    p.add_argument("--device", help="that reads the prompts; see python -m jax_xdna")
    p.add_argument(
        "--policy",
        default="threshold:256",
        help="which products of reading prompts go there; default %(default)s; never: all fp32",
    )
    args = p.parse_args(argv)
    for name, low in (("max_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if not low <= getattr(args, name) < float("inf"):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(args, name)}; it must be at least {low}")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}; it must be above 0 and at most 1")
    names = [device.name for device in jax_xdna.devices()]
    if args.device not in (None, *names):
        raise UserError(f"--device is {args.device!r}; this machine has {', '.join(names)}")
    args.policy = parse_policy(args.policy)
    return args


def _prompts(args: argparse.Namespace) -> list[str]:
    """The texts to continue, at least one. Blank lines of a file are none."""
    texts = list(args.prompt or ())
    if args.prompts:
        try:
            content = (
                sys.stdin.buffer.read() if args.prompts == "-" else Path(args.prompts).read_bytes()
            )
        except OSError as error:
            raise UserError(f"--prompts {args.prompts}: {error.strerror}") from error
        lines = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").split("\n")
        texts += [line for line in lines if line.strip()]
        if not texts:
            raise UserError(f"--prompts {args.prompts}: no prompt in it")
    return texts or [""]


def _run(args: argparse.Namespace) -> None:
    source = hub.folder(args.model) if hub.is_name(args.model) else Path(args.model)
    config = checkpoint.load_config(source)
    tokens = tokenizer.load(args.tokenizer or str(source))
    tokens.require_fits(config.vocab_size, str(source))
    texts = _prompts(args)
    prompts = tokens.encode(texts, special=args.special)
    for i, prompt in enumerate(prompts, 1):
        if len(prompt) > config.n_positions:
            _note(
                f"prompt {i} has {len(prompt)} tokens: the model sees the last {config.n_positions}"
            )
    steps = generate_batch(
        GPT2(config),
        checkpoint.load_params(source, config),
        [p if len(p) else [tokens.end] for p in prompts],
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        end=tokens.end,
        known=tokens.vocab_size,
        policy=args.policy,
        device=args.device,
    )
    start = time.perf_counter()
    times, counts = [start], []
    for made in _show(texts, prompts, steps, tokens):
        times.append(time.perf_counter())
        counts.append(made)
    report = f"{sum(counts)} tokens in {times[-1] - start:.1f} s"
    if len(counts) > 1:  # The first step reads the prompts, and compiles.
        report += f": the first after {times[1] - start:.1f} s, then "
        report += f"{sum(counts[1:]) / (times[-1] - times[1]):.1f} tokens/s"
    _note(report)


def _show(
    texts: Sequence[str],
    prompts: Sequence[np.ndarray],
    steps: Iterator[list[int | None]],
    tokens: tokenizer.Tokenizer,
) -> Iterator[int]:
    """Prints the texts in order, each while it is made; later ones wait. Yields tokens per step."""
    streams = [tokenizer.Stream(tokens, prompt) for prompt in prompts]
    waiting = [_title(i, len(texts)) + text for i, text in enumerate(texts)]
    current, running = 0, [True] * len(texts)

    def write() -> None:
        nonlocal current
        while current < len(texts):
            sys.stdout.write(tokenizer.printable(waiting[current]))
            sys.stdout.flush()
            waiting[current] = ""
            if running[current]:
                return
            current += 1

    def finish(i: int) -> None:
        if running[i]:
            running[i] = False
            waiting[i] += streams[i].flush() + "\n"

    write()
    for row in steps:
        for i, token in enumerate(row):
            if token is None:
                finish(i)
            else:
                waiting[i] += streams[i].push(token)
        write()
        yield sum(token is not None for token in row)
    for i in range(len(texts)):
        finish(i)
    write()


def _title(i: int, count: int) -> str:
    return f"{chr(10) * (i > 0)}--- {i + 1} of {count}\n" if count > 1 else ""


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    try:
        _run(_parse(argv))
    except UserError as error:
        _note(f"models.generate: error: {error}")
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # Whoever read it has had enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
