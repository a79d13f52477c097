"""Devices: what exists, and the four ways of choosing one."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_xdna
from jax_xdna import _devices

X = jnp.ones((4, 4))


@pytest.fixture
def two_devices(monkeypatch):
    """A second name, for choosing only: nothing runs on it."""
    both = [("emulated", "CPU"), ("other", "another")]
    monkeypatch.setattr(_devices._ffi, "devices", lambda: both)


def chosen(f=lambda x: jax_xdna.dot(x, x)):
    return str(jax.make_jaxpr(f)(X)).split("device=")[1].split()[0]


def test_the_emulated_device_exists_and_is_first():
    first = jax_xdna.devices()[0]
    assert first.name == "emulated" and "CPU" in first.description
    assert chosen() == "emulated"


def test_argument_beats_context_beats_process(two_devices):
    jax_xdna.default_device("other")
    assert chosen() == "other"
    with jax_xdna.default_device("emulated"):
        assert chosen() == "emulated"
        assert chosen(lambda x: jax_xdna.dot(x, x, device="other")) == "other"
        with jax_xdna.default_device("other"):
            assert chosen() == "other"
        assert chosen() == "emulated"
    assert chosen() == "other"
    jax_xdna.default_device(None)
    assert chosen() == "emulated"


def test_a_context_holds_for_its_thread_and_ends_with_an_error(two_devices):
    from concurrent.futures import ThreadPoolExecutor

    with pytest.raises(RuntimeError), jax_xdna.default_device("other"):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(chosen).result() == "emulated"
        raise RuntimeError
    assert chosen() == "emulated"


def test_contexts_in_several_threads_leave_no_trace(two_devices):
    from concurrent.futures import ThreadPoolExecutor

    def work(i):
        name = ("emulated", "other")[i % 2]
        with jax_xdna.default_device(name):
            return _devices.resolve(None) == name

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
    assert chosen() == "emulated"


def test_a_compiled_function_is_never_stale(two_devices):
    seen = []

    @jax.jit
    def f(x):
        seen.append(_devices.resolve(None))
        return x + 1

    f(X)
    with jax_xdna.default_device("other"):
        f(X)
    jax_xdna.default_device("other")
    f(X)
    jax_xdna.default_device(None)
    f(X)
    assert seen[:2] == ["emulated", "other"] and set(seen) == {"emulated", "other"}
    g = jax.jit(jax_xdna.offload(lambda x: x @ x, policy=jax_xdna.Policy.always()))
    assert "device=emulated" in str(g.trace(X).jaxpr)
    with jax_xdna.default_device("other"):
        assert "device=other" in str(g.trace(X).jaxpr)


def test_unknown_names_say_what_exists():
    expected = "'npu7', but this process has no such device; it has: emulated"
    for call in (
        lambda: jax_xdna.default_device("npu7"),
        lambda: jax_xdna.dot(X, X, device="npu7"),
        lambda: jax_xdna.offload(jnp.matmul, device="npu7"),
        lambda: jax_xdna.explain(jnp.matmul, X, X, device="npu7"),
    ):
        with pytest.raises(ValueError, match=expected):
            call()


@pytest.mark.parametrize("name, code", [("emulated", 0), ("npu7", 1)])
def test_the_environment(name, code):
    program = (
        "import jax_xdna, jax.numpy as jnp; x = jnp.ones((2, 2)); print(jax_xdna.dot(x, x)[0, 0])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XDNA_DEVICE": name, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == code, run.stderr
    if code:
        assert "XDNA_DEVICE is 'npu7'" in run.stderr and "it has: emulated" in run.stderr
    else:
        assert run.stdout == "2.0\n"
