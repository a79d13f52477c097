"""Models in and out of Hugging Face directories: config.json and model.safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from .errors import UserError
from .gpt2 import GPT2, Config

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_HEAD = "lm_head.weight"
_EMBEDDING = "wte.weight"
# Causal masks that older exports store as if they were parameters.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
# Settings of other models that carry the name GPT-2, with the value this one computes.
_REQUIRED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
_SIZES = (
    *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
    *("layer_norm_epsilon", "initializer_range"),
)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file at once: a reader, also after a crash, sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_params(folder: Path, config: Config, params: Mapping[str, Any]) -> None:
    """Writes model.safetensors as `transformers` reads it: vocabulary unpadded, head tied."""
    tensors = {_hf_name(path): np.asarray(value) for path, value in flatten_dict(params).items()}
    tensors[_EMBEDDING] = tensors[_EMBEDDING][: config.vocab_size]
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    content = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    write_atomically(folder / WEIGHTS, content)


def save_config(folder: Path, config: Config, end_token: int) -> None:
    """Writes config.json as `transformers` reads it."""
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        **_REQUIRED,
        **{name: getattr(config, name) for name in _SIZES},
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "torch_dtype": "float32",
    }
    write_atomically(folder / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


def load_config(folder: Path) -> Config:
    """The sizes in a directory's config.json; dropout is off.

    Raises:
      UserError: not there, not JSON, or a model that `GPT2` does not compute.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"no {CONFIG} in {folder}: a model needs {CONFIG} and {WEIGHTS} there")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    for name, wanted in _REQUIRED.items():
        if settings.get(name, wanted) != wanted:
            raise UserError(f"{path}: {name} is {settings[name]!r}; only {wanted!r} is supported")
    try:
        config = Config(**{name: settings[name] for name in _SIZES if name in settings})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    if settings.get("n_inner") not in (None, 4 * config.n_embd):
        raise UserError(f"{path}: n_inner is {settings['n_inner']}; only 4 · n_embd is supported")
    return config


def load_params(folder: Path, config: Config) -> dict[str, Any]:
    """A directory's weights as fp32 parameters of `GPT2(config)`, the vocabulary padded.

    Names with and without the `transformer.` prefix are read, and any float type. A separate
    output head is accepted when it equals the token embedding.

    Raises:
      UserError: no such file, or a tensor that is missing, unknown or of another shape.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"no {WEIGHTS} in {folder}: a model needs {CONFIG} and {WEIGHTS} there")
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            stored = {
                name.removeprefix("transformer."): np.asarray(file.get_tensor(name), np.float32)
                for name in file.keys()  # noqa: SIM118 (not a dict)
                if not name.endswith(_BUFFERS)
            }
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    head = stored.pop(_HEAD, None)
    wanted = {_hf_name(key): (key, leaf.shape) for key, leaf in abstract_params(config).items()}
    params = {}
    for name, (key, shape) in wanted.items():
        if name == _EMBEDDING:
            shape = (config.vocab_size, config.n_embd)
        if name in stored and stored[name].shape != shape:
            raise UserError(
                f"{path}: tensor {name} has shape {stored[name].shape}; the model has {shape}"
            )
        params[key] = stored.get(name)
    _same_names(path, set(stored), set(wanted))
    if head is not None and not np.array_equal(head, stored[_EMBEDDING]):
        raise UserError(
            f"{path}: {_HEAD} differs from {_EMBEDDING}; only models with a tied head are supported"
        )
    padding = config.padded_vocab_size - config.vocab_size
    key = ("wte", "embedding")
    params[key] = np.pad(params[key], ((0, padding), (0, 0)))
    return unflatten_dict(jax.tree.map(jnp.asarray, params))


def abstract_params(config: Config) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
    """Shapes of the parameters by path, without computing them."""
    shapes = jax.eval_shape(GPT2(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return flatten_dict(shapes["params"])


def _hf_name(path: tuple[str, ...]) -> str:
    """("h", "0", "ln_1", "scale") → "h.0.ln_1.weight". Kernels are (in, out) on both sides."""
    *module, leaf = path
    return ".".join([*module, "bias" if leaf == "bias" else "weight"])


def _same_names(path: Path, stored: set[str], wanted: set[str]) -> None:
    for what, names in (("lacks", wanted - stored), ("has unknown", stored - wanted)):
        if names:
            listed = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
            raise UserError(f"{path} {what} {len(names)} tensors: {listed}")
