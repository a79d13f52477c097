"""The command from end to end: files, keys, messages, and what it refuses."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from models import checkpoint
from models.finetune import main
from models.gpt2 import GPT2

ROOT = Path(__file__).parents[2]
FLAGS = ["--model", "tiny", "--steps", "12", "--batch-size", "4", "--block-size", "32"]
FLAGS += ["--eval-every", "6", "--policy", "threshold:40"]
SUMMARY = {"val_loss", "val_perplexity", "offloaded_flop_share", "tokens_per_second", "seconds"}
SUMMARY |= {"skipped_steps"}


@pytest.fixture(scope="module")
def run(text_folder, tmp_path_factory):
    """A whole run with --compare: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    command = [sys.executable, "-m", "models.finetune", *FLAGS, "--compare"]
    command += ["--data", f"{text_folder}/*.txt", "--out", str(folder)]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files(run):
    folder, _ = run
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "options.json"} <= names
    assert {"metrics.jsonl", "metrics-fp32.jsonl", "samples.jsonl", "summary.json"} <= names
    assert {"loss.png", "report.html", "state"} <= names
    assert "fp32, validation" in (folder / "report.html").read_text()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics-fp32.jsonl"])
def test_metrics(run, name):
    found = rows(run[0] / name)
    steps = [row for row in found if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 13))
    for row in steps:
        assert row.keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_second"}
    assert [row["step"] for row in found if "val_loss" in row] == [0, 6, 12]
    # Untrained, every token is as likely as another.
    assert found[0]["val_loss"] == pytest.approx(math.log(257), rel=0.05)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5


def test_summary(run):
    folder, _ = run
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY | {"fp32_val_loss", "fp32_val_perplexity"}
    assert summary["val_perplexity"] == pytest.approx(math.exp(summary["val_loss"]))
    assert summary["val_loss"] == rows(folder / "metrics.jsonl")[-1]["val_loss"]
    assert summary["val_perplexity"] == pytest.approx(summary["fp32_val_perplexity"], rel=5e-3)
    # Operands of two runs differ by rounding, so their losses are close but not the same.
    assert summary["val_loss"] != summary["fp32_val_loss"]
    assert summary["skipped_steps"] == 0
    # By hand: per token and layer 12·64² weights offloaded, attention (2·32·64) not; logits too.
    dense, attention = 2 * 12 * 64**2 + 320 * 64, 2 * 2 * 32 * 64
    assert summary["offloaded_flop_share"] == pytest.approx(dense / (dense + attention))


def test_output(run):
    folder, out = run
    assert "\x1b" not in out  # Plain lines, as this is no terminal.
    for text in (
        "step 12/12  loss",
        "ETA 0:00",
        "validation loss",
        "A sample:",
        "% of matmul FLOPs offloaded",
        "difference",
        *("pack A", "pack B", "run", "unpack", "everything else"),
        f"models.generate {folder}",
    ):
        assert text in out


def test_the_saved_model_has_the_loss_that_was_printed(run, text_folder):
    from models import data, tokenizer, train

    folder, _ = run
    config = checkpoint.load_config(folder)
    params = checkpoint.load_params(folder, config)
    corpus = data.build(data.find_files([str(text_folder)]), tokenizer.load(str(folder)))
    batches = data.validation_batches(corpus.validation, 32, 4, 16)
    evaluate = jax.jit(train.make_eval_step(GPT2(config)))
    total = sum(float(evaluate(params, b.tokens, b.weights)) for b in batches)
    loss = total / sum(b.weights.sum() for b in batches)
    summary = json.loads((folder / "summary.json").read_text())
    assert loss == pytest.approx(summary["val_loss"], rel=1e-3)


