"""Text files to batches of tokens, in an order that follows from the seed and the step alone."""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from .errors import UserError
from .tokenizer import Tokenizer

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
VALIDATION_SHARE = 0.05
# Enough of the standard library that a short run sees no token twice.
STDLIB_BYTES = 4_000_000
# Not the library itself: installed packages, tests, and tables written as source.
_NOT_STDLIB = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("encodings", "pydoc_data", "lib2to3"),
}


def stdlib_files() -> list[Path]:
    """This Python's own standard library, sorted by name, up to `STDLIB_BYTES`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if not _NOT_STDLIB.isdisjoint(path.relative_to(root).parts) or not path.is_file():
            continue
        total += path.stat().st_size
        if total > STDLIB_BYTES:
            break
        files.append(path)
    if not files:
        raise UserError(f"no .py files of the standard library in {root}: name files with --data")
    return files


def find_files(sources: Sequence[str]) -> list[Path]:
    """Files named by paths, directories (searched for `SUFFIXES`) and globs, each file once.

    Raises:
      UserError: a source that matches nothing.
    """
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            matches = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES]
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        matches = [p for p in matches if p.is_file()]
        if not matches:
            kinds = ", ".join(SUFFIXES)
            raise UserError(
                f"--data {source}: no such file, and no {kinds} file in or by that name"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one file: its whole text, or the "text" of each line of a .jsonl file.

    A byte-order mark is dropped, bytes that are not UTF-8 become U+FFFD, line ends become "\\n",
    and documents without text are skipped.

    Raises:
      UserError: a .jsonl line that is not an object with a string "text".
    """
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if path.suffix.lower() != ".jsonl":
        if text.strip():
            yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            got = f"keys {sorted(row)}" if isinstance(row, dict) else type(row).__name__
            raise UserError(f'{path}, line {number}: no string field "text", but {got}')
        if row["text"].strip():
            # JSON can spell half of a surrogate pair, which no UTF-8 text holds.
            yield row["text"].encode("utf-8", errors="replace").decode("utf-8")


@dataclass(frozen=True)
class Corpus:
    """Token ids for training and for validation, each int32 (tokens,)."""

    train: np.ndarray
    validation: np.ndarray
    documents: int

    def fingerprint(self) -> str:
        """A hash of every token."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(b"validation" + self.validation.tobytes())
        return digest.hexdigest()[:16]


def build(files: Sequence[Path], tokenizer: Tokenizer) -> Corpus:
    """Reads and tokenizes files. Each document is followed by the end-of-text token.

    A twentieth of the tokens is held out for validation, by whole documents, chosen alike for
    every seed. Of a single document it is the tail.

    Raises:
      UserError: no text at all, or an id outside the tokenizer's vocabulary.
    """
    texts = [text for path in files for text in read_documents(path)]
    if not texts:
        raise UserError(f"--data: no text in {len(files)} files")
    end = np.asarray([tokenizer.end], np.int32)
    documents = [np.concatenate([ids, end]) for ids in tokenizer.encode(texts)]
    if len(documents) == 1:
        (tokens,) = documents
        cut = max(1, round(len(tokens) * (1 - VALIDATION_SHARE)))
        corpus = Corpus(tokens[:cut], tokens[cut:], 1)
    else:
        held_out = _choose(np.asarray([len(ids) for ids in documents]))
        train = [ids for i, ids in enumerate(documents) if i not in held_out]
        validation = [documents[i] for i in sorted(held_out)]
        corpus = Corpus(np.concatenate(train), np.concatenate(validation), len(documents))
    check_ids(corpus.train, tokenizer.vocab_size)
    check_ids(corpus.validation, tokenizer.vocab_size)
    return corpus


def _choose(lengths: np.ndarray) -> set[int]:
    """Indices of random documents that together stay within `VALIDATION_SHARE`; at least one."""
    budget = VALIDATION_SHARE * lengths.sum()
    chosen: set[int] = set()
    for i in np.random.default_rng(0).permutation(len(lengths)).tolist():
        if lengths[i] <= budget:
            chosen.add(i)
            budget -= lengths[i]
    return chosen or {int(lengths.argmin())}


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises UserError when an id is outside the vocabulary: on the device it would be NaN."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise UserError(
            f"token id {bad[0]} is outside the vocabulary of {vocab_size}: "
            "the tokenizer does not belong to this model"
        )


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
    """Training windows: every epoch cuts the tokens anew and shuffles the windows.

    Tokens form a ring (each document ends with end-of-text), cut into windows of `block` tokens
    from a random start, so an epoch sees each token once, but for less than a window. Batch i
    depends on the seed and i alone: that is all that resuming needs.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block: int,
        shape: tuple[int, ...],
        seed: int,
        rows: slice = slice(None),
    ) -> None:
        """`shape` is the batch's, for example (micro-batches, sequences).

        Of its last dimension only `rows` are read.
        """
        require(tokens, block, "training")
        self._tokens, self._block, self._shape, self._seed = tokens, block, shape, seed
        self._rows = rows
        self.windows = len(tokens) // block
        self._starts = lru_cache(maxsize=2)(self._epoch)

    def __getitem__(self, step: int) -> Batch:
        count = int(np.prod(self._shape))
        samples = range(step * count, (step + 1) * count)
        starts = [self._starts(i // self.windows)[i % self.windows] for i in samples]
        own = np.asarray(starts).reshape(self._shape)[..., self._rows]
        index = own[..., None] + np.arange(self._block + 1)
        tokens = self._tokens[index % len(self._tokens)]
        return Batch(tokens, np.ones((*own.shape, self._block), np.float32))

    def _epoch(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, epoch))
        first = rng.integers(len(self._tokens))
        return first + self._block * rng.permutation(self.windows)


def validation_batches(tokens: np.ndarray, block: int, size: int, limit: int) -> list[Batch]:
    """At most `limit` batches (size, T) spread evenly over the tokens, always the same.

    No target is counted twice; what is left of the last window and batch has weight 0.
    """
    if len(tokens) < 2:
        raise UserError(
            f"the validation text has {len(tokens)} tokens, too few to predict one: add text"
        )
    windows = -(-(len(tokens) - 1) // block)
    taken = np.unique(np.linspace(0, windows - 1, min(windows, limit * size)).round().astype(int))
    taken = np.pad(taken, (0, -len(taken) % size), constant_values=windows)
    index = taken[:, None] * block + np.arange(block + 1)
    weights = (index[:, 1:] < len(tokens)).astype(np.float32)
    filled = tokens[np.minimum(index, len(tokens) - 1)]
    return [Batch(filled[i : i + size], weights[i : i + size]) for i in range(0, len(taken), size)]


def require(tokens: np.ndarray, block: int, what: str) -> None:
    """Raises UserError when there is not one window of `block` tokens and its target."""
    if len(tokens) < block + 1:
        raise UserError(
            f"the {what} text has {len(tokens)} tokens, fewer than one window of --block-size "
            f"{block} + 1: add text with --data or use --block-size {max(1, len(tokens) - 1)}"
        )
