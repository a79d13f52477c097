"""Compiled designs in a cache directory: complete or absent, however many build at a time."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# Of the packed operands, the runtime words and the stream: a plugin uses artifacts of its own only.
LAYOUT_VERSION = 1


def cache_directory() -> Path:
    """XDG_CACHE_HOME, or ~/.cache, and there jax-xdna."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jax-xdna"


def name_of(description: dict[str, Any]) -> str:
    """Directory name of what is described: readable, and different for every difference."""
    text = json.dumps(description, sort_keys=True)
    m, k, n, c = description["tile"]
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    kind = f"{description['numerics']}-{description['result']}"
    return f"{description['arch']}-{kind}-{m}x{k}x{n}x{c}-{key}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(directory: Path) -> dict[str, Any]:
    """The manifest. Raises ValueError when a file is missing or is not what was built."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        for name, digest in manifest["files"].items():
            if _digest(directory / name) != digest:
                raise ValueError(f"{directory / name} is not the file that was built")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{directory} is not a complete artifact: {error}") from error
    return manifest


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Excludes other builders of the same artifact, in this process and in others."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(
    cache: Path, description: dict[str, Any], compile_into: Callable[[Path], None]
) -> tuple[Path, bool]:
    """The directory of the artifact, and whether it had to be built.

    `compile_into` writes the files into the directory it is given; when it raises, nothing stays.
    A manifest of the description and the files' SHA-256 is added. One that is damaged is replaced.
    """
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / name_of(description)
    with _locked(cache / f".{directory.name}.lock"):
        if directory.exists():
            try:
                load(directory)
                return directory, False
            except ValueError:
                shutil.rmtree(directory)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=cache))
        try:
            compile_into(work)
            files = {path.name: _digest(path) for path in sorted(work.iterdir())}
            (work / MANIFEST).write_text(
                json.dumps({**description, "files": files}, indent=2) + "\n"
            )
            work.rename(directory)
        except BaseException:
            shutil.rmtree(work)
            raise
    return directory, True
