"""Settings of the whole suite: eight CPU devices, strict ranks, warnings are errors."""

import os

# Before JAX starts. Programs without a sharding still run on the first device alone.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np
import pytest

import jax_xdna

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _default_device_is_untouched():
    yield
    jax_xdna.default_device(None)
