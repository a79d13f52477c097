"""Text to ids and back."""

import json

import numpy as np
import pytest
import tokenizers

from models import tokenizer
from models.errors import UserError

TEXTS = ["", "Hello, world", "\x00\x7f \n\t\r", "žluťoučký 日本語 🙂", "<|endoftext|>"]


@pytest.fixture(scope="module")
def trained():
    """A small BPE tokenizer in GPT-2's way."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
    )
    inner.train_from_iterator(["the cat sat on the mat, the hat and the bat"] * 20, trainer)
    return inner


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_utf8(text):
    t = tokenizer.load("bytes")
    (ids,) = t.encode([text])
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert t.decode(ids) == text
    assert (t.vocab_size, t.end) == (257, 256)


def test_bytes_that_are_no_text_decode_to_a_replacement():
    t = tokenizer.load("bytes")
    assert t.decode([0xC3, 0x28, 256, 0x41]) == "\ufffd(A"


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_bpe_tables_equal_the_tokenizer_they_came_from(tmp_path, trained, names):
    trained.model.save(str(tmp_path))
    (tmp_path / "vocab.json").rename(tmp_path / names[0])
    (tmp_path / "merges.txt").rename(tmp_path / names[1])
    t = tokenizer.load(str(tmp_path))
    assert t.vocab_size == trained.get_vocab_size() > 257
    assert t.end == trained.token_to_id("<|endoftext|>")
    for text in [*TEXTS[:-1], "the cat that sat"]:
        (ids,) = t.encode([text])
        assert ids.tolist() == trained.encode(text).ids
        assert t.decode(ids) == text
    assert len(t.encode(["the the the"])[0]) == 3


@pytest.mark.parametrize("as_file", [True, False])
def test_tokenizer_json(tmp_path, trained, as_file):
    path = tmp_path / "tokenizer.json"
    trained.save(str(path))
    t = tokenizer.load(str(path if as_file else tmp_path))
    assert t.encode(["the cat"])[0].tolist() == trained.encode("the cat").ids


def test_text_cannot_spell_the_end_of_text(tmp_path, trained):
    trained.save(str(tmp_path / "tokenizer.json"))
    for t in (tokenizer.load("bytes"), tokenizer.load(str(tmp_path))):
        (ids,) = t.encode(["a<|endoftext|>b"])
        assert t.end not in ids
        assert t.decode(ids) == "a<|endoftext|>b"


def test_what_is_saved_is_the_same_tokenizer(tmp_path):
    t = tokenizer.load("bytes")
    (tmp_path / "tokenizer.json").write_text(t.to_json())
    again = tokenizer.load(str(tmp_path))
    assert again.fingerprint() == t.fingerprint()
    assert again.encode(TEXTS)[3].tolist() == t.encode(TEXTS)[3].tolist()


def test_errors(tmp_path, trained):
    with pytest.raises(UserError, match="no tokenizer in nowhere: it must be 'bytes'"):
        tokenizer.load("nowhere")
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        tokenizer.load(str(path))
    definition = json.loads(trained.to_str())
    definition["added_tokens"] = []
    del definition["model"]["vocab"]["<|endoftext|>"]
    path.write_text(json.dumps(definition))
    with pytest.raises(UserError, match="has no end-of-text token"):
        tokenizer.load(str(path))


def test_control_characters_are_not_printed() -> None:
    assert tokenizer.printable("a\x1b[2J\tb\nc\x85\r") == "a\ufffd[2J\tb\nc\ufffd\ufffd"
