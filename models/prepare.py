"""From flags to everything a run needs, read and checked before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import checkpoint, data, hub, lora, tokenizer
from .errors import UserError
from .gpt2 import GPT2, PRESETS, Config
from .options import Options, check, merge, parse
from .rundir import OPTIONS, TOKENIZER, RunDir, digest

RUNS = Path("runs")


@dataclass
class Run:
    """A run that can begin: its flags, its folder (not yet made), and what they name.

    Attributes:
      base: with --lora the digest of the frozen parameters, which no checkpoint has.
    """

    options: Options
    folder: RunDir
    tokenizer: tokenizer.Tokenizer
    config: Config
    corpus: data.Corpus
    initial_params: Callable[[], Any]
    base: str | None = None

    def identity(self) -> dict[str, Any]:
        """What a resumed run must find unchanged."""
        base = {} if self.base is None else {"base": self.base}
        return base | {
            "model": dataclasses.asdict(self.config),
            "tokenizer": self.tokenizer.fingerprint(),
            "data": self.corpus.fingerprint(),
        }


def prepare(argv: list[str] | None) -> Run:
    """Reads and checks flags, data, tokenizer and model. Writes nothing."""
    given = parse(argv)
    folder = _folder(given)
    options = Options(**given)
    if options.resume:
        options = merge(folder.read_json(OPTIONS), given)
    source = _source(options.init) if options.init else None
    if source and options.block_size is None:
        context = checkpoint.load_config(source).n_positions
        options = dataclasses.replace(options, block_size=min(options.block, context))
    check(options)
    spec = options.tokenizer or (str(source) if source else "bytes")
    if options.resume and folder.has(TOKENIZER):
        spec = str(folder.path)
    tokens = tokenizer.load(spec)
    config = _config(options, source, tokens)
    files = data.find_files(options.data) if options.data else data.stdlib_files()
    corpus = data.build(files, tokens, options.text_field)

    def initial_params() -> Any:
        if source:
            return checkpoint.load_params(source, config)
        key = jax.random.key(options.seed)
        return jax.jit(GPT2(config).init)(key, jnp.zeros((1, 1), jnp.int32))["params"]

    base = None
    if source:
        params = initial_params()  # Complains about its tensors before anything is written.
        if options.lora:
            lora.init(params, options.lora, options.targets, options.seed)  # So does this.
            base = digest(params)
    return Run(options, folder, tokens, config, corpus, initial_params, base)


def _folder(given: dict[str, Any]) -> RunDir:
    """The run's folder: --out, or a new one, or the newest with --resume. A used one is refused."""
    if given.get("resume"):
        if "out" in given:
            return RunDir(Path(given["out"]))
        runs = sorted(RUNS.glob(f"*/{OPTIONS}"), key=lambda path: path.stat().st_mtime)
        if not runs:
            raise UserError(f"--resume: no run in {RUNS}/; name its folder with --out")
        return RunDir(runs[-1].parent)
    if "out" in given:
        path = Path(given["out"])
        # Hidden files may be there already: those of a run that was killed as it began.
        if path.exists() and (not path.is_dir() or any(path.glob("[!.]*"))):
            raise UserError(
                f"--out {path} exists and is not empty: continue that run with --resume, or name "
                "another folder"
            )
        return RunDir(path)
    name = Options(**given).default_name
    names = (RUNS / (name if i == 1 else f"{name}-{i}") for i in range(1, 10**6))
    return RunDir(next(path for path in names if not path.exists()))


def _source(init: str) -> Path:
    """The folder that --init names, which may be on the hub."""
    if hub.is_name(init):
        return hub.folder(init)
    if not Path(init).is_dir():
        raise UserError(f"--init: {init} is not a folder, nor the name of a model on the hub")
    return Path(init)


def _config(options: Options, source: Path | None, tokens: tokenizer.Tokenizer) -> Config:
    """The model's sizes: of --init, of the preset, or both, when loading must find them equal.

    A new model has the context it is trained with: later positions would stay random.
    """
    config = checkpoint.load_config(source) if source else PRESETS[options.model or "small"]
    if source and options.model:
        sizes = {"vocab_size": config.vocab_size, "n_positions": config.n_positions}
        config = dataclasses.replace(PRESETS[options.model], **sizes)
    if source:
        tokens.require_fits(config.vocab_size, f"--init {options.init}")
    if options.block > config.n_positions:
        raise UserError(
            f"--block-size is {options.block}; this model's n_positions is {config.n_positions}"
        )
    if not source:
        sizes = {"vocab_size": tokens.vocab_size, "n_positions": options.block}
        config = dataclasses.replace(config, **sizes)
    return dataclasses.replace(config, dropout=options.dropout)
