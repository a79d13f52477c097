"""The tensors of a Hugging Face folder, looked at before they are read.

Safetensors, whole or in shards, else PyTorch's pickles through its safe loader.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from .errors import UserError

SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"
# In the order of preference; an index names the shards.
FILES = (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLE, f"{PICKLE}.index.json")
# Types that hold weights. Quantized ones need more than a conversion.
_FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. `load()` reads it, as fp32."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]

    def load(self, name: str) -> np.ndarray:
        """Raises UserError, with the tensor's name, when its type holds no weights."""
        if self.dtype not in _FLOATS:
            raise UserError(
                f"{self.file}: tensor {name} is {self.dtype}; only float32, float16, bfloat16 and "
                "float64 are supported, no quantized weights"
            )
        return self.read()


def find(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file that holds a folder's weights (or their index), and its tensors by name.

    Raises:
      UserError: no such file, or one that is damaged or refers to files that are not there.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"no weights in {folder}: a model needs config.json and {SAFETENSORS} there, or the "
            f"shards and their {SAFETENSORS}.index.json, or {PICKLE}"
        )
    open_file = _open_safetensors if SAFETENSORS in path.name else _open_pickle
    if path.suffix != ".json":
        return path, open_file(path)
    names = _shards(path)
    missing = sorted({name for name in names.values() if not (folder / name).is_file()})
    if missing:
        raise UserError(f"{path} names {len(missing)} files that are not there: {_some(missing)}")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(names.values())):
        tensors |= open_file(folder / shard)
    absent = sorted(names.keys() - tensors.keys())
    if absent:
        raise UserError(f"{path} names {len(absent)} tensors no shard has: {_some(absent)}")
    return path, tensors


def _shards(index: Path) -> dict[str, str]:
    """The shard of each tensor, from an index file."""
    try:
        shards = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is not an index of shards: {error!r}") from error
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index} names the shard {name!r}; it must be a file beside it")
    return shards


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        file = safetensors.safe_open(path, framework="flax")  # Of all frameworks, has bf16.
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from error

    def tensor(name: str) -> Tensor:
        part = file.get_slice(name)
        read = lambda: np.asarray(file.get_tensor(name), np.float32)  # noqa: E731
        return Tensor(path, tuple(part.get_shape()), part.get_dtype(), read)

    tensors = {name: tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    # Of tensors that share memory the format keeps one, and may note the others' names.
    for name, kept in (file.metadata() or {}).items():
        if kept in tensors:
            tensors.setdefault(name, tensors[kept])
    return tensors


def _open_pickle(path: Path) -> dict[str, Tensor]:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{path} is a PyTorch file, which needs torch: install it, or convert the folder where "
            'it is installed: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{path.parent}').save_pretrained('{path.parent}')\""
        ) from error
    try:
        # Tensors only: a pickle could otherwise run any program.
        mapped = zipfile.is_zipfile(path)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise UserError(f"{path} cannot be read safely: {reason[0]}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(t, torch.Tensor) for t in loaded.values()
    ):
        raise UserError(f"{path} is not a state dict: it must map names to tensors")

    def tensor(value: Any) -> Tensor:
        read = lambda: value.to(torch.float32).numpy().copy()  # noqa: E731
        return Tensor(path, tuple(value.shape), str(value.dtype).removeprefix("torch."), read)

    return {name: tensor(value) for name, value in loaded.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
