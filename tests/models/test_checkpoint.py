"""Hugging Face folders in and out."""

import dataclasses
import json
import pickle
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models import checkpoint
from models.errors import UserError

WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path, config, params):
    checkpoint.save_config(tmp_path, config, end_token=100)
    checkpoint.save_params(tmp_path, config, params)
    return tmp_path


@pytest.fixture
def untied(config, params):
    """The model with a head of its own."""
    config = dataclasses.replace(config, tie_word_embeddings=False)
    head = jnp.flip(params["wte"]["embedding"], 1)
    return config, {**params, "lm_head": {"embedding": head}}


def read(folder):
    return safetensors.numpy.load_file(folder / checkpoint.WEIGHTS)


def edit(folder, change, metadata=None):
    """Writes the weights changed; a name whose value is None is dropped."""
    tensors = {name: t for name, t in change(read(folder)).items() if t is not None}
    safetensors.numpy.save_file(tensors, folder / checkpoint.WEIGHTS, metadata)


def edit_config(folder, **settings):
    path = folder / checkpoint.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_array_equal(a, b)


def refuses(folder, config, message):
    with pytest.raises(UserError, match=message):
        checkpoint.load_params(folder, config)


def test_round_trip(folder, config, params):
    assert checkpoint.load_config(folder) == config
    assert_same(checkpoint.load_params(folder, config), params)
    stored = read(folder)
    assert stored[WTE].shape == (config.vocab_size, config.n_embd)
    assert stored["transformer.h.1.attn.c_attn.weight"].shape == (32, 96)
    assert HEAD not in stored
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_no_prefix_mask_buffers_and_an_equal_head_are_accepted(folder, config, params):
    def change(tensors):
        bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        bare["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.uint8)
        bare["h.0.attn.masked_bias"] = np.asarray(-1e4, np.float32)
        return bare | {HEAD: tensors[WTE].copy()}

    edit(folder, change)
    assert_same(checkpoint.load_params(folder, config), params)
    edit(folder, lambda t: t | {WTE: t["wte.weight"]})
    refuses(folder, config, "tensor wte.weight both with and without transformer.")


@pytest.mark.parametrize("metadata", [None, {WTE: HEAD}])
def test_of_a_shared_tensor_the_head_may_be_the_one_that_is_kept(folder, config, params, metadata):
    edit(folder, lambda t: t | {HEAD: t[WTE], WTE: None}, metadata)
    assert_same(checkpoint.load_params(folder, config), params)


def test_a_head_may_be_an_alias(folder, config, params):
    edit(folder, lambda t: t, {HEAD: WTE, "format": "pt"})
    assert_same(checkpoint.load_params(folder, config), params)


def test_an_untied_head(folder, untied):
    config, params = untied
    checkpoint.save_config(folder, config, end_token=100)
    checkpoint.save_params(folder, config, params)
    assert checkpoint.load_config(folder) == config
    assert_same(checkpoint.load_params(folder, config), params)
    assert read(folder)[HEAD].shape == (config.vocab_size, config.n_embd)

    tied = dataclasses.replace(config, tie_word_embeddings=True)
    refuses(folder, tied, 'lm_head.weight differs from wte.weight.*"tie_word_embeddings": false')
    edit(folder, lambda t: t | {HEAD: None})
    refuses(folder, config, "lacks 1 tensors: lm_head.weight")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_become_fp32(folder, config, params, dtype):
    edit(folder, lambda tensors: {name: value.astype(dtype) for name, value in tensors.items()})
    wanted = jax.tree.map(lambda x: np.asarray(x, dtype).astype(np.float32), params)
    assert_same(checkpoint.load_params(folder, config), wanted)


def split(folder):
    """Replaces the weights by two shards and their index."""
    tensors = read(folder)
    (folder / checkpoint.WEIGHTS).unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path, index


def test_shards(folder, config, params):
    path, index = split(folder)
    assert_same(checkpoint.load_params(folder, config), params)
    index["weight_map"]["more"] = "a.safetensors"
    path.write_text(json.dumps(index))
    refuses(folder, config, "names 1 tensors no shard has: more")
    index["weight_map"]["more"] = "../a.safetensors"
    path.write_text(json.dumps(index))
    refuses(folder, config, "names the shard '../a.safetensors'; it must be a file beside it")
    (folder / "b.safetensors").unlink()
    index["weight_map"].pop("more")
    path.write_text(json.dumps(index))
    refuses(folder, config, "names 1 files that are not there: b.safetensors")
    path.write_text("[]")
    refuses(folder, config, "is not an index of shards")


class TestPickle:
    @pytest.fixture
    def path(self, folder):
        (folder / checkpoint.WEIGHTS).unlink()
        return folder / "pytorch_model.bin"

    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch", reason="pickles are read by torch")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("legacy", [False, True])
    def test_state_dict(self, torch, path, folder, config, params, dtype, legacy):
        checkpoint.save_params(folder, config, params)
        kind = getattr(torch, dtype)
        state = {name: torch.tensor(t).to(kind) for name, t in read(folder).items()}
        state[HEAD] = state[WTE]
        (folder / checkpoint.WEIGHTS).unlink()
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
        wanted = jax.tree.map(lambda x: np.asarray(x, dtype).astype(np.float32), params)
        assert_same(checkpoint.load_params(folder, config), wanted)

    def test_a_pickle_runs_nothing(self, torch, path, folder, config):
        class Attack:
            def __reduce__(self):
                return (path.with_name("owned").touch, ())

        path.write_bytes(pickle.dumps({"wte.weight": Attack()}, 2))
        refuses(folder, config, "pytorch_model.bin cannot be read safely")
        torch.save({"wte.weight": Attack()}, path)
        refuses(folder, config, "pytorch_model.bin cannot be read safely")
        assert not path.with_name("owned").exists()
        torch.save([1], path)
        refuses(folder, config, "is not a state dict")
        path.write_bytes(b"")
        refuses(folder, config, "pytorch_model.bin cannot be read safely")

    def test_without_torch_the_way_out_is_named(self, path, folder, config, monkeypatch):
        path.write_bytes(b"anything")
        monkeypatch.setitem(sys.modules, "torch", None)
        refuses(folder, config, r"needs torch: install it, or convert .*save_pretrained\('")


def test_errors_name_the_tensor_and_both_shapes(folder, config):
    name = "transformer.h.1.mlp.c_fc.weight"
    whole = read(folder)
    for change, message in (
        ({name: np.zeros((32, 64), np.float32)}, r"h.1.mlp.c_fc.weight has shape \(32, 64\); the "
            r"model has \(32, 128\)$"),
        ({name: whole[name].T.copy()}, r"has shape \(128, 32\); .* \(32, 128\): it is transposed"),
        ({WTE: np.zeros((128, 32), np.float32)}, r"tensor wte.weight has shape \(128, 32\); the "
            r"model has \(101, 32\): config.json gives a vocab_size of 101, the file has 128"),
        ({HEAD: np.zeros((128, 32), np.float32)}, r"tensor lm_head.weight has shape \(128, 32\)"),
        ({name: np.zeros((32, 128), np.int8)}, "h.1.mlp.c_fc.weight is I8; only float32"),
        ({"transformer.ln_f.bias": None}, "lacks 1 tensors: ln_f.bias"),
        ({"score.weight": np.ones(2)}, "has unknown 1 tensors: score.weight"),
    ):  # fmt: skip
        edit(folder, lambda t, change=change: whole | change)
        refuses(folder, config, message)
    content = (folder / checkpoint.WEIGHTS).read_bytes()
    for torn in (content[: len(content) // 2], b"no tensors"):
        (folder / checkpoint.WEIGHTS).write_bytes(torn)
        refuses(folder, config, "model.safetensors cannot be read")
    (folder / checkpoint.WEIGHTS).unlink()
    refuses(folder, config, "no weights in .*model.safetensors.index.json, or pytorch_model.bin")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama"}, 'model_type is "llama"; only "gpt2" is supported'),
        ({"activation_function": "mish"}, "activation_function is 'mish'; it must be one of gelu"),
        ({"add_cross_attention": True}, "add_cross_attention is true; only false is supported"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}; only null'),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map is"),
        ({"n_ctx": 32}, "n_ctx is 32 and n_positions 48; they must be equal"),
        ({"n_embd": "32"}, "n_embd is '32'; it must be a positive integer"),
        ({"n_layer": 0}, "n_layer is 0; it must be a positive integer"),
        ({"n_inner": -1}, "n_inner is -1; it must be a positive integer"),
        ({"n_head": 5}, "n_embd is 32; it must be a multiple of n_head 5"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon is '1e-5'; it must be a positive"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
    ],
)
def test_what_the_model_does_not_compute_is_refused_by_name(folder, settings, message):
    edit_config(folder, **settings)
    with pytest.raises(UserError, match=message):
        checkpoint.load_config(folder)


def test_config_files(folder, config):
    path = folder / checkpoint.CONFIG
    path.write_text(
        '{"vocab_size": 101, "max_position_embeddings": 48, "n_ctx": 48, "hidden_size": 32, '
        '"num_hidden_layers": 2, "num_attention_heads": 4}'
    )
    assert checkpoint.load_config(folder) == config
    for text, message in (("{", "is not JSON"), ("[]", "holds a list; it must be an object")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            checkpoint.load_config(folder)
    path.unlink()
    with pytest.raises(UserError, match="a model needs config.json and model.safetensors"):
        checkpoint.load_config(folder)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoint.write_atomically(path, b"old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
