"""Files to documents to windows."""

import json

import numpy as np
import pytest

from models import data, tokenizer
from models.errors import UserError


@pytest.fixture(scope="module")
def by_bytes():
    return tokenizer.load("bytes")


def test_files_directories_and_globs(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.jsonl", "sub/e.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")

    def names(*sources):
        return [path.name for path in data.find_files([str(tmp_path / s) for s in sources])]

    assert names(".") == ["a.md", "b.txt", "c.py", "d.jsonl"]
    assert names("b.txt", "*.md", "b.txt") == ["b.txt", "a.md"]
    assert names("**/*.py") == ["c.py"]
    assert names("sub/e.bin") == ["e.bin"]
    with pytest.raises(UserError, match=r"--data .*nothing.*: no such file"):
        names("b.txt", "nothing*")


def test_text_is_cleaned(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree \xff\xfe end")
    assert list(data.read_documents(path)) == ["one\ntwo\nthree \ufffd\ufffd end"]
    path.write_bytes(b"\xef\xbb\xbf \r\n")
    assert list(data.read_documents(path)) == []


def test_jsonl_has_a_document_per_line(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one\nline"}, {"text": ""}, {"text": "tw\u2028o", "other": 1}]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, rows)).encode())
    assert list(data.read_documents(path)) == ["one\nline", "tw\u2028o"]
    path.write_text('{"text": "half \\ud83d"}')
    assert list(data.read_documents(path)) == ["half ?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"body": "x"}', "line 2: no string field \"text\", but keys \\['body'\\]"),
        ('{"text": 5}', 'line 2: no string field "text"'),
        ("[1]", 'line 2: no string field "text", but list'),
    ],
)
def test_bad_jsonl_is_located(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        list(data.read_documents(path))


def test_documents_end_with_end_of_text_and_are_split_whole(text_folder, by_bytes):
    files = data.find_files([str(text_folder)])
    corpus = data.build(files, by_bytes)
    texts = {path.read_text() for path in files}

    def documents(ids):
        assert ids[-1] == by_bytes.end
        ends = np.flatnonzero(ids == by_bytes.end)
        return [by_bytes.decode(part) for part in np.split(ids, ends + 1)[:-1]]

    train, validation = documents(corpus.train), documents(corpus.validation)
    assert set(train) | set(validation) == texts
    assert len(train) + len(validation) == len(texts) == corpus.documents
    assert 0 < corpus.validation.size <= 0.05 * (corpus.train.size + corpus.validation.size)
    assert data.build(files, by_bytes).fingerprint() == corpus.fingerprint()
    assert data.build(files[1:], by_bytes).fingerprint() != corpus.fingerprint()


def test_a_single_document_gives_its_tail(tmp_path, by_bytes):
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 20)
    corpus = data.build([path], by_bytes)
    assert by_bytes.decode(corpus.train) + by_bytes.decode(corpus.validation) == path.read_text()
    assert corpus.validation.size == 10


def test_no_text_and_foreign_ids_are_refused(tmp_path, by_bytes):
    path = tmp_path / "a.txt"
    path.write_text(" \n")
    with pytest.raises(UserError, match="no text in 1 files"):
        data.build([path], by_bytes)
    data.check_ids(np.asarray([0, 4]), 5)
    for bad in (5, -1):
        with pytest.raises(UserError, match=f"token id {bad} is outside the vocabulary of 5"):
            data.check_ids(np.asarray([0, bad]), 5)


def test_an_epoch_sees_every_token_once_in_another_order():
    tokens = np.arange(100, dtype=np.int32)
    batches = data.TrainBatches(tokens, 7, (1, 1), seed=3)
    assert batches.windows == 14

    def epoch(n):
        windows = [batches[n * 14 + i].tokens[0, 0] for i in range(14)]
        for w in windows:
            assert ((w[1:] - w[:-1]) % 100 == 1).all()
        return [int(w[0]) for w in windows]

    first, second = epoch(0), epoch(1)
    inputs = {(start + i) % 100 for start in first for i in range(7)}
    assert len(inputs) == 98  # All but less than one window.
    assert first != sorted(first) and first != second
    assert (first[0] - second[0]) % 7 or set(first) != set(second)


def test_batches_depend_on_seed_and_step_alone():
    tokens = np.random.default_rng(0).integers(0, 9, 50).astype(np.int32)
    one, two = (data.TrainBatches(tokens, 4, (2, 3), seed=5) for _ in range(2))
    straight = [one[i].tokens for i in range(6)]
    for i in (4, 0, 5, 2):
        np.testing.assert_array_equal(two[i].tokens, straight[i])
    assert straight[0].shape == (2, 3, 5)
    other = data.TrainBatches(tokens, 4, (2, 3), seed=6)
    assert any((other[i].tokens != straight[i]).any() for i in range(6))
    # Micro-batches divide the same sequence of windows.
    flat = data.TrainBatches(tokens, 4, (1, 6), seed=5)
    np.testing.assert_array_equal(flat[3].tokens.reshape(straight[3].shape), straight[3])


@pytest.mark.parametrize("length", [7, 8, 9])
def test_lengths_around_one_block(length):
    tokens = np.arange(length, dtype=np.int32)
    if length < 9:
        message = f"has {length} tokens, fewer than one window of --block-size 8 \\+ 1.*"
        with pytest.raises(UserError, match=message + f"--block-size {length - 1}"):
            data.TrainBatches(tokens, 8, (1, 2), seed=0)
        return
    batch = data.TrainBatches(tokens, 8, (1, 2), seed=0)[0]
    assert batch.tokens.shape == (1, 2, 9)
    assert (batch.weights == 1).all()


@pytest.mark.parametrize("length", [2, 8, 9, 10, 41])
def test_validation_counts_every_target_once(length):
    tokens = np.arange(length, dtype=np.int32)
    batches = data.validation_batches(tokens, 8, 2, limit=100)
    targets = [
        int(t)
        for b in batches
        for t, w in zip(b.tokens[:, 1:].flat, b.weights.flat, strict=True)
        if w
    ]
    assert sorted(targets) == list(range(1, length))
    assert all(b.tokens.shape == (2, 9) for b in batches)


def test_validation_is_limited_and_spread():
    batches = data.validation_batches(np.arange(1001, dtype=np.int32), 10, 2, limit=5)
    starts = [int(row[0]) for b in batches for row in b.tokens]
    assert len(starts) == 10
    assert starts[0] == 0 and starts[-1] == 990
    with pytest.raises(UserError, match="too few to predict one"):
        data.validation_batches(np.zeros(1, np.int32), 10, 2, limit=5)


def test_the_standard_library_is_found_in_a_fixed_order():
    files = data.stdlib_files()
    assert files == data.stdlib_files() == sorted(files)
    assert sum(path.stat().st_size for path in files) <= data.STDLIB_BYTES
    assert not [path for path in files if {"site-packages", "test"} & set(path.parts)]
    assert any(path.name == "argparse.py" for path in files)
