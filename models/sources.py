"""Files, directories and globs to documents, a piece at a time, however large they are."""

from __future__ import annotations

import csv
import glob
import gzip
import importlib
import io
import json
import os
import shutil
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from .errors import UserError

RECORDS = (".jsonl", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
# What a directory is searched for: records, prose and source code.
SUFFIXES = {
    *RECORDS,
    *".txt .md .markdown .rst .adoc .org .tex .html .htm .xml .css .toml .yaml .yml .ini".split(),
    *".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .rs .go .zig .java .kt .scala .cs .fs".split(),
    *".swift .m .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .r .jl .hs .ml .ex .exs".split(),
    *".erl .clj .lisp .el .scm .sh .bash .zsh .ps1 .sql .proto .cmake .mk .mlir .ll .s".split(),
    *".asm .f90 .vhd .v .sv .cfg".split(),
}
# Neither anyone's text nor worth a search; neither are hidden directories, as those of Git.
_SKIPPED = {"__pycache__", "node_modules", "CVS"}
# Characters of a piece: longer documents are cut, at the end of a line where there is one.
PIECE = 2**18
# Enough of the standard library that a short run sees no token twice.
STDLIB_BYTES = 4_000_000
# Not the library itself: installed packages, tests, and tables written as source.
_NOT_STDLIB = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("encodings", "pydoc_data", "lib2to3"),
}


@dataclass(frozen=True)
class Piece:
    """A document, or a piece of one that is longer than `PIECE`.

    Attributes:
      parts: texts, and whether their tokens count in the loss.
      last: whether the document ends here.
    """

    parts: tuple[tuple[str, bool], ...]
    last: bool = True

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


def stdlib_files() -> list[Path]:
    """This Python's own standard library, sorted by name, up to `STDLIB_BYTES`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if not _NOT_STDLIB.isdisjoint(path.relative_to(root).parts) or not path.is_file():
            continue
        total += path.stat().st_size
        if total > STDLIB_BYTES:
            break
        files.append(path)
    if not files:
        raise UserError(f"no .py files of the standard library in {root}: name files with --data")
    return files


def find_files(sources: Sequence[str]) -> list[Path]:
    """Files named by paths, directories and globs, each file once.

    Directories are searched for `SUFFIXES`, also compressed; hidden files and directories, and
    files that are not text, are passed over.

    Raises:
      UserError: a source that matches nothing.
    """
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            matches = _search(path)
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        matches = [p for p in matches if p.is_file()]
        if not matches:
            raise UserError(
                f"--data {source}: no such file, and no text file (.txt, .md, .py, .jsonl, .csv, "
                ".parquet, …) in or by that name"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def _search(root: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [d for d in folders if not d.startswith(".") and d not in _SKIPPED]
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        found += [p for p in paths if suffix(p) in SUFFIXES and p.is_file() and not _binary(p)]
    return sorted(found)


def suffix(path: Path) -> str:
    """What kind of file it is: ".jsonl" also for a.jsonl.gz."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def _binary(path: Path) -> bool:
    """Git's rule: a NUL among the first bytes. Formats that are binary by nature are not asked."""
    if path.suffix.lower() in (*COMPRESSED, ".parquet"):
        return False
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8000)
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}") from error


def read(path: Path, field: str = "text") -> Iterator[Piece]:
    """The documents of a file, in pieces, with memory for a few of them or for the longest record.

    A .jsonl file has one in the `field` of each line, or a conversation in "messages" (`_chat`);
    a .csv file in that column of each row, a .parquet file likewise; any other file is one
    document. ".gz" and ".zst" files are what they are without. A byte-order mark is dropped, bytes
    that are not UTF-8 become U+FFFD, line ends become "\\n", and documents without text are
    skipped.

    Raises:
      UserError: a file that cannot be read, or a record without the field; it says which line.
    """
    kind = suffix(path)
    try:
        with _open(path) as file:
            if kind == ".parquet":
                yield from _parquet(path, file, field)
                return
            text = io.TextIOWrapper(file, "utf-8-sig", errors="replace")
            if kind == ".jsonl":
                yield from _jsonl(path, text, field)
            elif kind == ".csv":
                yield from _csv(path, text, field)
            else:
                yield from pieces(text)
    except (EOFError, zlib.error, *_zstd_errors()) as error:
        raise UserError(f"--data {path} is damaged or incomplete: {error}") from error
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    compression = path.suffix.lower()
    if compression == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if compression == ".zst":
        return _zstd(path).open(path, "rb")
    return open(path, "rb")


