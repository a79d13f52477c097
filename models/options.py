"""The fine-tuner's flags: what they are, what they may be, and which a resumed run may change."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax_xdna

from . import config, lora, tensorboard
from .errors import UserError
from .gpt2 import PRESETS
from .optimizers import BETAS, SCHEDULES


@dataclass(frozen=True)
class Options:
    """Values of all flags; None where the default depends on others."""

    data: tuple[str, ...] = ()
    text_field: str = "text"
    out: str | None = None
    model: str | None = None
    init: str | None = None
    tokenizer: str | None = None
    steps: int = 700
    batch_size: int = 16
    block_size: int | None = None
    grad_accum: int | None = None
    total_batch: int | None = None
    optimizer: str = "adamw"
    betas: tuple[float, float] | None = None
    lr: float | None = None
    min_lr: float | None = None
    schedule: str = "cosine"
    warmup: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.0
    lora: int | None = None
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    seed: int = 1
    eval_every: int = 100
    save_every: int = 350
    keep: int = 2
    device: str | None = None
    policy: str = "threshold:256"
    compare: bool = False
    sample_tokens: int = 100
    tensorboard: bool = False
    resume: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    peer_timeout: int = 100

    @property
    def learning_rate(self) -> float:
        """--lr, or a usual peak: gentle for a trained model, high for a new small one."""
        if self.lr is not None:
            return self.lr
        # Adapters take more: 2e-4 is what LoRA's authors trained GPT-2 with.
        usual = 2e-4 if self.lora else 5e-5 if self.init else 1e-3 if self.model in SMALL else 6e-4
        # Each of its updates has the size of the rate; its authors advise 3 to 10 times less.
        return usual / 5 if self.optimizer == "lion" else usual

    @property
    def accumulation(self) -> int:
        """Micro-batches per step.

        Raises:
          UserError: --total-batch is not a multiple of a micro-batch.
        """
        if self.total_batch is None:
            return self.grad_accum or 1
        micro = self.batch_size * self.block
        count, rest = divmod(self.total_batch, micro)
        if rest:
            near = " or ".join(str(n * micro) for n in (count, count + 1) if n)
            raise UserError(
                f"--total-batch is {self.total_batch} tokens; it must be a multiple of "
                f"--batch-size × --block-size = {self.batch_size} × {self.block} = {micro}: "
                f"use {near}"
            )
        return count

    @property
    def tokens_per_step(self) -> int:
        return self.accumulation * self.batch_size * self.block

    @property
    def block(self) -> int:
        """--block-size, or what a model of that kind can learn from in a short run."""
        if self.block_size is not None:
            return self.block_size
        return 64 if self.model in SMALL and not self.init else 128

    @property
    def warmup_steps(self) -> int:
        return self.steps // 10 if self.warmup is None else self.warmup

    @property
    def lora_scale(self) -> float:
        """alpha / rank of the adapters."""
        if self.lora is None or self.lora_alpha is None:
            return lora.DEFAULT_SCALE
        return self.lora_alpha / self.lora

    @property
    def targets(self) -> tuple[str, ...]:
        """Kernels that have adapters."""
        return self.lora_targets or lora.DEFAULT_TARGETS

    def stored(self) -> dict[str, Any]:
        """What a run's folder keeps for --resume."""
        ours = {"out", "resume"} | PER_PROCESS
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ours}

    @property
    def default_name(self) -> str:
        """Model and data, as the name of the run's folder."""
        model = self.model or (Path(self.init).resolve().name if self.init else "small")
        data = "-".join(Path(source).stem or "data" for source in self.data[:2]) or "stdlib"
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{model}-{data}")


# Models that learn in minutes; None is the default, "small".
SMALL = (None, "tiny", "small")

# What belongs to one process of a run, on one machine, for one time.
PER_PROCESS = {"coordinator", "num_processes", "process_id", "peer_timeout"}

# What a resumed run may change: they leave the steps already made as they were.
# (Other text behind --data is noticed by its tokens.)
MAY_CHANGE = {
    *("data", "out", "steps", "eval_every", "save_every", "keep"),
    *("device", "policy", "compare", "resume", "sample_tokens", "tensorboard"),
    *PER_PROCESS,
}

_MINIMUM = {
    **dict.fromkeys(("steps", "batch_size", "block_size", "grad_accum", "total_batch", "lora"), 1),
    **dict.fromkeys(("eval_every", "save_every", "keep", "num_processes", "peer_timeout"), 1),
    **dict.fromkeys(("warmup", "weight_decay", "seed", "dropout", "min_lr", "clip"), 0),
    "sample_tokens": 0,
}


