"""Two processes of two devices on loopback run the commands of docs/several-machines.md."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models import follow
from models.errors import UserError
from models.finetune import main
from models.prepare import prepare
from models.processes import Processes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "several-machines.md").read_text()
FLAGS = ["--model", "tiny", "--steps", "6", "--batch-size", "8", "--block-size", "32"]
FLAGS += ["--grad-accum", "2", "--dropout", "0.1", "--eval-every", "2", "--save-every", "3"]
FLAGS += ["--policy", "threshold:24"]
# A machine that stands still for a while is not a lost one.
PATIENT = ["--peer-timeout", "600"]
BOUND = 5  # seconds

# Runs the command after sending this process a signal where it reads batch number `at`.
DISTURBED = """
import os, signal, sys
from models import data, finetune
read = data.TrainBatches.__getitem__
def disturbed(self, step):
    if step == {at}:
        os.kill(os.getpid(), signal.{name})
    return read(self, step)
data.TrainBatches.__getitem__ = disturbed
sys.exit(finetune.main(sys.argv[1:]))
"""


def commands(resume):
    """Flags of the page's two commands that begin a run, or that continue one."""
    lines = re.findall(r"^    python -m models\.finetune (.*--process-id \d)$", PAGE, re.MULTILINE)
    found = [shlex.split(line) for line in lines if ("--resume" in line) == resume]
    assert [flags[-1] for flags in found] == ["0", "1"]
    return found


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Pair:
    """Both processes, started in a folder with notes/, the second one perhaps disturbed."""

    def __init__(self, folder, *extra, resume=False, disturb=None):
        port, self.outputs, self.processes = free_port(), [], []
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            # Compiling takes most of the time.
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
            "--xla_backend_optimization_level=0",
        }
        for i, flags in enumerate(commands(resume)):
            flags = [f"127.0.0.1:{port}" if f.startswith("192.") else f for f in flags]
            program = ["-m", "models.finetune"]
            if disturb and i == 1:
                program = ["-c", DISTURBED.format(**disturb)]
            self.outputs.append(open(folder / f"out-{i}", "w+"))  # noqa: SIM115
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *program, *flags, *extra],
                    cwd=folder,
                    env=env,
                    stdout=self.outputs[-1],
                    stderr=subprocess.STDOUT,
                )
            )

    def wait(self, timeout=280):
        """(exit codes, outputs)."""
        try:
            codes = [process.wait(timeout) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        texts = []
        for file in self.outputs:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return codes, texts


def log(folder):
    rows = (folder / "runs" / "notes" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(row).items() if k != "tokens_per_second"} for row in rows]


@pytest.fixture(scope="module")
def begin(text_folder, tmp_path_factory):
    """Makes a folder as the page supposes it."""
    base = tmp_path_factory.mktemp("several")

    def make(name):
        (base / name).mkdir()
        shutil.copytree(text_folder, base / name / "notes")
        return base / name

    return make


@pytest.fixture(scope="module")
def straight(begin):
    """Folder and outputs of an unbroken run."""
    folder = begin("straight")
    codes, texts = Pair(folder, *FLAGS, *PATIENT).wait()
    assert codes == [0, 0], texts
    return folder, texts


def test_what_each_prints_and_writes(straight):
    folder, (leader, follower) = straight
    assert "; on 4 devices of 2 processes" in leader
    assert "step 6/6  loss" in leader and "A sample:" in leader
    ours = [line for line in follower.splitlines() if not line.startswith("[Gloo]")]
    assert ours == [
        "process 1 of 2 trains along from step 0; process 0 shows, samples and saves",
        "process 1: stopped at step 6 of 6",
    ]
    names = {path.name for path in (folder / "runs" / "notes").iterdir()}
    assert {"model.safetensors", "metrics.jsonl", "summary.json", "loss.png", "state"} <= names


def close(one, two):
    """Sums over devices have another order: fp32 losses agree to some rounding errors."""
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        a, b = dict(a), dict(b)
        assert a.pop("grad_norm", 0) == pytest.approx(b.pop("grad_norm", 0), rel=1e-3)
        assert a == pytest.approx(b, rel=5e-5)


def test_the_losses_of_one_process(straight, text_folder, tmp_path, compile_once):
    out = tmp_path / "runs" / "notes"
    assert main([*FLAGS, "--data", str(text_folder), "--out", str(out)]) == 0
    close(log(tmp_path), log(straight[0]))


def test_a_lost_process_and_an_interrupted_one(straight, begin, monkeypatch, compile_once):
    """Killed after step 4, continued from step 3, interrupted in step 5, ended by one alone."""
    folder = begin("broken")
    killed = Pair(
        folder, *FLAGS, "--peer-timeout", str(BOUND), disturb={"at": 4, "name": "SIGKILL"}
    )
    killed.processes[1].wait(280)
    lost = time.monotonic()
    codes, texts = killed.wait()
    # A machine that stands still for longer than the bound ends the second one, too.
    assert codes[0] == 1 and codes[1] in (-9, 1), texts
    assert time.monotonic() - lost < 3 * BOUND
    message = re.search(r"^    (models\.finetune: error: another process .*)$", PAGE, re.MULTILINE)
    assert texts[0].splitlines()[-1].startswith(message[1])

    again = Pair(folder, *PATIENT, resume=True, disturb={"at": 4, "name": "SIGINT"})
    codes, texts = again.wait()
    assert codes == [0, 0], texts
    assert "stopped at step 5 of 6; all of it is saved" in texts[0]
    assert "process 1: stopped at step 5 of 6" in texts[1]
    assert "stopping after this step" in texts[1] and "stopping after this step" not in texts[0]

    assert "process 1 of 2 trains along from step 3;" in texts[1]
    assert log(folder) == [row for row in log(straight[0]) if row["step"] <= 5]

    monkeypatch.chdir(folder)
    assert main(["--out", "runs/notes", "--resume"]) == 0
    close(log(folder), log(straight[0]))


class Told(Processes):
    """Process 1 of 2, without the other one: process 0 said `leader`."""

    def __init__(self, leader):
        super().__init__()
        self.index, self.count, self.said = 1, 2, iter(leader)

    def gather(self, value):
        return [next(self.said), value]


@pytest.fixture
def leader(text_folder, tmp_path):
    """What process 0 says: no error, its decisions, no error, its text's fingerprint."""
    run = prepare([*FLAGS, "--data", str(text_folder), "--out", str(tmp_path / "new")])
    return [None, follow._told(run), None, run.corpus.fingerprint()]


def test_the_leader_decides(leader, text_folder):
    own = ["--data", f"{text_folder}/*.txt", "--process-id", "1"]
    run = follow.prepare_together(own, Told(leader))
    assert (run.options.steps, run.options.dropout) == (6, 0.1)
    assert run.options.process_id == 1 and run.config.n_embd == 64
    assert run.corpus.fingerprint() == leader[-1]


@pytest.mark.parametrize(
    ("flags", "changed", "message"),
    [
        (["--lr", "0.5"], {}, "--lr is 0.5, but not given in process 0: start all"),
        (["--steps", "7"], {}, "--steps is 7, but 6 in process 0: start all processes with"),
        ([], {0: "no such file"}, "^process 0: no such file$"),
        ([], {3: "0123"}, "process 1 reads other text than process 0: every machine needs"),
    ],
)
def test_processes_that_disagree_do_not_begin(leader, text_folder, flags, changed, message):
    for place, said in changed.items():
        leader[place] = said
    with pytest.raises(UserError, match=message):
        follow.prepare_together(["--data", str(text_folder), *flags], Told(leader))
