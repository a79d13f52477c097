"""Models in and out of Hugging Face folders: config.json and the weights."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from . import weights
from .errors import UserError
from .gpt2 import GPT2, Config

WEIGHTS = weights.SAFETENSORS
CONFIG = "config.json"
_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_EMBEDDING = "wte.weight"
# Their rows are tokens.
_TABLES = (_EMBEDDING, _HEAD)
# Causal masks that older exports store as if they were parameters.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
# Settings of models that `GPT2` does not compute, with the values that leave it as it is.
# (Where attention is computed in a higher precision does not matter: all of it is fp32.)
_REQUIRED = {
    "model_type": ("gpt2",),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "auto_map": (None,),
}
# Other names for the same sizes.
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_SETTINGS = {f.name: f.type for f in dataclasses.fields(Config) if f.name != "dropout"}


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file at once: a reader, also after a crash, sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # On a full disk what is left would be in the way.
        raise


def save_params(folder: Path, config: Config, params: Mapping[str, Any]) -> None:
    """Writes model.safetensors as `transformers` does: vocabulary unpadded, a tied head absent."""
    tensors = {}
    for path, value in flatten_dict(params).items():
        name, value = _hf_name(path), np.asarray(value)
        if name in _TABLES:
            value = value[: config.vocab_size]
        # Readers strip the prefix or add it, but not when a head is there without it.
        tensors[name if name == _HEAD else _PREFIX + name] = np.ascontiguousarray(value)
    content = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    write_atomically(folder / WEIGHTS, content)


def save_config(folder: Path, config: Config, end_token: int) -> None:
    """Writes config.json as `transformers` reads it."""
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: getattr(config, name) for name in _SETTINGS},
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "torch_dtype": "float32",
    }
    write_atomically(folder / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


def load_config(folder: Path) -> Config:
    """What a folder's config.json says of the model; dropout is off.

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
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds a {type(settings).__name__}; it must be an object")
    for name, allowed in _REQUIRED.items():
        if settings.get(name, allowed[0]) not in allowed:
            got, wanted = json.dumps(settings[name]), json.dumps(allowed[0])
            raise UserError(f"{path}: {name} is {got}; only {wanted} is supported")
    for alias, name in _ALIASES.items():
        if alias in settings:
            settings.setdefault(name, settings[alias])
    for name, kind in _SETTINGS.items():
        value = settings.get(name)
        if kind == "bool" and name in settings and not isinstance(value, bool):
            raise UserError(f"{path}: {name} is {value!r}; it must be true or false")
        if kind == "float" and name in settings and not (type(value) in (int, float) and value > 0):
            raise UserError(f"{path}: {name} is {value!r}; it must be a positive number")
    try:
        config = Config(**{name: settings[name] for name in _SETTINGS if name in settings})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    if settings.get("n_ctx") not in (None, config.n_positions):
        raise UserError(
            f"{path}: n_ctx is {settings['n_ctx']} and n_positions {config.n_positions}; "
            "they must be equal"
        )
    return config


def load_params(folder: Path, config: Config) -> dict[str, Any]:
    """A folder's weights as fp32 parameters of `GPT2(config)`, the vocabulary padded.

    Names with and without the `transformer.` prefix are read, and fp32, fp16, bf16 and fp64. A
    tied head may be absent, another name for the token embedding or the other way round, or equal.

    Raises:
      UserError: no such file; a tensor that is missing, unknown, quantized or of another shape; a
        head that differs although config.json ties it.
    """
    path, tensors = weights.find(folder)
    stored: dict[str, weights.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_BUFFERS):
            continue
        short = name.removeprefix(_PREFIX)
        if short in stored:
            raise UserError(f"{path} has the tensor {short} both with and without {_PREFIX}")
        stored[short] = tensor
    head = stored.pop(_HEAD, None) if config.tie_word_embeddings else None
    if head and _EMBEDDING not in stored:
        stored[_EMBEDDING] = head
    wanted = {_hf_name(key): (key, leaf.shape) for key, leaf in abstract_params(config).items()}
    for name in _TABLES:
        if name in wanted:
            wanted[name] = (wanted[name][0], (config.vocab_size, config.n_embd))
    _same_names(path, set(stored), set(wanted))
    for name, (_, shape) in wanted.items():
        _same_shape(path, name, stored[name].shape, shape)
    params = {key: stored[name].load(name) for name, (key, _) in wanted.items()}
    if head:
        _same_shape(path, _HEAD, head.shape, stored[_EMBEDDING].shape)
        if not np.array_equal(head.load(_HEAD), params["wte", "embedding"], equal_nan=True):
            raise UserError(
                f"{path}: {_HEAD} differs from {_EMBEDDING}, but {CONFIG} ties them: a separate "
                'head needs "tie_word_embeddings": false there'
            )
    padding = config.padded_vocab_size - config.vocab_size
    for name in _TABLES:
        if name in wanted:
            key = wanted[name][0]
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


def _same_shape(path: Path, name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if got == wanted:
        return
    hint = ""
    if name in _TABLES and got[1:] == wanted[1:]:
        hint = f": {CONFIG} gives a vocab_size of {wanted[0]}, the file has {got[0]} tokens"
    elif got == wanted[::-1]:
        hint = ": it is transposed; GPT-2's kernels are (in, out)"
    raise UserError(f"{path}: tensor {name} has shape {got}; the model has {wanted}{hint}")


def _same_names(path: Path, stored: set[str], wanted: set[str]) -> None:
    for what, names in (("lacks", wanted - stored), ("has unknown", stored - wanted)):
        if names:
            listed = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
            raise UserError(f"{path} {what} {len(names)} tensors: {listed}")
