"""Tokens to batches, in an order that follows from the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from . import cache
from .cache import VALIDATION_SHARE, Tokens
from .errors import UserError
from .sources import find_files, stdlib_files
from .tokenizer import Tokenizer

__all__ = ["Batch", "Corpus", "Tokens", "TrainBatches", "build", "find_files", "stdlib_files"]
# Windows that are shuffled at a time: what an epoch's order takes of memory is 8 bytes for each.
SHUFFLED = 2**20


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and for validation, of so many documents; `digest` is their hash."""

    train: Tokens
    validation: Tokens
    documents: int
    digest: str = ""

    def fingerprint(self) -> str:
        """A hash of every token."""
        return self.digest


def build(files: Sequence[Path], tokenizer: Tokenizer, field: str = "text") -> Corpus:
    """Reads and tokenizes files. Each document is followed by the end-of-text token.

    A twentieth is held out for validation, by documents (`cache.write`), alike for every seed.
    Where that holds nothing out, as of a single document, it is the tail of the tokens.

    Args:
      field: where records have their text: see `sources.read`.

    Raises:
      UserError: no text at all, or what `cache.tokenized` raises.
    """
    train, validation, facts = cache.tokenized(files, tokenizer, field)
    if not len(train):
        raise UserError(f"--data: no text in {len(files)} files")
    if not len(validation):
        cut = max(0, min(round(len(train) * (1 - VALIDATION_SHARE)), len(train) - 2))
        train, validation = train[:cut], train[cut:]
    return Corpus(train, validation, facts["documents"], facts["fingerprint"])


@dataclass(frozen=True)
class Batch:
    """Inputs tokens[..., :-1], targets tokens[..., 1:].

    Attributes:
      tokens: int32 (..., B, T + 1).
      weights: fp32 (..., B, T), the weight of each target in the loss.
    """

    tokens: np.ndarray
    weights: np.ndarray


class TrainBatches:
    """Training windows: every epoch orders the documents anew, cuts anew and shuffles the windows.

    The documents form a ring, cut into windows of `block` tokens from a random start, so an epoch
    sees each token once, but for less than a window. A ring shorter than a window makes one, in
    which targets beyond it have weight 0. Batch i depends on the seed and i alone: that is all
    that resuming needs.

    Of more than `SHUFFLED` windows, every n-th are shuffled together, one such part after the
    other, each spread over the whole ring.

    Raises:
      UserError: not one token to predict.
    """

    def __init__(
        self,
        tokens: Tokens,
        block: int,
        shape: tuple[int, ...],
        seed: int,
        rows: slice = slice(None),
    ) -> None:
        """`shape` is the batch's, for example (micro-batches, sequences).

        Of its last dimension only `rows` are read.
        """
        _require(tokens, "training")
        self._tokens, self._block, self._shape, self._seed = tokens, block, shape, seed
        self._rows = rows
        self.windows = max(1, len(tokens) // block)
        self._parts = -(-self.windows // SHUFFLED)
        self._ring = lru_cache(maxsize=2)(self._ring_of)
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __getitem__(self, step: int) -> Batch:
        count = int(np.prod(self._shape))
        samples = np.arange(step * count, (step + 1) * count).reshape(self._shape)
        own = samples[..., self._rows]
        index = np.stack([self._window(int(i)) for i in own.flat])
        index = index.reshape(*own.shape, self._block + 1)
        weights = _weights(self._tokens, index)
        weights[..., len(self._tokens) :] = 0
        return Batch(self._tokens.ids[index].astype(np.int32), weights)

    def _window(self, sample: int) -> np.ndarray:
        """Where the tokens of a window are, (T + 1,)."""
        epoch, place = divmod(sample, self.windows)
        size, larger = divmod(self.windows, self._parts)
        part, place = divmod(place, size + 1)
        if part >= larger:
            part, place = divmod(sample % self.windows - larger, size)
        window = self._order(epoch, part)[place] * self._parts + part
        first, stops, shifts = self._ring(epoch)
        at = (first + window * self._block + np.arange(self._block + 1)) % len(self._tokens)
        return at + shifts[np.searchsorted(stops, at, side="right")]

    def _ring_of(self, epoch: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Where the windows begin; for each document on the ring where it stops and is from."""
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._tokens.ends))
        sizes = np.diff(self._tokens.ends, prepend=0)
        stops = np.cumsum(sizes[order])
        return int(rng.integers(len(self._tokens))), stops, self._tokens.ends[order] - stops

    def _order_of(self, epoch: int, part: int) -> np.ndarray:
        size = -(-(self.windows - part) // self._parts)
        return np.random.default_rng((self._seed, epoch, part + 1)).permutation(size)


def validation_batches(tokens: Tokens, block: int, size: int, limit: int) -> list[Batch]:
    """At most `limit` batches (size, T) spread evenly over the tokens, always the same.

    No target is counted twice; what is left of the last window and batch has weight 0.

    Raises:
      UserError: not one token to predict.
    """
    _require(tokens, "validation")
    windows = -(-(len(tokens) - 1) // block)
    taken = np.unique(np.linspace(0, windows - 1, min(windows, limit * size)).round().astype(int))
    taken = np.pad(taken, (0, -len(taken) % size), constant_values=windows)
    index = taken[:, None] * block + np.arange(block + 1)
    inside = np.minimum(index, len(tokens) - 1)
    weights = _weights(tokens, inside) * (index[:, 1:] < len(tokens))
    if not weights.any():
        raise UserError("the validation windows have no message of an assistant: add conversations")
    filled = tokens.ids[inside].astype(np.int32)
    return [Batch(filled[i : i + size], weights[i : i + size]) for i in range(0, len(taken), size)]


def _weights(tokens: Tokens, index: np.ndarray) -> np.ndarray:
    """fp32 (..., T): 1 for the targets of windows (..., T + 1) that count, 0 for the others."""
    targets = index[..., 1:]
    if tokens.masked is None:
        return np.ones(targets.shape, np.float32)
    return 1 - tokens.masked[targets].astype(np.float32)


def _require(tokens: Tokens, what: str) -> None:
    if len(tokens) < 2:
        raise UserError(
            f"the {what} text has {len(tokens)} tokens, too few to predict one: add text"
        )
    if tokens.masked is not None and tokens.masked.all():
        raise UserError(f"the {what} text has no message of an assistant: add conversations")
