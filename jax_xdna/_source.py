"""Where in the user's code an equation comes from."""

from __future__ import annotations

import functools
import importlib.util
import os
import sysconfig

from . import _jax_compat as compat

# Frames of these are machinery between the user's line and the dot.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "equinox", "haiku", "einops")


@functools.cache
def _library_folders() -> tuple[str, ...]:
    folders = [os.path.dirname(os.path.abspath(__file__))]
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        folders += list(spec.submodule_search_locations or ()) if spec else []
    return tuple(folder + os.sep for folder in folders)


@functools.cache
def _is_users(file: str) -> bool:
    if file.startswith(_library_folders()) or file.startswith("<frozen"):
        return False
    paths = sysconfig.get_paths()
    installed = file.startswith((paths["purelib"] + os.sep, paths["platlib"] + os.sep))
    # The standard library (contextlib, functools …), but not what is installed inside it.
    return installed or not file.startswith(paths["stdlib"] + os.sep)


@functools.cache
def _shown(file: str, folder: str) -> str:
    inside = file.startswith(folder + os.sep)
    return os.path.relpath(file, folder) if inside else file


def user_source(eqn: compat.Equation) -> str:
    """ "file:line" of the innermost frame outside JAX, Flax and the like; "" when there is none."""
    for file, line, _ in compat.frames(eqn):
        if _is_users(file):
            return f"{_shown(file, os.getcwd())}:{line}"
    return ""