_CHOICES = {
    "model": PRESETS,
    "optimizer": BETAS,
    "schedule": SCHEDULES,
    "lora_targets": lora.TARGETS,
}
_TUPLES = {"data", "betas", "lora_targets"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m models.finetune",
        description="Trains GPT-2 on your text, its matrix products on the NPU or the emulated "
        "device. Without arguments: the small preset on this Python's standard library.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    d = Options()
    what = p.add_argument_group("what to train")
    what.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files, directories or globs of text, source code, .jsonl, .csv and .parquet, also "
        ".gz and .zst (docs/data.md); default: the standard library",
    )
    what.add_argument(
        "--text-field",
        metavar="NAME",
        help=f"field or column that has the text of a record; default {d.text_field}",
    )
    what.add_argument("--model", metavar="PRESET", help=f"{', '.join(PRESETS)}; default: small")
    what.add_argument("--init", metavar="DIR", help="start from a Hugging Face or run folder")
    what.add_argument(
        "--tokenizer",
        metavar="SPEC",
        help="bytes, a tokenizer.json, or a folder with tokenizer.json or vocab.json and "
        "merges.txt; default: that of --init, else bytes",
    )
    what.add_argument(
        "--config",
        metavar="FILE",
        help="flags from a TOML file, as batch-size = 8, or a run's options.json; those given here "
        "come first",
    )
    what.add_argument("--out", metavar="DIR", help="the run's folder; default: a new runs/<name>")
    what.add_argument("--resume", action="store_true", help="continue the run in --out exactly")
    how = p.add_argument_group("how to train")
    how.add_argument("--steps", type=int, help=f"optimizer steps; default {d.steps}")
    how.add_argument(
        "--batch-size",
        type=int,
        help=f"sequences per micro-batch, over all devices; default {d.batch_size}",
    )
    how.add_argument("--block-size", type=int, help="tokens per sequence; default 128, 64 if small")
    how.add_argument("--grad-accum", type=int, help="micro-batches per step; default 1")
    how.add_argument(
        "--total-batch", type=int, metavar="TOKENS", help="tokens per step, instead of --grad-accum"
    )
    how.add_argument("--optimizer", help=f"{', '.join(BETAS)}; default {d.optimizer}")
    how.add_argument(
        "--betas",
        nargs=2,
        type=float,
        metavar=("B1", "B2"),
        help="rates of the optimizer's moving averages; default 0.9 0.95, of lion 0.9 0.99",
    )
    how.add_argument(
        "--lr",
        type=float,
        help="peak learning rate; default 5e-5 with --init, 2e-4 with --lora, else 1e-3, or "
        "6e-4 for gpt2…; of lion a fifth of that",
    )
    how.add_argument("--min-lr", type=float, help="rate at the last step; default a tenth of --lr")
    how.add_argument("--schedule", help=f"{', '.join(SCHEDULES)}; default {d.schedule}")
    how.add_argument("--warmup", type=int, help="warm-up steps; default a tenth of --steps")
    how.add_argument("--weight-decay", type=float, help=f"default {d.weight_decay}")
    how.add_argument(
        "--clip", type=float, help=f"largest gradient norm; default {d.clip:g}; 0: any"
    )
    how.add_argument("--dropout", type=float, help=f"default {d.dropout:g}")
    how.add_argument(
        "--lora", type=int, metavar="RANK", help="train low-rank adapters of --init, not all of it"
    )
    how.add_argument("--lora-alpha", type=float, metavar="A", help="default 2 · RANK")
    how.add_argument(
        "--lora-targets",
        nargs="+",
        metavar="NAME",
        help=f"kernels with adapters, of {', '.join(lora.TARGETS)}; default "
        f"{' '.join(lora.DEFAULT_TARGETS)}",
    )
    how.add_argument("--seed", type=int, help=f"weights, data order and dropout; default {d.seed}")
    how.add_argument("--eval-every", type=int, metavar="N", help=f"default {d.eval_every} steps")
    how.add_argument("--save-every", type=int, metavar="N", help=f"default {d.save_every} steps")
    how.add_argument(
        "--keep", type=int, metavar="N", help=f"checkpoints; default {d.keep}, the last"
    )
    where = p.add_argument_group("where its matrix products run")
    where.add_argument("--device", help="see python -m jax_xdna; default: XDNA_DEVICE or the first")
    where.add_argument(
        "--policy",
        help="threshold[:N] (mean size), cost-model:npu1, cost-model:npu2, always, never; default "
        f"{d.policy}",
    )
    where.add_argument(
        "--compare", action="store_true", help="train again on plain fp32 XLA and compare"
    )
    seen = p.add_argument_group("what is seen of it (docs/seeing.md)")
    seen.add_argument(
        "--sample-tokens",
        type=int,
        metavar="N",
        help=f"tokens of the sample at each evaluation; default {d.sample_tokens}; 0: none",
    )
    seen.add_argument(
        "--tensorboard", action="store_true", help="also write the log for TensorBoard"
    )
    several = p.add_argument_group(
        "several machines",
        "The same command on each, and what tells them apart; srun and mpirun tell by themselves.",
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--num-processes", type=int, metavar="N", help="how many take part")
    several.add_argument("--process-id", type=int, metavar="I", help="which one this is: 0 … N-1")
    several.add_argument(
        "--peer-timeout",
        type=int,
        metavar="SECONDS",
        help=f"a process silent for so long counts as lost; default {d.peer_timeout}",
    )
    return p


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    """The flags given, also in --config, by name. Raises UserError for one not valid on its own."""
    known = parser()
    given = vars(known.parse_args(argv))
    if "config" in given:
        given = config.read(Path(given.pop("config")), known) | given
    for name in _TUPLES & given.keys():
        given[name] = tuple(given[name])
    for name, low in _MINIMUM.items():
        if given.get(name, low) < low:
            raise UserError(f"{flag(name)} is {given[name]}; it must be at least {low}")
    if not 0 < given.get("lr", 1) < float("inf"):
        raise UserError(f"--lr is {given['lr']}; it must be positive and finite")
    if not given.get("dropout", 0) < 1:
        raise UserError(f"--dropout is {given['dropout']}; it must be below 1")
    for name in ("weight_decay", "min_lr", "clip"):
        if not given.get(name, 0) < float("inf"):
            raise UserError(f"{flag(name)} is {given[name]}; it must be finite")
    if not all(0 <= beta < 1 for beta in given.get("betas", ())):
        raise UserError(f"--betas is {_words(given['betas'])}; both must be from 0 to below 1")
    for name, choices in _CHOICES.items():
        value = given.get(name, ())
        for one in value if isinstance(value, tuple) else (value,):
            if one not in choices:
                raise UserError(f"{flag(name)} is {one!r}; it must be one of {', '.join(choices)}")
    if not 0 < given.get("lora_alpha", 1) < float("inf"):
        raise UserError(f"--lora-alpha is {given['lora_alpha']}; it must be positive and finite")
    names = [device.name for device in jax_xdna.devices()]
    if "device" in given and given["device"] not in names:
        raise UserError(f"--device is {given['device']!r}; this machine has {', '.join(names)}")
    parse_policy(given.get("policy", Options.policy))
    return given


def parse_policy(text: str) -> jax_xdna.Policy:
    """The policy of "threshold", "threshold:N", "cost-model:ARCH", "always" or "never"."""
    name, colon, value = text.partition(":")
    if name == "threshold" and (value.isdecimal() or not colon):
        return jax_xdna.Policy.threshold(*([int(value)] if colon else []))
    if name == "cost-model" and value in ("npu1", "npu2"):
        return jax_xdna.Policy.cost_model(value)
    if text in ("always", "never"):
        return getattr(jax_xdna.Policy, text)()
    raise UserError(
        f"--policy is {text!r}; it must be threshold, threshold:N with a whole number N, "
        "cost-model:npu1, cost-model:npu2, always or never"
    )


def merge(stored: dict[str, Any], given: dict[str, Any]) -> Options:
    """A resumed run's options. Raises UserError when a flag contradicts what was trained."""
    started = from_stored(stored)
    for name, value in given.items():
        before = getattr(started, name)
        if name not in MAY_CHANGE and before != value:
            was = "not given" if before in (None, ()) else _words(before)
            raise UserError(
                f"--resume: {flag(name)} is {_words(value)}, but the run was started with {was}; "
                "leave it out, or start a new run"
            )
    return dataclasses.replace(started, **given)


def from_stored(stored: dict[str, Any]) -> Options:
    """The options of `Options.stored`, also after a way through JSON."""
    tuples = {name: tuple(stored[name]) for name in _TUPLES if stored.get(name) is not None}
    return Options(**{**stored, **tuples})


def check(options: Options) -> None:
    """Raises UserError when options that are each valid contradict each other."""
    o = options
    if o.total_batch is not None and o.grad_accum is not None:
        raise UserError(
            f"--total-batch is {o.total_batch} and --grad-accum {o.grad_accum}: give one of them"
        )
    _ = o.accumulation  # Complains of what does not divide.
    for name in ("lora_alpha", "lora_targets"):
        value = getattr(o, name)
        if value is not None and o.lora is None:
            raise UserError(f"{flag(name)} is {_words(value)}, but there is no --lora RANK")
    if o.lora and not o.init:
        raise UserError(
            f"--lora is {o.lora}, but without --init there is no trained model to adapt: name one"
        )
    if o.tensorboard:
        tensorboard.require()
    if o.betas and BETAS[o.optimizer] is None:
        raise UserError(f"--betas is {_words(o.betas)}, but --optimizer {o.optimizer} has none")
    if o.min_lr is not None and o.schedule == "constant":
        raise UserError(
            f"--min-lr is {o.min_lr:g}, but --schedule constant stays at --lr {o.learning_rate:g}"
        )
    if o.min_lr is not None and o.min_lr > o.learning_rate:
        raise UserError(
            f"--min-lr is {o.min_lr:g}; it must be at most --lr, which is {o.learning_rate:g}"
        )


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def flag(name: str) -> str:
    """grad_accum → --grad-accum."""
    return "--" + name.replace("_", "-")