def _zstd(path: Path) -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UserError(f"--data {path}: .zst needs Python 3.14, or pip install 'jax-xdna[data]'")


def _zstd_errors() -> tuple[type[Exception], ...]:
    try:
        return (_zstd(Path()).ZstdError,)
    except UserError:
        return ()


def pieces(text: TextIO) -> Iterator[Piece]:
    """One document of any length, in pieces of at most `PIECE` characters."""
    rest, last = "", False
    started = False
    while not last:
        more = text.read(PIECE)
        rest, last = rest + more, not more
        while len(rest) > PIECE:
            cut = _cut(rest)
            yield Piece(((rest[:cut], True),), last=False)
            rest, started = rest[cut:], True
    if started or rest.strip():
        yield Piece(((rest, True),))


def _cut(text: str) -> int:
    """Where to cut a text longer than `PIECE`.

    Byte-level BPE as GPT-2's splits between words before it joins: cut after a lone line end, or
    before a lone space, the pieces have the ids of the whole.
    """
    for char, after in (("\n", 1), (" ", 0)):
        at = PIECE - 1
        while (at := text.rfind(char, PIECE // 2, at)) > 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                return at + after
    return PIECE


def _record(record: Any, field: str, where: str, noun: str = "field") -> Iterator[Piece]:
    """The document of one row."""
    row = record if isinstance(record, dict) else {}
    if isinstance(row.get(field), str):
        # JSON can spell half of a surrogate pair, which no UTF-8 text holds.
        text = row[field].encode("utf-8", errors="replace").decode("utf-8")
        yield from pieces(io.StringIO(text))
    elif isinstance(row.get("messages"), list):
        yield from _chat(row["messages"], where)
    else:
        got = f"keys {sorted(row)}" if isinstance(record, dict) else type(record).__name__
        raise UserError(
            f'{where}: no string {noun} "{field}", but {got}; --text-field names another'
        )


def _chat(messages: list[Any], where: str) -> Iterator[Piece]:
    """A conversation as text; only what the assistant says counts in the loss.

    Each message is "### role", a line end, and its content; two line ends follow, or the
    end-of-text token where the assistant ends.
    """
    parts: list[tuple[str, bool]] = []
    for number, message in enumerate(messages):
        role, content = (
            message.get(key) if isinstance(message, dict) else None for key in ("role", "content")
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f'{where}: messages[{number}] has no strings "role" and "content"')
        content = content.encode("utf-8", errors="replace").decode("utf-8")
        if role == "assistant":
            parts += [(f"### {role}\n", False), (content, True)]
        else:
            parts.append((f"### {role}\n{content}\n\n", False))
    if parts:
        yield Piece(tuple(parts))


def _jsonl(path: Path, lines: TextIO, field: str) -> Iterator[Piece]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield from json_line(line, field, f"{path}, line {number}")


def json_line(line: str, field: str, where: str) -> Iterator[Piece]:
    """The document of one line of JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    yield from _record(record, field, where)


def _csv(path: Path, lines: TextIO, field: str) -> Iterator[Piece]:
    csv.field_size_limit(2**31 - 1)  # The library's own limit is 128 KiB.
    rows = csv.DictReader(lines, strict=True)
    try:
        if field not in (columns := rows.fieldnames or []):
            raise UserError(
                f'{path}, line 1: no column "{field}", but {columns}; --text-field names another'
            )
        for row in rows:
            yield from _record(row, field, f"{path}, line {rows.line_num}", "column")
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.reader.line_num} is not CSV: {error}") from error


def _parquet(path: Path, file: BinaryIO, field: str) -> Iterator[Piece]:
    """A .parquet file, by row groups: memory for one of them."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"--data {path}: .parquet needs pip install 'jax-xdna[data]'") from error
    with tempfile.TemporaryFile() as whole:
        if path.suffix.lower() in COMPRESSED:  # The table of contents is at the end.
            shutil.copyfileobj(file, whole)
            file = whole
        try:
            table = parquet.ParquetFile(file)
            known = table.schema_arrow.names
            columns = [name for name in (field, "messages") if name in known]
            if not columns:
                raise UserError(
                    f'{path}: no column "{field}", but {known}; --text-field names another'
                )
            number = 0
            for batch in table.iter_batches(64, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield from _record(row, field, f"{path}, row {number}", "column")
        except pyarrow.ArrowException as error:
            raise UserError(f"--data {path} is not a parquet file: {error}") from error
