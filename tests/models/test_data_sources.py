"""Files of every kind to documents."""

import csv
import gzip
import io
import json
import re
import sys

import pytest

from models import sources
from models.errors import UserError

zstd = sources._zstd("these tests")


def texts(path, field="text"):
    """The text of each document; all of it counts."""
    documents, text = [], ""
    for piece in sources.read(path, field):
        assert all(counts for _, counts in piece.parts)
        text += piece.text
        if piece.last:
            documents.append(text)
            text = ""
    assert not text
    return documents


def test_files_directories_and_globs(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.jsonl", "sub/e.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")

    def names(*given):
        return [path.name for path in sources.find_files([str(tmp_path / s) for s in given])]

    assert names(".") == ["a.md", "b.txt", "c.py", "d.jsonl"]
    assert names("b.txt", "*.md", "b.txt") == ["b.txt", "a.md"]
    assert names("**/*.py") == ["c.py"]
    assert names("sub/e.bin") == ["e.bin"]
    with pytest.raises(UserError, match=r"--data .*nothing.*: no such file"):
        names("b.txt", "nothing*")


def test_of_a_source_tree_only_text_is_read(tmp_path):
    read = ["Main.java", "a.rs", "deep/b.cc", "deep/c.JSONL.gz", "e.csv.zst", "t.parquet"]
    passed_over = [".git/x.py", ".hidden.txt", "__pycache__/y.py", "node_modules/z.js"]
    passed_over += ["image.png", "plain.gz", "Makefile"]
    for name in read + passed_over:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\0" if name == "t.parquet" else b"text")
    (tmp_path / "binary.c").write_bytes(b"text" * 100 + b"\0")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    found = sources.find_files([str(tmp_path)])
    assert [str(path.relative_to(tmp_path)) for path in found] == sorted(read)


def test_text_is_cleaned(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree \xff\xfe end")
    assert texts(path) == ["one\ntwo\nthree \ufffd\ufffd end"]
    path.write_bytes(b"\xef\xbb\xbf \r\n")
    assert texts(path) == []


def test_long_texts_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 20)
    path = tmp_path / "a.txt"
    # What decoding in blocks could break: BOM, CRLF, characters of several bytes, invalid ones.
    whole = "\n".join(f"línea {i}\r\n" if i % 3 else "日本語" * (i % 7) for i in range(3000))
    path.write_bytes(b"\xef\xbb\xbf" + whole.encode() + b" \xf0\x9f\x98")
    parts = list(sources.read(path))
    expected = whole.replace("\r\n", "\n") + " \ufffd"
    assert "".join(piece.text for piece in parts) == expected
    assert [piece.last for piece in parts] == [False] * (len(parts) - 1) + [True]
    assert max(len(piece.text) for piece in parts) == 20


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 12 + "\nbcd\nef and so on", "a" * 12 + "\nbcd\n"),
        ("a" * 12 + "\n\n bcd ef and so on", "a" * 12 + "\n\n bcd"),
        ("a" * 12 + "\n bcdefghijkl", "a" * 12 + "\n bcdefg"),
        ("a" * 25, "a" * 20),
    ],
)
def test_pieces_end_between_words(monkeypatch, text, first):
    """At a lone line end, else before a lone space, else anywhere."""
    monkeypatch.setattr(sources, "PIECE", 20)
    assert next(sources.pieces(io.StringIO(text))).text == first


