"""The virtual NPU itself: right results through XRT, and every fault as the real driver shows it.

The program that uses it is probe.cc.
"""

import os
import subprocess
from pathlib import Path

import pytest

from jax_xdna import _ffi
from tests.virtual_npu import artifacts

PROBE = Path(os.environ["VIRTUAL_NPU_BUILD"]) / "virtual_npu_probe"


@pytest.fixture(scope="module")
def design(arch, tmp_path_factory):
    """The probe's first arguments: an xclbin and the design in it."""
    plan = _ffi.plan(arch, 256, 768, 2304)
    directory = artifacts.write_artifact(tmp_path_factory.mktemp("artifact"), plan)
    return [directory / "gemm.xclbin", arch, *map(str, plan["tile"])]


def probe(design, *arguments, **environment):
    done = subprocess.run(
        [PROBE, *design, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_right_bits(design):
    assert probe(design) == (0, "0 elements differ from the emulated device\n")


@pytest.mark.parametrize("mistake", ["--no-input-sync", "--dirty-output", "--no-output-sync"])
def test_a_missing_sync_gives_a_wrong_result(design, mistake):
    code, text = probe(design, mistake)
    assert (code, "differ from the emulated" in text) == (2, True), text


@pytest.mark.parametrize(
    ("faults", "code", "text"),
    [
        ("hang", 3, "state 8"),
        ("hang@2", 0, "0 elements differ"),
        ("abort@1", 3, "state 6"),
        ("error@1+", 3, "state 5"),
        ("flip", 2, "1 elements differ"),
        ("gone", 4, "EXEC_CMD IOCTL failed (err=-19)"),
        ("memlock", 4, "failed (err=-11)"),
        ("memory", 4, "CREATE_BO IOCTL failed (err=-12)"),
        ("context", 4, "CREATE_HWCTX IOCTL failed (err=-28)"),
        ("access", 4, "failed (err=-13)"),
    ],
)
def test_faults(design, faults, code, text):
    got = probe(design, VIRTUAL_NPU_FAULTS=faults, VIRTUAL_NPU_WATCHDOG_MS="50")
    assert (got[0], text in got[1]) == (code, True), got[1]


def test_a_design_of_the_other_generation_is_an_error(arch, design, tmp_path):
    other = "npu2" if arch == "npu1" else "npu1"
    plan = _ffi.plan(other, 256, 768, 2304)
    directory = artifacts.write_artifact(tmp_path, plan)
    code, text = probe([directory / "gemm.xclbin", *design[1:]])
    # Eight columns do not exist on npu1; npu2 takes four, and then another generation's stream.
    expected = {"npu1": (4, "CREATE_HWCTX"), "npu2": (3, "another generation")}[arch]
    assert (code, expected[1] in text) == (expected[0], True), text
