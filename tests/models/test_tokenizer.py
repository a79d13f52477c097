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


def test_special_tokens_on_request(tmp_path, trained):
    trained.save(str(tmp_path / "tokenizer.json"))
    for t in (tokenizer.load("bytes"), tokenizer.load(str(tmp_path))):
        (ids,) = t.encode(["a<|endoftext|>b"], special=True)
        assert ids.tolist().count(t.end) == 1 and len(ids) == 3
        assert t.decode(ids) == "ab"
        assert t.end not in t.encode(["a<|endoftext|>b"])[0]


def test_an_end_of_text_not_marked_as_special_is_still_out_of_datas_reach(tmp_path, trained):
    definition = json.loads(trained.to_str())
    (token,) = definition["added_tokens"]
    for tokens in ([token | {"special": False}], []):
        definition["added_tokens"] = tokens
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
        t = tokenizer.load(str(tmp_path))
        (ids,) = t.encode(["a<|endoftext|>b"])
        assert t.end == trained.token_to_id("<|endoftext|>") not in ids
        assert t.decode(ids) == "a<|endoftext|>b"
        assert t.end in t.encode(["a<|endoftext|>b"], special=True)[0]


def test_words_that_can_only_be_the_end_of_text_are_refused(tmp_path):
    vocab = {"[UNK]": 0, "</s>": 1, "cat": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    t = tokenizer.load(str(tmp_path))
    assert t.encode(["cat dog"])[0].tolist() == [2, 0]
    with pytest.raises(UserError, match="a text contains '</s>', which this tokenizer can only"):
        t.encode(["cat", "cat </s>"])


def test_the_folder_says_which_token_ends_a_text(tmp_path, trained):
    trained.add_special_tokens(["<|im_end|>", "</s>"])
    ids = {name: trained.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>", "</s>")}
    trained.save(str(tmp_path / "tokenizer.json"))

    def end(config=None, tokenizer_config=None):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return tokenizer.load(str(tmp_path)).end

    assert end() == ids["<|endoftext|>"]
    assert end({"eos_token_id": ids["</s>"]}) == ids["</s>"]
    assert end({"eos_token_id": [ids["</s>"], 5]}) == ids["</s>"]
    # Left over from another tokenizer: beyond the vocabulary, or no special token.
    assert end({"eos_token_id": 50256}) == end({"eos_token_id": 5}) == ids["<|endoftext|>"]
    both = ({"eos_token_id": ids["</s>"]}, {"eos_token": "<|im_end|>"})
    assert end(*both) == end(None, {"eos_token": {"content": "<|im_end|>"}}) == ids["<|im_end|>"]
    (tmp_path / "config.json").write_text("{")
    assert tokenizer.load(str(tmp_path / "tokenizer.json")).end == ids["<|im_end|>"]


def test_files_of_a_windows_editor(tmp_path, trained):
    trained.model.save(str(tmp_path))
    wanted = tokenizer.load(str(tmp_path)).encode(["the cat\r\n"])[0].tolist()
    for name in ("vocab.json", "merges.txt"):
        text = (tmp_path / name).read_bytes().replace(b"\n", b"\r\n")
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text)
    assert tokenizer.load(str(tmp_path)).encode(["the cat\r\n"])[0].tolist() == wanted
    (tmp_path / "tokenizer.json").write_text("\ufeff" + trained.to_str(), encoding="utf-8")
    assert tokenizer.load(str(tmp_path)).encode(["the cat\r\n"])[0].tolist() == wanted


def test_text_that_utf8_cannot_hold(trained):
    t = tokenizer.load("bytes")
    ids = t.encode(["\ud83d\ude42", "a\udcffb", "\ufeffx\r\n", ""])
    assert t.decode(ids[0]) == "🙂"
    assert t.decode(ids[1]) == "a\ufffdb"
    assert t.decode(ids[2]) == "\ufeffx\r\n"
    assert ids[3].shape == (0,) and ids[3].dtype == np.int32 and t.decode([]) == ""


def test_ids_out_of_range():
    t = tokenizer.load("bytes")
    for token in (257, -1):
        with pytest.raises(UserError, match=f"token id {token} is outside the tokenizer's .* 257"):
            t.decode([65, token])
    t.require_fits(257, "folder")
    with pytest.raises(UserError, match="has 257 ids, but the model in folder only 256"):
        t.require_fits(256, "folder")


def test_a_stream_holds_back_pieces_of_characters():
    stream = tokenizer.Stream(tokenizer.load("bytes"), "ž".encode())
    pieces = [stream.push(byte) for byte in "a日".encode() + b"\xffb\xe6"]
    assert pieces == ["a", "", "", "日", "", "\ufffdb", ""]
    assert stream.flush() == "\ufffd" and stream.flush() == ""


def test_a_stream_keeps_the_spaces_between_words(tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "▁the": 2, "▁cat": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    t = tokenizer.load(str(tmp_path))
    stream = tokenizer.Stream(t, [2])
    assert [stream.push(i) for i in (3, 1, 2, 3)] == [" cat", "", " the", " cat"]
    assert t.decode([2, 3, 2, 3]) == "the cat the cat"


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
