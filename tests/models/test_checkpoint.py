"""Hugging Face folders in and out."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models import checkpoint
from models.errors import UserError


@pytest.fixture
def folder(tmp_path, config, params):
    checkpoint.save_config(tmp_path, config, end_token=100)
    checkpoint.save_params(tmp_path, config, params)
    return tmp_path


def edit(folder, change):
    path = folder / checkpoint.WEIGHTS
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)


def edit_config(folder, **settings):
    path = folder / checkpoint.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_array_equal(a, b)


def test_round_trip(folder, config, params):
    assert checkpoint.load_config(folder) == config
    assert_same(checkpoint.load_params(folder, config), params)
    stored = safetensors.numpy.load_file(folder / checkpoint.WEIGHTS)
    assert stored["wte.weight"].shape == (config.vocab_size, config.n_embd)
    assert stored["h.1.attn.c_attn.weight"].shape == (config.n_embd, 3 * config.n_embd)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_prefix_mask_buffers_and_a_tied_head_are_accepted(folder, config, params):
    def change(tensors):
        buffers = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8)}
        buffers["h.0.attn.masked_bias"] = np.asarray(-1e4, np.float32)
        renamed = {f"transformer.{name}": value for name, value in (tensors | buffers).items()}
        return renamed | {"lm_head.weight": tensors["wte.weight"].copy()}

    edit(folder, change)
    assert_same(checkpoint.load_params(folder, config), params)


def test_an_untied_head_is_refused(folder, config):
    edit(folder, lambda tensors: tensors | {"lm_head.weight": tensors["wte.weight"] + 1})
    with pytest.raises(UserError, match="lm_head.weight differs from wte.weight"):
        checkpoint.load_params(folder, config)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_becomes_fp32(folder, config, params, dtype):
    edit(folder, lambda tensors: {name: value.astype(dtype) for name, value in tensors.items()})
    wanted = jax.tree.map(lambda x: np.asarray(x, dtype).astype(np.float32), params)
    assert_same(checkpoint.load_params(folder, config), wanted)


def test_errors_name_the_tensor_and_the_setting(folder, config):
    def cut(tensors):
        return tensors | {"h.1.mlp.c_fc.weight": np.zeros((32, 64), np.float32)}

    edit(folder, cut)
    message = r"tensor h.1.mlp.c_fc.weight has shape \(32, 64\); the model has \(32, 128\)"
    with pytest.raises(UserError, match=message):
        checkpoint.load_params(folder, config)
    whole = {"h.1.mlp.c_fc.weight": np.zeros((32, 128), np.float32)}
    edit(folder, lambda t: {n: v for n, v in (t | whole).items() if n != "ln_f.bias"})
    with pytest.raises(UserError, match="lacks 1 tensors: ln_f.bias"):
        checkpoint.load_params(folder, config)
    edit(folder, lambda t: t | {"ln_f.bias": np.zeros(32, np.float32), "score.weight": np.ones(2)})
    with pytest.raises(UserError, match="has unknown 1 tensors: score.weight"):
        checkpoint.load_params(folder, config)

    edit_config(folder, activation_function="relu")
    with pytest.raises(UserError, match="activation_function is 'relu'; only 'gelu_new'"):
        checkpoint.load_config(folder)
    edit_config(folder, activation_function="gelu_new", n_inner=100)
    with pytest.raises(UserError, match="n_inner is 100"):
        checkpoint.load_config(folder)
    (folder / checkpoint.CONFIG).write_text("{")
    with pytest.raises(UserError, match="config.json is not JSON"):
        checkpoint.load_config(folder)
    (folder / checkpoint.WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(UserError, match="model.safetensors cannot be read"):
        checkpoint.load_params(folder, config)
    (folder / checkpoint.WEIGHTS).unlink()
    with pytest.raises(UserError, match="a model needs config.json and model.safetensors"):
        checkpoint.load_params(folder, config)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoint.write_atomically(path, b"old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
