"""Tokens to windows."""

import json

import numpy as np
import pytest

from models import data, tokenizer
from models.data import Tokens
from models.errors import UserError


@pytest.fixture(scope="module")
def by_bytes():
    return tokenizer.load("bytes")


def counting(length, **settings):
    return Tokens(np.arange(length, dtype=np.uint16), **settings)


def documents(tokens, tokenizer):
    """The texts that end-of-text tokens divide."""
    assert tokens.ids[-1] == tokenizer.end
    ends = np.flatnonzero(tokens.ids == tokenizer.end)
    return [tokenizer.decode(part) for part in np.split(tokens.ids, ends + 1)[:-1]]


def test_documents_end_with_end_of_text_and_are_split_whole(text_folder, by_bytes):
    files = data.find_files([str(text_folder)])
    corpus = data.build(files, by_bytes)
    texts = {path.read_text() for path in files}
    train, validation = (documents(t, by_bytes) for t in (corpus.train, corpus.validation))
    assert set(train) | set(validation) == texts
    assert len(train) + len(validation) == len(texts) == corpus.documents
    assert 0 < len(validation) < len(train)
    assert data.build(files, by_bytes).fingerprint() == corpus.fingerprint()
    assert data.build(files[1:], by_bytes).fingerprint() != corpus.fingerprint()


def test_more_documents_do_not_move_others(tmp_path, by_bytes):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(1000))
    )
    (tmp_path / "b.jsonl").write_text('{"text": "another"}\n{"text": "and another"}\n')
    one = data.build([tmp_path / "a.jsonl"], by_bytes)
    two = data.build([tmp_path / "b.jsonl", tmp_path / "a.jsonl"], by_bytes)
    held_out, still = (set(documents(c.validation, by_bytes)) for c in (one, two))
    assert held_out == still - {"another", "and another"}
    assert len(held_out) == pytest.approx(50, abs=20)


def test_a_single_document_gives_its_tail(tmp_path, by_bytes):
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 20)
    corpus = data.build([path], by_bytes)
    text = by_bytes.decode(corpus.train.ids) + by_bytes.decode(corpus.validation.ids)
    assert text == path.read_text()
    assert len(corpus.validation) == 10
    assert corpus.train.ends.tolist() == [191] and corpus.validation.ends.tolist() == [10]


def test_no_text_is_refused(tmp_path, by_bytes):
    path = tmp_path / "a.txt"
    path.write_text(" \n")
    with pytest.raises(UserError, match="no text in 1 files"):
        data.build([path], by_bytes)


def test_an_epoch_sees_every_token_once_in_another_order():
    batches = data.TrainBatches(counting(100), 7, (1, 1), seed=3)
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


def test_an_epoch_orders_the_documents_anew():
    ends = np.asarray([3, 10, 30, 31, 60])
    tokens = counting(60, ends=ends)

    def ring(epoch):
        batches = data.TrainBatches(tokens, 4, (15,), seed=3)
        windows = batches[epoch].tokens
        # Windows share a token with the next: those are joined to a ring again.
        follows = {int(w[0]): w for w in windows}
        assert len(follows) == 15
        order, at = [], int(windows[0, 0])
        while at in follows:
            window = follows.pop(at)
            order += window[:-1].tolist()
            at = int(window[-1])
        assert at == order[0]
        return order

    starts = np.concatenate([[0], ends[:-1]])

    def sequence(order):
        """The documents as they follow each other from the first on."""
        jumps = [token for token in order if token in starts]
        i = jumps.index(0)
        return jumps[i:] + jumps[:i]

    orders = [ring(epoch) for epoch in range(4)]
    for order in orders:
        assert sorted(order) == list(range(60))
        before = dict(zip(order[1:] + order[:1], order, strict=True))
        inner = set(range(60)) - set(starts.tolist())
        assert all(before[token] == token - 1 for token in inner)
    assert len({tuple(sequence(order)) for order in orders}) > 1