def test_a_finished_run_can_be_lengthened_and_started_from(
    run, text_folder, tmp_path, capsys, compile_once
):
    folder, _ = run
    more = ["--data", str(text_folder), "--init", str(folder), "--out", str(tmp_path / "more")]
    flags = ["--steps", "2", "--batch-size", "4", "--block-size", "32", "--lr", "1e-3"]
    assert main([*more, *flags]) == 0
    before = rows(folder / "metrics.jsonl")[-1]["val_loss"]
    after = rows(tmp_path / "more" / "metrics.jsonl")
    assert after[0]["val_loss"] == pytest.approx(before, rel=1e-3)

    assert main(["--resume", "--out", str(tmp_path / "more"), "--steps", "3"]) == 0
    steps = [row["step"] for row in rows(tmp_path / "more" / "metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3]

    assert main([*more[:-2], "--model", "small", "--out", str(tmp_path / "no"), *flags]) == 2
    message = "tensor h.0.attn.c_attn.bias has shape (192,); the model has (576,)"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--step", "5"], "unrecognized arguments: --step 5"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--lr", "nan"], "--lr is nan; it must be positive"),
        (["--lr", "0"], "--lr is 0.0; it must be positive"),
        (["--dropout", "1"], "--dropout is 1.0; it must be below 1"),
        (["--dropout", "nan"], "--dropout is nan"),
        (["--weight-decay", "-1"], "--weight-decay is -1.0; it must be at least 0"),
        (["--grad-accum", "0"], "--grad-accum is 0"),
        (["--total-batch", "5000"], "16 × 64 = 1024: use 4096 or 5120"),
        (["--total-batch", "9", "--batch-size", "8", "--block-size", "8"], "8 × 8 = 64: use 64"),
        (["--total-batch", "2048", "--grad-accum", "1"], "--grad-accum 1: give one of them"),
        (["--optimizer", "sgd"], "--optimizer is 'sgd'; it must be one of adamw, adafactor, lion"),
        (["--schedule", "wavy"], "--schedule is 'wavy'; it must be one of cosine, linear, const"),
        (["--betas", "0.9", "1"], "--betas is 0.9 1.0; both must be from 0 to below 1"),
        (["--betas", "0.9"], "--betas: expected 2 arguments"),
        (["--betas", "0", "0", "--optimizer", "adafactor"], "but --optimizer adafactor has none"),
        (["--min-lr", "0.1"], "--min-lr is 0.1; it must be at most --lr, which is 0.001"),
        (["--min-lr", "inf"], "--min-lr is inf; it must be finite"),
        (["--min-lr", "0", "--schedule", "constant"], "constant stays at --lr 0.001"),
        (["--clip", "-1"], "--clip is -1.0; it must be at least 0"),
        (["--model", "gpt5"], "--model is 'gpt5'; it must be one of tiny, small, gpt2"),
        (["--policy", "threshold:x"], "--policy is 'threshold:x'; it must be threshold"),
        (["--policy", "always:3"], "--policy is 'always:3'"),
        (["--device", "npu9"], "--device is 'npu9'; this machine has emulated"),
        (["--num-processes", "2"], "--process-id is missing: several machines need"),
        (["--process-id", "1"], "--num-processes is missing"),
        (["--num-processes", "2", "--process-id", "1"], "--coordinator is missing: HOST:PORT"),
        (["--coordinator", "here", "--num-processes", "2", "--process-id", "1"], "is 'here'; it"),
        (["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"], "it must be 0 … 1"),
        (["--num-processes", "0"], "--num-processes is 0; it must be at least 1"),
        (["--data", "nothing/*.txt"], "--data nothing/*.txt: no such file"),
        (["--init", "nowhere"], "--init: nowhere is not a folder"),
        (["--tokenizer", "nowhere"], "no tokenizer in nowhere"),
        (["--block-size", "129"], "--block-size is 129; this model's n_positions is 128"),
        (["--data", "SHORT"], "the training text has 1 tokens, too few to predict one: add text"),
        (["--out", "SHORT"], "exists and is not empty: continue that run with --resume"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_written(
    text_folder, tmp_path, monkeypatch, capsys, flags, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("ab")
    flags = ["short" if flag == "SHORT" else flag for flag in flags]
    base = ["--model", "tiny", "--data", str(text_folder), "--out", "new"]
    assert main([*base, *flags]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out
    assert err.startswith("models.finetune: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["short"]
    assert [path.name for path in (tmp_path / "short").iterdir()] == ["a.txt"]


def test_a_foreign_tokenizer_is_refused(run, tmp_path, capsys):
    import tokenizers

    folder, _ = run
    big = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<|endoftext|>": 0, "a": 1000}, unk_token="<|endoftext|>")
    )
    big.save(str(tmp_path / "tokenizer.json"))
    flags = ["--init", str(folder), "--tokenizer", str(tmp_path), "--out", str(tmp_path / "o")]
    assert main(flags) == 2
    err = capsys.readouterr().err
    assert "the tokenizer has 1001 ids, but the model" in err and "only 257" in err


def test_a_default_folder_is_always_new(text_folder, tmp_path, monkeypatch):
    from models.prepare import prepare

    monkeypatch.chdir(tmp_path)
    flags = ["--model", "tiny", "--data", str(text_folder)]
    first = prepare(flags).folder.path
    assert first == Path("runs") / f"tiny-{text_folder.stem}"
    first.mkdir(parents=True)
    assert prepare(flags).folder.path == first.with_name(first.name + "-2")


def test_progress_on_a_terminal(monkeypatch, capsys):
    from models import report

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    row = {"step": 3, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.71, "tokens_per_second": 4321.0}
    with report.Display(10) as display:
        display.show(row)
        display.show({"step": 3, "val_loss": float(np.log(8))})
    out = capsys.readouterr().out
    for text in ("3/10", "loss 2.500", "lr 1.0e-03", "grad-norm 0.71", "4,321 tok/s", "ETA"):
        assert text in out
    assert "validation loss 2.079  perplexity 8.00" in out
