"""`python -m jax_xdna`: an honest report, and an exit code that can fail."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import jax_xdna
from jax_xdna import __main__ as report
from jax_xdna import _selftest
from jax_xdna._mode import mode


@pytest.mark.timeout(60)
def test_the_report():
    run = subprocess.run(
        [sys.executable, "-m", "jax_xdna"],
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert run.returncode == 0, run.stderr
    for expected in (
        f"jax_xdna {jax_xdna.__version__}",
        "jaxlib",
        "CPU features",
        "emulated",
        "no XRT device in this build",
        "32 of 32 cases pass",
        "signed mean",
        "XLA dot, f32",
        "XLA dot, bf16",
    ):
        assert expected in run.stdout
    assert len(re.findall(r"[\d.]+ GFLOP/s", run.stdout)) == 3


@pytest.mark.parametrize("fault", [lambda c: c * (1 + 1e-4), lambda c: c + 2e-4, np.zeros_like])
def test_a_wrong_device_fails_the_self_test(monkeypatch, capsys, fault):
    right = _selftest.gemm
    monkeypatch.setattr(
        _selftest, "gemm", lambda *a, **k: fault(np.asarray(right(*a, **k), np.float32))
    )
    assert not all(check.passed for check in _selftest.self_test(mode(None, None, None)))
    monkeypatch.setattr(report, "_timing", lambda: None)
    assert report.main() == 1
    assert "FAILED NN" in capsys.readouterr().out


def test_an_unknown_device_in_the_environment_is_reported():
    run = subprocess.run(
        [sys.executable, "-m", "jax_xdna"],
        env={**os.environ, "XDNA_DEVICE": "npu7"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1 and "XDNA_DEVICE is 'npu7'" in run.stderr
