"""jit, ahead-of-time compilation, caches and purity of the call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import same_bits
from programs import ALWAYS, calls, matmul, normal

import jax_xdna


@pytest.mark.parametrize("fn", [jax_xdna.dot, matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)])
def test_jit_gives_the_bits_of_the_eager_call(rng, fn):
    a, b = normal(rng, 30, 40), normal(rng, 40, 20)
    eager = fn(a, b)
    same_bits(jax.jit(fn)(a, b), eager)
    same_bits(jax.jit(fn).lower(a, b).compile()(a, b), eager)
    assert calls(fn, a, b) == 1


def test_a_second_call_does_not_trace_again(rng):
    traces = []

    @jax.jit
    def f(a, b):
        traces.append(None)
        return jax_xdna.dot(a, b)

    a, b = normal(rng, 4, 5), normal(rng, 5, 6)
    f(a, b), f(a + 1, b)
    assert len(traces) == 1


def test_the_call_is_pure(rng):
    a, b = normal(rng, 8, 8), normal(rng, 8, 8)
    assert calls(lambda a, b: jax_xdna.dot(a, b) + jax_xdna.dot(a, b), a, b) == 1  # merged
    assert calls(lambda a, b: (jax_xdna.dot(a, b), a)[1], a, b) == 0  # removed


def test_a_chain_of_products_has_no_copies_between(rng):
    a, b = normal(rng, 2, 8, 16), normal(rng, 16, 16)
    text = jax.jit(lambda a, b: matmul(matmul(a, b), b)).lower(a, b).compile().as_text()
    assert "transpose(" not in text and " copy(" not in text


def test_donated_arguments_are_given_up(rng):
    step = jax.jit(jax_xdna.offload(lambda w, x: w - x.T @ x, policy=ALWAYS), donate_argnums=0)
    w, x = normal(rng, 16, 16), normal(rng, 8, 16)
    step(w, x)
    assert w.is_deleted() and not x.is_deleted()
    inner = jax_xdna.offload(jax.jit(lambda w, x: w - x.T @ x, donate_argnums=0), policy=ALWAYS)
    w = normal(rng, 16, 16)
    want = np.asarray(w - jax_xdna.dot(x.T, x))
    same_bits(inner(w, x), want)
    assert w.is_deleted()


def test_static_arguments(rng):
    def f(x, power, *, transpose=False):
        for _ in range(power):
            x = x @ (x.T if transpose else x)
        return x

    x = normal(rng, 6, 6)
    jitted = jax.jit(
        jax_xdna.offload(f, policy=ALWAYS), static_argnums=1, static_argnames="transpose"
    )
    want = jax_xdna.dot(jax_xdna.dot(x, x.T), jax_xdna.dot(x, x.T).T)
    same_bits(jitted(x, 2, transpose=True), want)
    same_bits(jax_xdna.offload(f, policy=ALWAYS)(x, 2, transpose=True), want)
    inside = jax_xdna.offload(
        jax.jit(f, static_argnums=1, static_argnames="transpose"), policy=ALWAYS
    )
    same_bits(inside(x, 2, transpose=True), want)
    assert jitted(x, 1).shape == (6, 6)


def test_the_import_starts_no_backend():
    import subprocess
    import sys

    code = "import jax_xdna, jax; from jax._src import xla_bridge as b; assert not b._backends"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_import_works_after_the_backend_is_up_and_reloads():
    import subprocess
    import sys

    code = (
        "import jax.numpy as jnp; x = jnp.ones((2, 2)); import jax_xdna, importlib; "
        "assert float(jax_xdna.dot(x, x)[0, 0]) == 2; importlib.reload(jax_xdna); "
        "assert float(jax_xdna.dot(x, x)[0, 0]) == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
