"""scan, while, fori, cond, switch, map: values, gradients, and one traced product each."""

import jax
import jax.numpy as jnp
import pytest
from oracle import F32, same_bits
from programs import ALWAYS, matmul, primitives

import jax_xdna

DOTS = [jax_xdna.dot, matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)]


def integers(rng, *shape):
    return jnp.asarray(rng.integers(-1, 2, shape), F32)


def scanned(dot):
    def f(w, x):
        body = lambda x, w: (dot(x, w) * 0.5, jnp.sum(x))  # noqa: E731
        x, sums = jax.lax.scan(body, x, w)
        return jnp.sum(x) + jnp.sum(sums)

    return f


def looped(dot):
    def f(w, x):
        stop = lambda state: state[0] < 3  # noqa: E731
        body = lambda state: (state[0] + 1, dot(state[1], w[0]))  # noqa: E731
        return jnp.sum(jax.lax.while_loop(stop, body, (0, x))[1])

    return f


def branched(dot):
    def f(w, x):
        x = jax.lax.cond(x[0, 0] > 0, lambda: dot(x, w[0]), lambda: dot(x, w[1]) + 1)
        x = jax.lax.switch(jnp.int32(2), [lambda x: x, lambda x: x, lambda x: dot(x, w[2])], x)
        return jnp.sum(x**2) / 2

    return f


def mapped(dot):
    return lambda w, x: jnp.sum(jax.lax.map(lambda w: dot(x, w), w) ** 2) / 2


@pytest.mark.parametrize("dot", DOTS)
@pytest.mark.parametrize("program", [scanned, looped, branched, mapped])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_values_and_gradients(rng, program, dot, jit):
    w, x = integers(rng, 3, 4, 4), integers(rng, 2, 4)
    f, reference = program(dot), program(jnp.matmul)
    same_bits(jit(f)(w, x), reference(w, x))
    if program is not looped:  # a while loop has no reverse mode
        for got, want in zip(
            jit(jax.grad(f, (0, 1)))(w, x), jax.grad(reference, (0, 1))(w, x), strict=True
        ):
            same_bits(got, want)


@pytest.mark.parametrize("program", [scanned, looped, branched, mapped])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_offload_around_the_whole_program(rng, program, jit):
    w, x = integers(rng, 3, 4, 4), integers(rng, 2, 4)
    f = program(jnp.matmul)
    if program is not looped:
        f = jax.value_and_grad(f, (0, 1))
    g = jax_xdna.offload(f, policy=ALWAYS)
    for got, want in zip(jax.tree.leaves(jit(g)(w, x)), jax.tree.leaves(f(w, x)), strict=True):
        same_bits(got, want)
    names = primitives(jax.make_jaxpr(g)(w, x))
    assert "jax_xdna_gemm" in names and "dot_general" not in names


def test_forward_mode_through_a_fori_loop(rng):
    w, x = integers(rng, 4, 4), integers(rng, 2, 4)

    def f(dot):
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, x: dot(x, w), x)

    same_bits(jax.jvp(f(matmul), (x,), (x + 1,))[1], jax.jvp(f(jnp.matmul), (x,), (x + 1,))[1])


def test_an_error_in_a_scanned_body_leaves_jax_usable(rng):
    w, x = integers(rng, 3, 4, 4), integers(rng, 2, 4)
    with pytest.raises(ValueError, match="no such device"):
        jax.jit(scanned(lambda a, b: jax_xdna.dot(a, b, device="absent")))(w, x)
    same_bits(jax.jit(scanned(jax_xdna.dot))(w, x), scanned(jnp.matmul)(w, x))


def test_keys_and_prints_inside_loops(rng, capfd):
    w, x = integers(rng, 4, 4), integers(rng, 2, 4)

    def f(w, x):
        def body(state, i):
            key, x = state
            key, here = jax.random.split(key)
            x = x @ w + jax.random.bernoulli(here, shape=x.shape)
            jax.debug.print("step {}", i)
            return (key, jnp.sign(x)), jax.random.key_data(key)

        return jax.lax.scan(body, (jax.random.key(7), x), jnp.arange(3))[0][1]

    step = jax.value_and_grad(lambda w, x: jnp.sum(f(w, x)))
    want = step(w, x)
    jax.effects_barrier()
    printed = capfd.readouterr().out
    got = jax.jit(jax_xdna.offload(step, policy=ALWAYS))(w, x)
    jax.effects_barrier()
    assert capfd.readouterr().out == printed == "step 0\nstep 1\nstep 2\n"
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)