def test_many_windows_are_shuffled_in_parts(monkeypatch):
    monkeypatch.setattr(data, "SHUFFLED", 8)
    batches = data.TrainBatches(counting(70), 3, (23,), seed=0)
    assert batches.windows == 23 and batches._parts == 3
    for epoch in range(2):
        starts = batches[epoch].tokens[:, 0]
        first = batches._ring(epoch)[0]
        windows = (starts - first) % 70 // 3
        assert sorted(windows.tolist()) == list(range(23))
        # Each part is every third window.
        for part, inside in enumerate(np.split(windows, [8, 16])):
            assert set(inside.tolist()) == set(range(part, 23, 3))
            assert inside.tolist() != sorted(inside.tolist())


def test_batches_depend_on_seed_and_step_alone():
    ids = np.random.default_rng(0).integers(0, 9, 50).astype(np.uint16)
    tokens = Tokens(ids, ends=np.asarray([20, 35, 50]))
    one, two = (data.TrainBatches(tokens, 4, (2, 3), seed=5) for _ in range(2))
    straight = [one[i].tokens for i in range(6)]
    for i in (4, 0, 5, 2):
        np.testing.assert_array_equal(two[i].tokens, straight[i])
    assert straight[0].shape == (2, 3, 5) and straight[0].dtype == np.int32
    other = data.TrainBatches(tokens, 4, (2, 3), seed=6)
    assert any((other[i].tokens != straight[i]).any() for i in range(6))
    # Micro-batches divide the same sequence of windows.
    flat = data.TrainBatches(tokens, 4, (1, 6), seed=5)
    np.testing.assert_array_equal(flat[3].tokens.reshape(straight[3].shape), straight[3])


@pytest.mark.parametrize("length", [2, 7, 8, 9])
def test_lengths_around_one_block(length):
    """Inputs follow the ring; each token is a target once, also where the block is longer."""
    batch = data.TrainBatches(counting(length), 8, (1, 2), seed=0)[0]
    assert batch.tokens.shape == (1, 2, 9)
    for window, weights in zip(batch.tokens[0], batch.weights[0], strict=True):
        np.testing.assert_array_equal(window, (window[0] + np.arange(9)) % length)
        targets = window[1:][weights == 1]
        assert weights.tolist() == [1] * min(length, 8) + [0] * max(0, 8 - length)
        assert len(set(targets.tolist())) == min(length, 8)
    with pytest.raises(UserError, match="training text has 1 tokens, too few to predict one"):
        data.TrainBatches(counting(1), 8, (1, 2), seed=0)


def test_masked_tokens_are_read_but_do_not_count():
    masked = (np.arange(40) % 3 == 0).astype(np.uint8)
    tokens = counting(40, masked=masked, ends=np.asarray([10, 40]))
    batch = data.TrainBatches(tokens, 6, (2, 2), seed=1)[3]
    np.testing.assert_array_equal(batch.weights, batch.tokens[..., 1:] % 3 != 0)
    assert batch.weights.dtype == np.float32
    batches = data.validation_batches(tokens, 8, 2, limit=100)
    counted = sorted(int(t) for b in batches for t in b.tokens[:, 1:][b.weights.astype(bool)].flat)
    assert counted == [i for i in range(1, 40) if i % 3]
    nothing = counting(40, masked=np.ones(40, np.uint8))
    for make in (data.TrainBatches, data.validation_batches):
        with pytest.raises(UserError, match="has no message of an assistant"):
            make(nothing, 8, (1, 1), 1)


@pytest.mark.parametrize("length", [2, 8, 9, 10, 41])
def test_validation_counts_every_target_once(length):
    batches = data.validation_batches(counting(length), 8, 2, limit=100)
    targets = [
        int(t)
        for b in batches
        for t, w in zip(b.tokens[:, 1:].flat, b.weights.flat, strict=True)
        if w
    ]
    assert sorted(targets) == list(range(1, length))
    assert all(b.tokens.shape == (2, 9) for b in batches)


def test_validation_is_limited_and_spread():
    batches = data.validation_batches(counting(1001), 10, 2, limit=5)
    starts = [int(row[0]) for b in batches for row in b.tokens]
    assert len(starts) == 10
    assert starts[0] == 0 and starts[-1] == 990
    with pytest.raises(UserError, match="too few to predict one"):
        data.validation_batches(counting(1), 10, 2, limit=5)
