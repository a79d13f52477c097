"""Low-rank adapters: what they compute, what is trained and kept, and the folder they end in."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

import jax_xdna
from models import checkpoint, generate, lora, optimizers, rundir, tokenizer, train
from models.finetune import main
from models.gpt2 import GPT2

STEPS = 6
FLAGS = ["--lora", "4", "--steps", str(STEPS), "--batch-size", "8", "--block-size", "32"]
FLAGS += ["--grad-accum", "2", "--dropout", "0.1", "--save-every", "3", "--eval-every", "3"]
FLAGS += ["--lora-targets", "attn.c_attn", "mlp.c_proj", "--policy", "threshold:24"]
FLAGS += ["--sample-tokens", "0", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def adapters(config, params):
    """Adapters of every kernel that change something."""
    made = lora.init(params, 3, lora.TARGETS, seed=0)
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32), made)


@pytest.fixture(scope="module")
def base(text_folder, tmp_path_factory, compile_once):
    """The folder of a small trained model."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    flags = ["--model", "tiny", "--steps", "20", "--batch-size", "8", "--block-size", "32"]
    flags += ["--data", str(text_folder), "--out", str(folder), "--sample-tokens", "0"]
    assert main([*flags, "--policy", "never"]) == 0
    return folder


@pytest.fixture(scope="module")
def flags(text_folder, base):
    return [*FLAGS, "--data", str(text_folder), "--init", str(base)]


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("lora-runs") / "straight"
    assert main([*flags, "--out", str(folder)]) == 0
    return folder


def state(folder):
    run = rundir.RunDir(folder)
    tree = run._checkpoints().restore(STEPS)["state"]
    run.close()
    return tree


def test_new_adapters_change_nothing(config, params, tokens):
    new = lora.init(params, 3, lora.TARGETS, seed=0)
    both = {"params": {"base": params, "adapters": new}}
    adapted = lora.Adapted(GPT2(config), 2.0)
    plain = GPT2(config).apply({"params": params}, tokens)
    np.testing.assert_array_equal(adapted.apply(both, tokens), plain)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(new))


def test_merged_weights_compute_what_adapters_do(config, params, adapters, tokens):
    both = {"params": {"base": params, "adapters": adapters}}
    got = lora.Adapted(GPT2(config), 0.5).apply(both, tokens)
    merged = lora.merge(params, adapters, 0.5)
    # By hand, for one kernel.
    name, small = ("h", "1", "mlp", "c_fc"), flatten_dict(adapters)
    product = np.float64(small[*name, "a"]) @ np.float64(small[*name, "b"])
    wanted = np.float64(params["h"]["1"]["mlp"]["c_fc"]["kernel"]) + 0.5 * product
    np.testing.assert_allclose(merged["h"]["1"]["mlp"]["c_fc"]["kernel"], wanted, atol=1e-6)
    np.testing.assert_allclose(got, GPT2(config).apply({"params": merged}, tokens), atol=2e-3)
    assert np.abs(got - GPT2(config).apply({"params": params}, tokens)).max() > 0.1


def test_gradients_are_those_of_the_merged_kernels(config, params, adapters, tokens):
    weights = np.ones((len(tokens), tokens.shape[1] - 1), np.float32)
    model = GPT2(config)

    def by_merging(adapters):
        return train.loss_sum(model, lora.merge(params, adapters, 0.5), tokens, weights, None)

    def adapted(adapters):
        other = lora.Adapted(model, 0.5)
        return train.loss_sum(other, adapters, tokens, weights, None, params)

    got, wanted = jax.grad(adapted)(adapters), jax.grad(by_merging)(adapters)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * np.abs(b).max())


def test_only_adapters_have_gradients_and_moments(config, params, adapters, tokens):
    tx = optimizers.optimizer(1e-2)
    state = train.init_state(adapters, tx)
    small = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * small

    batch = tokens[None], np.ones((1, len(tokens), tokens.shape[1] - 1), np.float32)
    step = train.make_train_step(lora.Adapted(GPT2(config), 2.0), tx, lambda step: 1e-2, 0)
    rows = jax_xdna.explain(
        step, state, *batch, params, policy=jax_xdna.Policy.always(), print=False
    )
    # Forward and dX of each base kernel go to the device; dW, (in, rows, out), is not computed.
    rows_of = lambda m, k, n: [r for r in rows if (r.m, r.k, r.n) == (m, k, n)]  # noqa: E731
    count = len(tokens) * (tokens.shape[1] - 1)
    assert all(row.offloaded for row in rows_of(count, 32, 128)) and rows_of(count, 32, 128)
    assert not rows_of(32, count, 96) and not rows_of(96, count, 32)