def test_jsonl_has_a_document_per_line(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one\nline"}, {"text": ""}, {"text": "tw\u2028o", "other": 1}]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, rows)).encode())
    assert texts(path) == ["one\nline", "tw\u2028o"]
    path.write_text('{"text": "half \\ud83d"}')
    assert texts(path) == ["half ?"]
    path.write_text('{"body": "x", "text": 5}')
    assert texts(path, "body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"body": "x"}', "line 2: no string field \"text\", but keys \\['body'\\]; --text-field"),
        ('{"text": 5}', 'line 2: no string field "text"'),
        ("[1]", 'line 2: no string field "text", but list'),
        ('{"messages": ["x"]}', 'line 2: messages.0. has no strings "role" and "content"'),
        ('{"messages": [{"role": "user", "content": null}]}', "line 2: messages.0. has no strings"),
    ],
)
def test_bad_jsonl_is_located(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        list(sources.read(path))


def test_chat_counts_what_the_assistant_says(tmp_path):
    path = tmp_path / "chat.jsonl"
    messages = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")]
    row = {"messages": [{"role": role, "content": content} for role, content in messages]}
    path.write_text(json.dumps(row) + "\n" + '{"messages": []}\n')
    (piece,) = sources.read(path)
    assert piece.last
    assert piece.text == (
        "### system\nBe brief.\n\n### user\nHi\n\n### assistant\nHello.### user\nBye\n\n"
    )
    assert [text for text, counts in piece.parts if counts] == ["Hello."]


def test_csv_has_a_document_per_row(tmp_path):
    path = tmp_path / "a.csv"
    long = "x" * 200_000
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([("id", "text"), (1, "one,\r\nline"), (2, ""), (3, long), (4, "ü")])
    assert texts(path) == ["one,\nline", long, "ü"]
    assert texts(path, "id") == ["1", "2", "3", "4"]
    with pytest.raises(UserError, match=r"line 1: no column \"body\", but \['id', 'text'\]"):
        texts(path, "body")
    path.write_text("id,text\n1,one\n2\n")
    with pytest.raises(UserError, match='line 3: no string column "text"'):
        texts(path)
    path.write_text('id,text\n1,"one\n')
    with pytest.raises(UserError, match="line 2 is not CSV"):
        texts(path)


def parquet_file(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table(columns), path, row_group_size=2
    )


def test_parquet_has_a_document_per_row(tmp_path):
    path = tmp_path / "a.parquet"
    parquet_file(path, n=[1, 2, 3], text=["one", "two\n", "ü"], body=["x", "", None])
    assert texts(path) == ["one", "two\n", "ü"]
    with pytest.raises(UserError, match='row 3: no string column "body"'):
        texts(path, "body")
    with pytest.raises(UserError, match=r"no column \"b\", but \['n', 'text', 'body'\]"):
        texts(path, "b")
    message = {"role": "assistant", "content": "Hello."}
    parquet_file(path, messages=[[message], [message, message]])
    assert [len(piece.parts) for piece in sources.read(path)] == [2, 4]
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match="is not a parquet file"):
        texts(path)


def test_without_pyarrow_parquet_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=re.escape("needs pip install 'jax-xdna[data]'")):
        texts(path)


def test_without_zstd_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=re.escape("or pip install 'jax-xdna[data]'")):
        texts(path)


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_compressed_files_are_what_they_hold(tmp_path, compress):
    ending = ".gz" if compress is gzip.compress else ".zst"
    parquet_file(tmp_path / "d.parquet", text=["one", "two"])
    (tmp_path / "a.txt").write_text("one\r\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}')
    (tmp_path / "c.csv").write_text("text\none\ntwo\n")
    for path in sorted(tmp_path.glob("*.*")):
        content = path.read_bytes()
        packed = tmp_path / (path.name + ending)
        # Two members one after the other, as appending leaves them.
        packed.write_bytes(compress(content[:5]) + compress(content[5:]))
        assert texts(packed) == texts(path), path.name
    whole = compress(b"some text " * 1000)
    packed = tmp_path / ("a.txt" + ending)
    for bad in (whole[:-9], b"no such format"):
        packed.write_bytes(bad)
        with pytest.raises(UserError, match=re.escape(str(packed))):
            texts(packed)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.txt: No such file"):
        texts(tmp_path / "gone.txt")


def test_the_standard_library_is_found_in_a_fixed_order():
    files = sources.stdlib_files()
    assert files == sources.stdlib_files() == sorted(files)
    assert sum(path.stat().st_size for path in files) <= sources.STDLIB_BYTES
    assert not [path for path in files if {"site-packages", "test"} & set(path.parts)]
    assert any(path.name == "argparse.py" for path in files)
