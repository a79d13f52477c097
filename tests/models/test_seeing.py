"""What a run leaves to look at: samples, TensorBoard's events, the report, also after a stop."""

import importlib.util
import json
import re
import struct

import pytest

from models import energy, seeing
from models.finetune import main
from models.trainer import Trainer

FLAGS = ["--model", "tiny", "--batch-size", "4", "--block-size", "32", "--policy", "threshold:40"]
FLAGS += ["--eval-every", "2", "--save-every", "2", "--sample-tokens", "5", "--tensorboard"]


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder):
    """What TensorBoard keeps: (tag, step) → value, without what a later start replaced."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    kept = {}
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.session_log.status == SessionLog.START:
                kept = {key: value for key, value in kept.items() if key[1] < event.step}
            for value in event.summary.value:
                text = b"".join(value.tensor.string_val).decode()
                assert (value.tag, event.step) not in kept
                kept[value.tag, event.step] = text or value.simple_value
    return kept


@pytest.fixture(scope="module")
def resumed(text_folder, tmp_path_factory):
    """A run whose third step is lost and made again: it stops as if it was killed after it."""
    folder = tmp_path_factory.mktemp("seeing") / "run"
    step, made = Trainer.step, []

    def failing(trainer, state, index):
        if index == 3 and len(made) == 3:
            raise KeyboardInterrupt
        made.append(index)
        return step(trainer, state, index)

    run = [*FLAGS, "--data", str(text_folder), "--steps", "4", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", failing)
        assert main(run) == 130
    assert [row["step"] for row in json_lines(folder / "metrics.jsonl")][-1] == 3
    assert main(["--resume", "--out", str(folder)]) == 0
    return folder


def test_a_sample_at_every_evaluation(resumed):
    samples = json_lines(resumed / "samples.jsonl")
    assert [row["step"] for row in samples] == [0, 2, 4]
    assert len({row["text"] for row in samples}) > 1


def test_tensorboard_has_the_log_once(resumed):
    kept = events(resumed / "tensorboard")
    names = {"loss": "loss/training", "val_loss": "loss/validation", "lr": "learning_rate"}
    names |= {"grad_norm": "gradient_norm", "tokens_per_second": "tokens_per_second"}
    wanted = {}
    for row in json_lines(resumed / "metrics.jsonl"):
        for name, tag in names.items():
            if name in row:
                wanted[tag, row["step"]] = pytest.approx(row[name], rel=1e-6)
    scalars = {key: value for key, value in kept.items() if not isinstance(value, str)}
    assert scalars == wanted
    texts = {step: text.strip() for (_, step), text in kept.items() if (_, step) not in scalars}
    samples = json_lines(resumed / "samples.jsonl")
    assert texts == {
        row["step"]: "\n".join("    " + line for line in row["text"].split("\n")).strip()
        for row in samples
    }


def test_the_report_of_a_finished_run(resumed):
    text = (resumed / "report.html").read_text()
    assert "step 4 of 4, finished" in text
    summary = json.loads((resumed / "summary.json").read_text())
    assert f"{summary['val_loss']:.4f}" in text
    assert len(re.findall("<details", text)) == 3
    assert "ran on emulated" in text and "gpt2.py:" in text


def test_a_stopped_run_has_a_report_and_measured_energy(text_folder, tmp_path, monkeypatch):
    counter = tmp_path / "rapl" / "intel-rapl:0"
    counter.mkdir(parents=True)
    for name, value in (("name", "package-0"), ("max_energy_range_uj", 10**12), ("energy_uj", 0)):
        (counter / name).write_text(str(value))
    monkeypatch.setattr(seeing, "Meter", lambda: energy.Meter(tmp_path / "rapl"))
    step = Trainer.step

    def costly(trainer, state, index):
        (counter / "energy_uj").write_text(str((index + 1) * 3_000_000))
        if index == 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, state, index)

    monkeypatch.setattr(Trainer, "step", costly)
    folder = tmp_path / "run"
    flags = [*FLAGS[:-1], "--data", str(text_folder), "--steps", "9", "--out", str(folder)]
    assert main(flags) == 0
    text = (folder / "report.html").read_text()
    assert "step 2 of 9, stopped; --resume continues" in text
    assert "training: 6 J (package-0 6)" in text
    assert "23.4 J per 1000 tokens" in text  # 6 J for 2 steps of 4 × 32 tokens
    assert not (folder / "tensorboard").exists()


def test_no_samples(text_folder, tmp_path, capsys):
    flags = [*FLAGS[:-3], "--sample-tokens", "0", "--steps", "1", "--data", str(text_folder)]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "samples.jsonl").read_text()
    assert "A sample" not in capsys.readouterr().out


def test_tensorboard_without_its_package(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find(name)
    )
    assert main(["--tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert 'pip install "jax-xdna[tensorboard]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