def test_resume_is_exact(flags, straight, tmp_path, monkeypatch):
    folder, append = tmp_path / "run", rundir.RunDir.append_metrics

    class Killed(BaseException):
        """Stands for the end of the process."""

    def append_or_die(self, row, *args):
        append(self, row, *args)
        if row["step"] == 5 and "loss" in row:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rundir.RunDir, "append_metrics", append_or_die)
        with pytest.raises(Killed):
            main([*flags, "--out", str(folder)])
    assert main(["--resume", "--out", str(folder)]) == 0
    jax.tree.map(np.testing.assert_array_equal, state(folder), state(straight))
    a, b = (safetensors.numpy.load_file(f / "model.safetensors") for f in (folder, straight))
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_checkpoints_hold_adapters_and_the_export_merges_them(straight, base, capsys):
    saved = flatten_dict(state(straight)["params"])
    assert {path[-2:] for path in saved} == {
        ("c_attn", "a"), ("c_attn", "b"), ("c_proj", "a"), ("c_proj", "b")
    }  # fmt: skip
    assert all(value.dtype == np.float32 for value in saved.values())
    config = checkpoint.load_config(straight)
    before, after = (
        flatten_dict(checkpoint.load_params(folder, config)) for folder in (base, straight)
    )
    for path, value in after.items():
        wanted = before[path]
        if (*path[:-1], "a") in saved and path[-1] == "kernel":
            wanted = wanted + 2 * (saved[*path[:-1], "a"] @ saved[*path[:-1], "b"])
            assert np.abs(value - before[path]).max() > 1e-4
        np.testing.assert_allclose(value, wanted, atol=1e-6)
    assert generate.main([str(straight), "--prompt", "the ", "--max-tokens", "5"]) == 0
    capsys.readouterr()
    assert tokenizer.load(str(straight)).vocab_size == config.vocab_size


def test_the_loss_falls_and_the_counts_are_printed(flags, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main([*flags, "--out", str(folder), "--lora-alpha", "12", "--steps", "30"]) == 0
    # Per block: (64 + 192) · 4 of c_attn and (256 + 64) · 4 of mlp.c_proj.
    count = 2 * 4 * (64 + 192 + 256 + 64)
    out = capsys.readouterr().out
    assert f"rank 4, alpha 12 on attn.c_attn, mlp.c_proj: {count:,} trainable parameters" in out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert losses[-1] < losses[0] - 0.02


def test_transformers_has_the_same_logits(straight, tokens):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.GPT2LMHeadModel.from_pretrained(straight).eval()
    config = checkpoint.load_config(straight)
    ids = tokens[:, :24]
    with torch.no_grad():
        wanted = model(torch.tensor(ids.astype(np.int64))).logits.numpy()
    params = checkpoint.load_params(straight, config)
    got = GPT2(config).apply({"params": params}, ids)[..., : config.vocab_size]
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_another_base_is_refused(flags, straight, base, tmp_path, capsys):
    """The checkpoints have no base: a resumed run must find the one it began with."""
    folder, weights = tmp_path / "run", base / "model.safetensors"
    shutil.copytree(straight, folder)
    kept = weights.read_bytes()
    tensors = safetensors.numpy.load(kept)
    tensors["transformer.ln_f.bias"] += np.float32(1)
    try:
        weights.write_bytes(safetensors.numpy.save(tensors))
        assert main(["--resume", "--out", str(folder), "--steps", "8"]) == 2
    finally:
        weights.write_bytes(kept)
    assert "--resume: the base changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lora", "0"], "--lora is 0; it must be at least 1"),
        (["--lora", "65"], "--lora is 65; it must be at most 64, as the kernel h.0.attn.c_attn"),
        (["--lora", "4", "--lora-alpha", "0"], "--lora-alpha is 0.0; it must be positive"),
        (
            ["--lora", "4", "--lora-targets", "wte"],
            "--lora-targets is 'wte'; it must be one of att",
        ),
        (["--lora-alpha", "4"], "--lora-alpha is 4.0, but there is no --lora RANK"),
        (["--lora-targets", "mlp.c_fc"], "--lora-targets is mlp.c_fc, but there is no --lora RANK"),
    ],
)
def test_bad_flags(base, text_folder, tmp_path, capsys, more, message):
    flags = ["--data", str(text_folder), "--init", str(base), "--out", str(tmp_path / "new")]
    assert main([*flags, *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_new_model_has_nothing_to_adapt(text_folder, tmp_path, capsys):
    flags = ["--data", str(text_folder), "--out", str(tmp_path / "new"), "--lora", "4"]
    assert main([*flags, "--model", "tiny"]) == 2
    assert "without --init there is no trained model to adapt" in capsys.readouterr().err
