"""Tokens of a corpus on disk, mapped into memory, kept for the next run on the same text.

An entry is a folder named by a hash of what it depends on: the bytes of all files in their order,
what the suffixes say they are, the field, and the tokenizer. It is written under another name and
renamed when complete, so that runs side by side do not see each other's halves; one that does not
have the sizes it should have is made again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import sources
from .errors import UserError
from .sources import Piece
from .tokenizer import Tokenizer

VALIDATION_SHARE = 0.05
# Entries used longest ago go when all together have more bytes.
KEPT_BYTES = 20_000_000_000
# Where documents end is kept for so many at least; of more, for bundles of neighbours.
BUNDLES = 2**20
# Part of every name: changes when other tokens, or other files, come out of the same text.
_VERSION = 1
# Characters that are tokenized at a time.
_BATCH = 2**20
_META = "meta.json"
_UNFINISHED = "unfinished-"
_DAY = 86400


@dataclass(frozen=True)
class Tokens:
    """Ids of documents one after the other, each followed by the end-of-text token.

    Attributes:
      ids: uint16 or uint32 (tokens,), mapped from disk.
      masked: uint8 (tokens,), 1 where a token does not count in the loss; None where all do.
      ends: int64, the position after each document, or bundle of neighbours; default: one.
    """

    ids: np.ndarray
    masked: np.ndarray | None = None
    ends: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.ends is None:
            object.__setattr__(self, "ends", np.asarray([len(self.ids)]))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Tokens:
        """A stretch of the tokens, with step 1."""
        start, stop, _ = part.indices(len(self.ids))
        inside = self.ends[(self.ends > start) & (self.ends < stop)]
        ends = np.append(inside, stop) - start
        masked = None if self.masked is None else self.masked[part]
        return Tokens(self.ids[part], masked, ends)


def root() -> Path:
    """Where entries are: jax-xdna/tokens in XDG_CACHE_HOME, which is ~/.cache if not set."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax-xdna" / "tokens"


def tokenized(
    files: Sequence[Path], tokenizer: Tokenizer, field: str
) -> tuple[Tokens, Tokens, dict[str, Any]]:
    """Tokens of the files' documents for training and for validation, and facts about them.

    The facts: "documents", how many, and "fingerprint", a hash of all tokens.

    Raises:
      UserError: what `sources.read` raises; an id outside the tokenizer's vocabulary; a file that
        changes meanwhile; no room for the tokens.
    """
    before = [_stamp(path) for path in files]
    folder = root() / _key(files, tokenizer, field)
    if (found := _load(folder)) is not None:
        os.utime(folder / _META)
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    except OSError:  # A home that cannot be written: made for this run alone.
        temporary = Path(tempfile.mkdtemp(prefix="jax-xdna-"))
    try:
        pieces = itertools.chain.from_iterable(sources.read(path, field) for path in files)
        write(temporary, pieces, tokenizer)
        for path, stamp in zip(files, before, strict=True):
            if _stamp(path) != stamp:
                raise UserError(f"--data {path} changed while it was read: start again")
        if temporary.parent == folder.parent:
            _put(temporary, folder)
            _evict(folder)
        found = _load(folder) or _load(temporary)
    except OSError as error:
        raise UserError(
            f"the tokens cannot be kept in {temporary.parent}: {error.strerror}; XDG_CACHE_HOME "
            "names another place"
        ) from error
    finally:  # What is mapped stays readable.
        shutil.rmtree(temporary, ignore_errors=True)
    assert found is not None
    return found


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}") from error
    return stat.st_size, stat.st_mtime_ns


def _key(files: Sequence[Path], tokenizer: Tokenizer, field: str) -> str:
    key = hashlib.sha256(repr((_VERSION, tokenizer.fingerprint(), tokenizer.end, field)).encode())
    for path in files:
        compression = path.suffix.lower() in sources.COMPRESSED and path.suffix.lower()
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"--data {path}: {error.strerror}") from error
        key.update(repr((sources.suffix(path), compression, digest)).encode())
    return key.hexdigest()[:32]


