"""What the tests inside the bench share."""

import os
from pathlib import Path

import pytest

from jax_xdna import _ffi
from tests.virtual_npu import artifacts


@pytest.fixture(scope="session")
def arch() -> str:
    """The generation of the NPU that is here."""
    return os.environ["VIRTUAL_NPU"]


@pytest.fixture(scope="session")
def artifact_cache(arch, tmp_path_factory) -> Path:
    """A cache with an artifact for every design of this generation that training uses."""
    cache = tmp_path_factory.mktemp("artifacts")
    for numerics in ("bf16",) if arch == "npu1" else ("bf16", "bfp16"):
        for result in ("f32", "bf16"):
            plan = _ffi.plan(arch, 256, 768, 2304, numerics, None, result)
            artifacts.write_artifact(cache, plan)
    return cache
