"""Text to token ids and back: bytes, GPT-2's BPE, or any tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from . import hub
from .errors import UserError

END_OF_TEXT = "<|endoftext|>"
# Names that other tokenizers give to the token between documents.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Vocabulary and merges of GPT-2's BPE: the names of Hugging Face, and those of the first release.
_BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


class Tokenizer:
    """A `tokenizers.Tokenizer` that knows its end-of-text token.

    Attributes:
      vocab_size: number of ids; every id is below it.
      end: id of the token between documents.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, source: str, folder: Path | None = None
    ) -> None:
        """`folder` may say which token ends a text: see `_end_name`."""
        self._inner = inner
        self._inner.no_padding()
        self._inner.no_truncation()
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        end = _end_name(inner, folder)
        if end is None:
            raise UserError(
                f"tokenizer {source} has no end-of-text token (looked for {', '.join(_END_NAMES)})"
            )
        self.end = ids[end]
        added = inner.get_added_tokens_decoder().get(self.end)
        if added is None or not added.special:
            inner.add_special_tokens([tokenizers.AddedToken(end, normalized=False, special=True)])
        self._bytes = self.to_json() == _bytes().to_str(pretty=True)

    def encode(self, texts: Sequence[str], special: bool = False) -> list[np.ndarray]:
        """Ids of each text, int32, none added.

        Text that spells a special token is text, so that data cannot end a document; with
        `special` it is that token. Half of a surrogate pair becomes U+FFFD.

        Raises:
          UserError: a text contains the end-of-text token and the tokenizer has no other way to
            encode it.
        """
        whole = [_whole(text) for text in texts]
        if self._bytes and not special:  # The same ids, hundreds of times as fast.
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in whole]
        self._inner.encode_special_tokens = not special
        encoded = self._inner.encode_batch_fast(whole, add_special_tokens=False)
        ids = [np.asarray(e.ids, np.int32) for e in encoded]
        if not special and any((i == self.end).any() for i in ids):
            raise UserError(
                f"a text contains {self._inner.id_to_token(self.end)!r}, which this tokenizer can "
                "only read as its end-of-text token: take it out of the text"
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD, special tokens vanish.

        Raises:
          UserError: an id outside the vocabulary.
        """
        numbers = [int(i) for i in ids]
        for i in numbers:
            if not 0 <= i < self.vocab_size:
                raise UserError(
                    f"token id {i} is outside the tokenizer's vocabulary of {self.vocab_size}"
                )
        return self._inner.decode(numbers, skip_special_tokens=True)

    def require_fits(self, vocab_size: int, model: str) -> None:
        """Raises UserError, with both sizes, when a model lacks some of the ids."""
        if self.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer has {self.vocab_size} ids, but the model in {model} only "
                f"{vocab_size}: name its tokenizer with --tokenizer"
            )

    def to_json(self) -> str:
        """The contents of its tokenizer.json."""
        return self._inner.to_str(pretty=True)

    def fingerprint(self) -> str:
        """A hash of the whole definition."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def printable(text: str) -> str:
    """`text` with control characters as U+FFFD: a model may write some that steer the terminal."""
    return "".join(
        "\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )


class Stream:
    """Ids to text, piece by piece: characters are held back until all of their bytes are there."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] | np.ndarray = ()) -> None:
        """`context` is what comes before: some tokenizers join words depending on it."""
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in context]
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """The text that is complete with one more token."""
        self._ids.append(token)
        text = self._rest()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        # Only what was shown last is kept: a long text would be decoded anew for every token.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def flush(self) -> str:
        """What is left, complete or not."""
        text, self._shown = self._rest(), len(self._ids)
        return text

    def _rest(self) -> str:
        shown = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(shown) :]


def load(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names.

    Args:
      spec: "bytes"; a tokenizer.json; a folder with tokenizer.json, vocab.json and merges.txt, or
        encoder.json and vocab.bpe; or the name of a model on the hub.

    Raises:
      UserError: nothing there, or not a tokenizer.
    """
    if spec == "bytes":
        return Tokenizer(_bytes(), spec)
    path = hub.folder(spec, model=False) if hub.is_name(spec) else Path(spec)
    if path.is_file():
        return Tokenizer(_parse(path), spec, path.parent)
    if (path / "tokenizer.json").is_file():
        return Tokenizer(_parse(path / "tokenizer.json"), spec, path)
    for vocab, merges in _BPE_FILES:
        if (path / vocab).is_file() and (path / merges).is_file():
            return Tokenizer(_gpt2(path / vocab, path / merges), spec, path)
    raise UserError(
        f"no tokenizer in {spec}: it must be 'bytes', a tokenizer.json, or a directory with "
        "tokenizer.json, or vocab.json and merges.txt, or encoder.json and vocab.bpe"
    )


def _bytes() -> tokenizers.Tokenizer:
    """One token per byte of UTF-8, whose id is the byte, and 256 for end of text."""
    # The byte-level alphabet writes printable bytes as themselves and the others, in order, as the
    # characters from U+0100 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(char for char in alphabet if ord(char) > 255)
    chars = [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
    vocab = {char: byte for byte, char in enumerate(chars)} | {END_OF_TEXT: 256}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _gpt2(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    try:
        ids = json.loads(_read(vocab))
        lines = [line for line in _read(merges).split("\n") if line]
        headless = lines[lines[0].startswith("#version") :]
        pairs = [tuple(line.split(" ")) for line in headless]
        tokenizer = tokenizers.Tokenizer(models.BPE(ids, pairs))
    except Exception as error:  # The library raises plain Exception.
        raise UserError(f"{vocab} and {merges} are not BPE tables: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _parse(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(_read(path))
    except Exception as error:  # The library raises plain Exception.
        raise UserError(f"{path} is not a tokenizer.json: {error}") from error


def _read(path: Path) -> str:
    """A text file, as also an editor on Windows leaves it: with a byte-order mark and CRLF."""
    return path.read_text(encoding="utf-8-sig")


def _end_name(inner: tokenizers.Tokenizer, folder: Path | None) -> str | None:
    """The token between documents, None without any.

    That is what the folder's tokenizer_config.json calls eos_token, else the special token that
    its config.json gives as eos_token_id, else the first of the usual names.
    """
    known = inner.get_vocab(with_added_tokens=True)
    names: list[Any] = []
    if folder is not None:
        eos = _setting(folder / "tokenizer_config.json", "eos_token")
        names.append(eos.get("content") if isinstance(eos, dict) else eos)
        number = _setting(folder / "config.json", "eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        special = {i: t.content for i, t in inner.get_added_tokens_decoder().items() if t.special}
        names.append(special.get(number) if isinstance(number, int) else None)
    return next((n for n in (*names, *_END_NAMES) if isinstance(n, str) and n in known), None)


def _setting(path: Path, name: str) -> Any:
    """A setting of a JSON file that need not be there."""
    try:
        settings = json.loads(_read(path))
    except (OSError, ValueError):
        return None
    return settings.get(name) if isinstance(settings, dict) else None


def _whole(text: str) -> str:
    """Text that UTF-8 can hold: surrogate pairs joined, halves as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
