"""Training over the devices of one process: no gathers, and the same weights on all."""

import re

import jax
import numpy as np
import pytest

import jax_xdna
from models import join, processes
from models.data import Corpus, Tokens, TrainBatches, validation_batches
from models.finetune import main
from models.gpt2 import GPT2, Config
from models.options import Options
from models.train import init_state, make_eval_step
from models.trainer import Trainer


@pytest.fixture
def four_devices(monkeypatch):
    monkeypatch.setattr(processes, "visible_devices", lambda: jax.devices()[:4])


def test_each_device_multiplies_its_rows(four_devices):
    config = Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    options = Options(batch_size=8, block_size=16, steps=2, dropout=0.1)
    tokens = Tokens(np.arange(400, dtype=np.int32) % 64)
    always = jax_xdna.Policy.always()
    trainer = Trainer(
        options,
        GPT2(config),
        Corpus(tokens, tokens, 1),
        lambda fn: jax_xdna.offload(fn, policy=always),
    )
    params = GPT2(config).init(jax.random.key(0), tokens.ids[None, :1])["params"]
    state = trainer.processes.replicate(init_state(params, trainer.optimizer))
    trainer.compile(state)
    text = trainer._step.as_text()
    assert "all-reduce" in text
    assert not re.search(r"all-gather|all-to-all", text)
    products = re.findall(r"= f32\[([\d,]+)\]\S* custom-call\(.*jax_xdna_gemm", text)
    rows = 2 * 16  # A quarter of the batch.
    assert f"{rows},96" in products and f"{4 * rows},96" not in products
    assert "32,96" in products  # dW is whole on each, summed afterwards.

    rows = []
    state = trainer.run(state, rows.append, lambda state: None, lambda: False).state
    for leaf in jax.tree.leaves(state):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(others) == 3
        for other in others:
            np.testing.assert_array_equal(other, first)
    # One device evaluates what four trained; its sums have another order.
    params = trainer.processes.local(state.params)
    evaluate = jax.jit(jax_xdna.offload(make_eval_step(GPT2(config)), policy=always))
    batches = validation_batches(tokens, 16, 8, 16)
    loss = sum(evaluate(params, b.tokens, b.weights) for b in batches)
    loss /= sum(b.weights.sum() for b in batches)
    assert rows[-1]["val_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]


def test_a_batch_that_does_not_divide(four_devices, text_folder, tmp_path, capsys):
    flags = ["--model", "tiny", "--data", str(text_folder), "--out", str(tmp_path / "new")]
    assert main([*flags, "--batch-size", "6"]) == 2
    message = "--batch-size is 6; it must be a multiple of the number of devices, 4"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_processes_read_parts_of_the_same_batch():
    tokens = Tokens(np.arange(200, dtype=np.int32))
    whole = TrainBatches(tokens, 4, (2, 6), seed=5)
    parts = [TrainBatches(tokens, 4, (2, 6), 5, slice(i, i + 3)) for i in (0, 3)]
    for step in (0, 7):
        joined = np.concatenate([part[step].tokens for part in parts], axis=1)
        np.testing.assert_array_equal(joined, whole[step].tokens)
        assert parts[0][step].weights.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("flags", "environment", "job"),
    [
        ({}, {}, (None, 1, 0)),
        ({}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (None, 1, 0)),
        ({}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (None, 1, 0)),  # sbatch without srun
        ({}, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, (None, 4, 2)),
        (
            {"coordinator": "a:1"},
            {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"},
            ("a:1", 3, 1),
        ),
        ({"num_processes": 1}, {"PMI_SIZE": "3", "PMI_RANK": "1"}, (None, 1, 0)),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 1},
            {"PMI_SIZE": "3", "PMI_RANK": "2"},
            ("a:1", 2, 1),
        ),
    ],
)
def test_flags_and_launchers_say_how_many(monkeypatch, flags, environment, job):
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert join._job(flags) == job
