"""`--config`: flags from a TOML file, or from the options.json of an earlier run."""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from .errors import UserError

_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def read(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of a file by the parser's names; keys are its long flags, with - or _.

    A null of JSON is a flag not given.

    Raises:
      UserError: the file cannot be read, or a key is unknown, twice there, or of another type.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UserError(f"--config {path} is not {kind}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"--config {path} holds a {type(found).__name__}; it must be an object")
    actions = {a.dest: a for a in parser._actions if a.dest not in ("help", "config")}
    given: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in actions:
            near = difflib.get_close_matches(name, actions, 1)
            hint = f"; did you mean {near[0]}?" if near else "; keys are the flags of --help"
            raise UserError(f"--config {path}: unknown key {key}{hint}")
        if name in given:
            raise UserError(f"--config {path}: {key} is there twice, with - and with _")
        if value is not None and value != []:
            given[name] = _checked(path, key, value, actions[name])
    return given


def _checked(path: Path, key: str, value: Any, action: argparse.Action) -> Any:
    """The value as the flag would give it."""
    kind: Any = bool if action.nargs == 0 else action.type or str
    several, wanted = action.nargs not in (None, 0), _WORDS[kind]
    if several:
        many = "one or more" if action.nargs == "+" else action.nargs
        wanted = f"a list of {many}, each {wanted}"
    values = value if several and isinstance(value, list) else [value]
    allowed = (int, float) if kind is float else (kind,)
    if (
        several != isinstance(value, list)
        or any(type(one) not in allowed for one in values)
        or (several and action.nargs not in ("+", len(values)))
    ):
        got = json.dumps(value, default=str)
        raise UserError(f"--config {path}: {key} is {got}; it must be {wanted}")
    return [kind(one) for one in values] if several else kind(value)
