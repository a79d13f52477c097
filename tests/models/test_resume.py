"""N steps equal k steps, an interruption and N − k steps, bit for bit."""

import json
import os
import signal

import jax
import numpy as np
import pytest
import safetensors.numpy

from models import rundir, trainer
from models.finetune import main

STEPS = 6
# Small, with everything that has state: dropout, accumulation, several epochs of the data.
FLAGS = ["--model", "tiny", "--steps", str(STEPS), "--batch-size", "16", "--block-size", "32"]
FLAGS += ["--total-batch", "1536", "--dropout", "0.1", "--save-every", "3", "--eval-every", "2"]
FLAGS += ["--policy", "threshold:24"]


@pytest.fixture(scope="module")
def flags(text_folder):
    return [*FLAGS, "--data", str(text_folder)]


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory, compile_once):
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    assert main([*flags, "--out", str(folder)]) == 0
    return folder


def log(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("tokens_per_second", None)
    return rows


def state(folder):
    run = rundir.RunDir(folder)
    manager = run._checkpoints()
    tree = manager.restore(STEPS)["state"]
    run.close()
    return tree


def assert_same_run(folder, straight):
    assert log(folder) == log(straight)
    a, b = (safetensors.numpy.load_file(f / "model.safetensors") for f in (folder, straight))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, state(folder), state(straight))


class Killed(BaseException):
    """Stands for the end of the process."""


def test_the_log_has_every_row_once(straight):
    steps = [row["step"] for row in log(straight) if "loss" in row]
    evaluations = [row["step"] for row in log(straight) if "val_loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert evaluations == [0, 2, 4, 6]


@pytest.mark.parametrize("killed_at", [2, 5])
def test_killed(flags, straight, tmp_path, monkeypatch, killed_at):
    """Before anything was saved, and after more steps than were saved."""
    folder = tmp_path / "run"
    append = rundir.RunDir.append_metrics

    def append_or_die(self, row, *args):
        append(self, row, *args)
        if row["step"] == killed_at and "loss" in row:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write('{"step": 99, "lo')  # A torn line.
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rundir.RunDir, "append_metrics", append_or_die)
        with pytest.raises(Killed):
            main([*flags, "--out", str(folder)])
    assert main(["--resume", "--out", str(folder)]) == 0
    assert_same_run(folder, straight)


def test_interrupted(flags, straight, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    append = rundir.RunDir.append_metrics

    def append_and_interrupt(self, row, *args):
        append(self, row, *args)
        if row["step"] == 4 and "loss" in row:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(rundir.RunDir, "append_metrics", append_and_interrupt)
        assert main([*flags, "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "stopped at step 4 of 6" in out
    assert f"--out {folder} --resume" in out
    assert not (folder / "summary.json").exists()
    assert (folder / "model.safetensors").exists()
    assert main(["--resume", "--out", str(folder)]) == 0
    assert_same_run(folder, straight)


def test_a_contradiction_is_refused(straight, tmp_path, capsys):
    before = (straight / "metrics.jsonl").read_bytes()
    flags = ["--resume", "--out", str(straight)]
    assert main([*flags, "--betas", "0.9", "0.99"]) == 2
    assert "--betas is 0.9 0.99, but the run was started with not" in capsys.readouterr().err
    assert main([*flags, "--seed", "5"]) == 2
    assert "--seed is 5, but the run was started with 1" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_text("something else " * 200)
    assert main([*flags, "--data", str(other)]) == 2
    assert "the data changed since" in capsys.readouterr().err
    assert main(["--resume", "--out", str(tmp_path)]) == 2
    assert "is not a run's folder" in capsys.readouterr().err
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_training_gives_up_when_nothing_is_finite(flags, straight, tmp_path, monkeypatch, capsys):
    batch_of = trainer.TrainBatches.__getitem__

    def poisoned(self, step):
        batch = batch_of(self, step)
        return type(batch)(batch.tokens, batch.weights * np.float32("nan"))

    monkeypatch.setattr(trainer.TrainBatches, "__getitem__", poisoned)
    monkeypatch.setattr(trainer, "GIVE_UP_AFTER", 3)
    assert main([*flags, "--out", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert "the last 3 steps up to 3 were not finite" in err
    assert "step 1: not finite, skipped" in out
    assert [row["loss"] for row in log(tmp_path / "run") if "loss" in row] == [None] * 3
