"""A run's folder: who may write it, and what happens to it when disks fill up or files tear."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from models.errors import UserError, WriteError
from models.rundir import LOCK, METRICS, RunDir
from models.train import State

# Threads of TensorStore report to an event loop that orbax has closed after the first error.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from pathlib import Path
from models.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
run.lock()
print("has it", flush=True)
time.sleep(600)
"""
IDENTITY = {"model": {"n_embd": 4}, "tokenizer": "t", "data": "d"}


def state(step):
    rng = np.random.default_rng(step)
    params = {"a": rng.standard_normal((100, 300)).astype(np.float32), "b": np.ones((), np.int32)}
    return State(np.asarray(step, np.int32), params, [rng.standard_normal(5).astype(np.float32)])


def assert_same(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def open_run(tmp_path):
    """Opens the run's folder as a new process would; collects its warnings in `warned`."""
    opened = []

    def open_again():
        for run in opened:
            run.close()
        run = RunDir(tmp_path)
        run.warned = []
        run.warn = run.warned.append
        run.lock()
        opened.append(run)
        return run

    yield open_again
    for run in opened:
        run.close()


@pytest.fixture
def run(open_run):
    return open_run()


def steps(run):
    return sorted(int(path.name) for path in (run.path / "state").glob("[0-9]*"))


def test_the_newest_are_kept(run, open_run):
    run.keep = 3
    for step in (5, 10, 15, 20):
        run.save_state(state(step), IDENTITY)
    assert steps(run) == [10, 15, 20]
    run = open_run()
    assert_same(run.load_state(state(0), IDENTITY), state(20))
    assert not run.warned


def test_another_config_tokenizer_or_data_is_refused(run, open_run):
    run.save_state(state(1), IDENTITY)
    run = open_run()
    for name, value in (("model", {"n_embd": 8}), ("tokenizer", "u"), ("data", "e")):
        with pytest.raises(UserError, match=f"--resume: the {name} changed since .* is {value}"):
            run.load_state(state(0), IDENTITY | {name: value})
    assert_same(run.load_state(state(0), IDENTITY), state(1))


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_each_file_damaged_in_turn(run, open_run, tmp_path_factory, damage):
    """The state that is read is one that was saved: the damaged one where it does not matter."""
    for step in (1, 2):
        run.save_state(state(step), IDENTITY)
    run.close()
    whole = tmp_path_factory.mktemp("whole") / "state"
    shutil.copytree(run.path / "state", whole)
    files = [path.relative_to(whole) for path in (whole / "2").rglob("*") if path.is_file()]
    fell_back = 0
    for file in files:
        shutil.rmtree(run.path / "state")
        shutil.copytree(whole, run.path / "state")
        path = run.path / "state" / file
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        else:
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1])
            path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        run = open_run()
        found = run.load_state(state(0), IDENTITY)
        assert_same(found, state(int(found.step)))
        if found.step == 2:
            assert not run.warned
            continue
        fell_back += 1
        assert "the checkpoint of step 2 in " in run.warned[0] and "damaged (" in run.warned[0]
        assert found.step == 1 and steps(run) == [1]
        run.save_state(state(2), IDENTITY)
        assert_same(open_run().load_state(state(0), IDENTITY), state(2))
    assert fell_back >= 4, files


def test_no_checkpoint_that_can_be_read(run, open_run):
    run.save_state(state(1), IDENTITY)
    (run.path / "state" / "1" / "identity" / "metadata").write_text("{")
    with pytest.raises(UserError, match="no checkpoint in .*/state can be read"):
        open_run().load_state(state(0), IDENTITY)
    assert steps(run) == [1]  # Nothing is removed without something better.


def test_a_disk_without_room(run, open_run):
    """The limit on a file's size stands for it: the real writers get the kernel's error."""
    run.append_metrics({"step": 1})
    run.write_later("step 1", lambda: run.save_state(state(1), IDENTITY))
    run.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        run.write_later("step 2", lambda: run.save_state(state(2), IDENTITY))
        with pytest.raises(WriteError, match="step 2 could not be saved: .*of step 1 is complete"):
            run.wait()
        run.write_later("step 3", lambda: run.save_state(state(3), IDENTITY))
        run.write_later("step 4", lambda: None)
        assert "step 3 could not be saved" in run.warned[0]
        with pytest.raises(WriteError, match="metrics.jsonl: File too large. .* of step 1 is"):
            run.append_metrics({"step": 2, "text": "x" * 30_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.write_later("step 5", lambda: run.save_state(state(5), IDENTITY))
    run.wait()
    assert sorted(path.name for path in (run.path / "state").iterdir()) == ["1", "5"]
    run = open_run()
    assert_same(run.load_state(state(0), IDENTITY), state(5))
    run.cut_metrics(5)
    assert run.read_metrics() == [{"step": 1}]


def test_what_fails_last_is_told_at_the_end(run):
    def fail():
        raise OSError(28, "No space left on device")

    run.write_later("step 1", fail)
    run.close()
    assert run.warned == [
        "step 1 could not be saved: [Errno 28] No space left on device. Nothing was saved before"
    ]


def test_torn_and_later_rows_are_cut(run):
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
    with open(run.path / METRICS, "a") as file:
        file.write('{"step": 4, "lo')
    run.cut_metrics(2)
    lines = (run.path / METRICS).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 2}]


def test_two_never_write_one_run(run):
    other = RunDir(run.path)
    with pytest.raises(UserError, match=f"process {os.getpid()} on .* is writing this run; wait"):
        other.lock()
    run.close()
    other.lock()
    other.close()


def test_the_lock_of_a_killed_process_is_no_obstacle(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout.readline() == b"has it\n"
        run = RunDir(tmp_path)
        with pytest.raises(UserError, match=f"process {owner.pid} on "):
            run.lock()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        run.lock()
        run.close()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_a_file_system_without_locks_costs_a_warning(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    run = RunDir(tmp_path)
    said = []
    run.warn = said.append
    run.lock()
    run.close()
    assert "cannot be locked (Operation not supported): start no second process" in said[0]
    assert (tmp_path / LOCK).exists()
