"""The training loop: compiled steps, evaluation, and when to log, save and stop."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from . import lora, optimizers, train
from .data import Batch, Corpus, TrainBatches, validation_batches
from .errors import UserError
from .gpt2 import GPT2
from .options import Options
from .processes import Processes

# One evaluation takes at most this many batches, always the same ones.
EVAL_BATCHES = 16
# Non-finite steps in a row after which training is hopeless.
GIVE_UP_AFTER = 20

Row = dict[str, Any]


@dataclass
class Outcome:
    """What a run of the loop leaves: its last state, and time spent in steps (seconds)."""

    state: train.State
    step_seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0


class Trainer:
    """Everything one run of training needs, but its state.

    `wrap` is applied to the train step and the evaluation step before `jax.jit`, for example
    `jax_xdna.offload`. With several processes all construct it and call its methods alike; states
    are replicated by `place`.

    Attributes:
      base: with --lora the frozen parameters, from `begin` on; those of a state are the adapters.

    Raises:
      UserError: --batch-size does not divide by the number of devices.
    """

    def __init__(
        self,
        options: Options,
        model: GPT2,
        corpus: Corpus,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        processes: Processes | None = None,
    ) -> None:
        self.options = o = options
        self.processes = processes or Processes()
        self._read(corpus)
        learning_rate = optimizers.schedule(
            o.learning_rate, o.warmup_steps, o.steps, o.schedule, o.min_lr
        )
        self.optimizer = optimizers.optimizer(
            learning_rate, o.weight_decay, o.clip, o.optimizer, o.betas
        )
        self.base: train.Params = None
        adapted = lora.Adapted(model, o.lora_scale) if o.lora else model
        self.train_step = train.make_train_step(adapted, self.optimizer, learning_rate, o.seed)
        jit = self.processes.jit
        self._step: Callable[..., Any] = jit(wrap(self.train_step), donate_argnums=0)
        self._evaluate: Callable[..., Any] = jit(wrap(train.make_eval_step(adapted)))
        self._merge = jit(lambda base, params: lora.merge(base, params, o.lora_scale))

    def _read(self, corpus: Corpus) -> None:
        o = self.options
        shape, rows = (o.accumulation, o.batch_size), self.processes.rows(o.batch_size)
        self.batches = TrainBatches(corpus.train, o.block, shape, o.seed, rows)
        validation = validation_batches(corpus.validation, o.block, o.batch_size, EVAL_BATCHES)
        self.validation_tokens = int(sum(b.weights.sum() for b in validation))
        self.validation = [Batch(b.tokens[rows], b.weights[rows]) for b in validation]

    def on(self, corpus: Corpus) -> Trainer:
        """The same steps, compiled once, on other text."""
        other = copy.copy(self)
        other._read(corpus)
        return other

    def begin(self, params: train.Params) -> train.State:
        """The state before the first step, of a whole model's parameters; not replicated."""
        o = self.options
        if o.lora:
            self.base, params = params, lora.init(params, o.lora, o.targets, o.seed)
        return train.init_state(params, self.optimizer)

    def place(self, state: train.State) -> train.State:
        """The leader's state, and `base`, on every device."""
        self.base = self.processes.replicate(self.base)
        return self.processes.replicate(state)

    def whole(self, params: train.Params) -> train.Params:
        """The parameters of a plain GPT2: those of a state, its adapters merged."""
        return params if self.base is None else self._merge(self.base, params)

    def example(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Types of the tokens and weights of a train step, over all processes."""
        batch, described = self.batches[0], self.processes.described
        return described(batch.tokens, 1), described(batch.weights, 1)

    def compile(self, state: train.State) -> float:
        """Compiles both steps ahead of the loop. Returns the seconds it took."""
        start = time.perf_counter()
        batch, described = self.validation[0], self.processes.described
        types = described(batch.tokens), described(batch.weights)
        self._step = self._step.lower(state, *self.example(), self.base).compile()
        self._evaluate = self._evaluate.lower(state.params, *types, self.base).compile()
        return time.perf_counter() - start

    def evaluate(self, params: train.Params) -> float:
        """Validation loss in nats per token."""
        shard = self.processes.shard
        losses = [
            self._evaluate(params, shard(b.tokens), shard(b.weights), self.base)
            for b in self.validation
        ]
        return float(sum(map(float, losses)) / self.validation_tokens)

    def step(self, state: train.State, index: int) -> tuple[train.State, dict[str, jax.Array]]:
        """One optimizer step on batch `index`; the state given is consumed."""
        batch, shard = self.batches[index], self.processes.shard
        return self._step(state, shard(batch.tokens, 1), shard(batch.weights, 1), self.base)

    def run(
        self,
        state: train.State,
        log: Callable[[Row], None],
        save: Callable[[train.State], None],
        stopped: Callable[[], bool],
        evaluated: Callable[[int, train.Params], None] = lambda step, params: None,
    ) -> Outcome:
        """Trains from `state` to the last step, or until `stopped()`; the state given is consumed.

        Args:
          log: gets a row per step (step, loss, lr, grad_norm, tokens_per_second) and per
            evaluation (step, val_loss); values that are not finite are None.
          save: called every --save-every steps and at the end.
          stopped: whether to save and stop now; with several processes, the same for all.
          evaluated: gets the step and the whole parameters after each evaluation, until it returns.

        Raises:
          UserError: `GIVE_UP_AFTER` steps in a row were not finite.
        """
        o = self.options
        step, tokens_per_step = int(state.step), o.tokens_per_step
        outcome = Outcome(state)
        if step == 0 and not stopped():
            log({"step": 0, "val_loss": _finite(self.evaluate(state.params))})
            evaluated(0, self.whole(state.params))
        while step < o.steps and not stopped():
            start = time.perf_counter()
            state, metrics = self.step(state, step)
            row = {name: _finite(float(value)) for name, value in metrics.items()}
            seconds = time.perf_counter() - start
            step += 1
            outcome.step_seconds += seconds
            outcome.tokens += tokens_per_step
            log({"step": step, **row, "tokens_per_second": tokens_per_step / seconds})
            if int(state.opt_state.notfinite_count) >= GIVE_UP_AFTER:
                raise UserError(
                    f"the last {GIVE_UP_AFTER} steps up to {step} were not finite and changed "
                    "nothing: use a lower --lr"
                )
            if step % o.eval_every == 0 or step == o.steps:
                log({"step": step, "val_loss": _finite(self.evaluate(state.params))})
                evaluated(step, self.whole(state.params))
            if step % o.save_every == 0 or step == o.steps:
                save(state)
        if stopped():
            save(state)
        outcome.state = state
        return outcome


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
