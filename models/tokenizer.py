"""Text to token ids and back: bytes, GPT-2's BPE, or any tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

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

    def __init__(self, inner: tokenizers.Tokenizer, source: str) -> None:
        self._inner = inner
        # Text that spells a special token is text: data must not be able to end a document.
        self._inner.encode_special_tokens = True
        self._inner.no_padding()
        self._inner.no_truncation()
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        end = next((ids[name] for name in _END_NAMES if name in ids), None)
        if end is None:
            raise UserError(
                f"tokenizer {source} has no end-of-text token (looked for {', '.join(_END_NAMES)})"
            )
        self.end = end

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32, without special tokens."""
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.int32) for e in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD, special tokens vanish."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

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


def load(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names.

    Args:
      spec: "bytes"; a tokenizer.json; or a directory with tokenizer.json, vocab.json and
        merges.txt, or encoder.json and vocab.bpe.

    Raises:
      UserError: nothing there, or not a tokenizer.
    """
    if spec == "bytes":
        return Tokenizer(_bytes(), spec)
    path = Path(spec)
    if path.is_file():
        return Tokenizer(_parse(path), spec)
    if (path / "tokenizer.json").is_file():
        return Tokenizer(_parse(path / "tokenizer.json"), spec)
    for vocab, merges in _BPE_FILES:
        if (path / vocab).is_file() and (path / merges).is_file():
            return Tokenizer(_gpt2(path / vocab, path / merges), spec)
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
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
        known = END_OF_TEXT in json.loads(vocab.read_text(encoding="utf-8"))
    except Exception as error:  # The library raises plain Exception.
        raise UserError(f"{vocab} and {merges} are not BPE tables: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if known:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _parse(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise UserError(f"{path} is not a tokenizer.json: {error}") from error