def _load(folder: Path) -> tuple[Tokens, Tokens, dict[str, Any]] | None:
    """A complete entry, or None."""
    try:
        meta = json.loads((folder / _META).read_text())
        train, validation = (
            Tokens(
                _map(folder / f"{name}.ids", meta["dtype"], side["tokens"]),
                _map(folder / f"{name}.masked", "uint8", side["tokens"])
                if side["masked"]
                else None,
                _map(folder / f"{name}.ends", "int64", side["ends"]),
            )
            for name, side in meta["sides"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return train, validation, meta["facts"]


def _map(path: Path, dtype: str, size: int) -> np.ndarray:
    if path.stat().st_size != size * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} is not whole")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def _put(temporary: Path, folder: Path) -> None:
    """Gives a new entry its name. Another run may do the same at the same time."""
    for _ in range(2):
        try:
            os.rename(temporary, folder)
            return
        except OSError:
            if _load(folder) is not None:  # The other one was first.
                return
            shutil.rmtree(folder, ignore_errors=True)  # Torn.
    os.rename(temporary, folder)


def _evict(current: Path) -> None:
    """Removes what is too much, and what killed runs left. A run that maps it keeps it."""
    used = []
    for folder in current.parent.iterdir():
        try:
            if folder.name.startswith(_UNFINISHED):
                if time.time() - max(p.stat().st_mtime for p in (folder, *folder.iterdir())) > _DAY:
                    shutil.rmtree(folder, ignore_errors=True)
            elif folder != current:
                size = sum(path.stat().st_size for path in folder.iterdir())
                used.append(((folder / _META).stat().st_mtime, size, folder))
        except OSError:
            continue  # Another run removes it at this moment.
    total = sum(path.stat().st_size for path in current.iterdir())
    for _, size, folder in sorted(used, reverse=True):
        total += size
        if total > KEPT_BYTES:
            shutil.rmtree(folder, ignore_errors=True)


# Writing.


class _Side:
    """The growing files of one half."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.dtype, self.tokens, self.ends = dtype, 0, array("q")
        self._folder, self._name = folder, name
        self._file = open(folder / f"{name}.ids", "wb")
        self._masked: Any = None

    def add(self, ids: np.ndarray, counts: bool) -> None:
        self._file.write(ids.astype(self.dtype).tobytes())
        if not counts:
            # Zeros before it are a hole in the file.
            if self._masked is None:
                self._masked = open(self._folder / f"{self._name}.masked", "wb")
            self._masked.seek(self.tokens)
            self._masked.write(b"\1" * len(ids))
        self.tokens += len(ids)

    def end(self) -> None:
        self.ends.append(self.tokens)
        if len(self.ends) == 2 * BUNDLES:
            self.ends = self.ends[1::2]

    def close(self) -> dict[str, Any]:
        if self._masked is not None:
            self._masked.truncate(self.tokens)
        with open(self._folder / f"{self._name}.ends", "wb") as ends:
            self.ends.tofile(ends)
            for file in (self._file, ends, self._masked):
                if file is not None:
                    file.flush()
                    os.fsync(file.fileno())
        self.abandon()
        return {
            "tokens": self.tokens,
            "masked": self._masked is not None,
            "ends": len(self.ends),
        }

    def abandon(self) -> None:
        self._file.close()
        if self._masked is not None:
            self._masked.close()


def write(folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer) -> None:
    """Tokenizes pieces to the files of an entry, with memory for a few of them.

    Every piece goes as a whole to training or, a twentieth of all, to validation, as a hash of its
    text says: other documents have no say in it. The part with more tokens is for training.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    sides = [_Side(folder, name, dtype) for name in ("a", "b")]
    digest, documents = hashlib.sha256(), 0
    end = np.asarray([tokenizer.end])
    open_side: _Side | None = None  # Where the document's piece before this one went.
    try:
        for batch in _batches(pieces):
            texts = [text for piece in batch for text, _ in piece.parts]
            encoded = iter(tokenizer.encode(texts))
            for piece in batch:
                side = sides[_held_out(piece.text)]
                if open_side not in (None, side):  # Text that is not there is not read across.
                    open_side.add(end, True)
                    open_side.end()
                for _, counts in piece.parts:
                    ids = next(encoded)
                    check_ids(ids, tokenizer.vocab_size)
                    if counts and piece.last:
                        ids = np.append(ids, end)
                    digest.update(repr((side is sides[0], counts)).encode() + ids.tobytes())
                    side.add(ids, counts)
                open_side = None if piece.last else side
                if piece.last:
                    if not piece.parts[-1][1]:
                        side.add(end, False)
                    side.end()
                    documents += 1
        sides.sort(key=lambda side: side.tokens, reverse=True)
        names = [side._name for side in sides]
        meta = {
            "dtype": dtype.name,
            "sides": {name: side.close() for name, side in zip(names, sides, strict=True)},
            "facts": {"documents": documents, "fingerprint": digest.hexdigest()[:16]},
        }
    finally:
        for side in sides:
            side.abandon()
    with open(folder / _META, "w") as file:
        json.dump(meta, file)
        file.flush()
        os.fsync(file.fileno())


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        # What a part costs besides its characters matters when they are few.
        size += sum(len(text) + 50 for text, _ in piece.parts)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < VALIDATION_SHARE * 2**64


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises UserError when an id is outside the vocabulary: on the device it would be NaN."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise UserError(
            f"token id {bad[0]} is outside the vocabulary of {vocab_size}: "
            "the tokenizer does not belong to this model"
        )
