"""Users' own custom_vjp and custom_jvp functions keep their rules under offload."""

import jax
import jax.numpy as jnp
from oracle import F32, same_bits
from programs import ALWAYS, primitives

import jax_xdna


@jax.custom_vjp
def clipped(x, w):
    return x @ w


def _forward(x, w):
    return x @ w, (x, w)


def _backward(operands, g):
    x, w = operands
    g = jnp.clip(g, -1, 1)
    return g @ w.T, x.T @ g


clipped.defvjp(_forward, _backward)


@jax.custom_jvp
def halved(x):
    return x @ x


@halved.defjvp
def _halved(primals, tangents):
    (x,), (t,) = primals, tangents
    return halved(x), 0.5 * (t @ x + x @ t)


def integers(rng, *shape):
    return jnp.asarray(rng.integers(-3, 4, shape), F32)


def test_custom_vjp_inside_and_outside(rng):
    x, w = integers(rng, 3, 4), integers(rng, 4, 5)
    loss = lambda x, w: jnp.sum(clipped(x, w) ** 2)  # noqa: E731
    want = jax.grad(loss, (0, 1))(x, w)
    outside = jax_xdna.offload(jax.grad(loss, (0, 1)), policy=ALWAYS)
    inside = jax.grad(jax_xdna.offload(loss, policy=ALWAYS), (0, 1))
    for got in (outside(x, w), inside(x, w), jax.jit(inside)(x, w)):
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])
    # Outside, the rules' own dots are seen too; inside they stay on the CPU.
    assert "dot_general" not in primitives(jax.make_jaxpr(outside)(x, w))
    assert primitives(jax.make_jaxpr(inside)(x, w)).count("dot_general") == 3
    forward = jax_xdna.offload(loss, policy=ALWAYS)
    assert "jax_xdna_gemm" in primitives(jax.make_jaxpr(forward)(x, w))
    same_bits(forward(x, w), loss(x, w))


def test_custom_jvp(rng):
    x = integers(rng, 4, 4)
    f = jax_xdna.offload(halved, policy=ALWAYS)
    same_bits(f(x), halved(x))
    same_bits(jax.jvp(f, (x,), (x + 1,))[1], jax.jvp(halved, (x,), (x + 1,))[1])
    want = jax.grad(lambda x: halved(x).sum())(x)
    same_bits(jax.grad(lambda x: f(x).sum())(x), want)
    same_bits(jax_xdna.offload(jax.grad(lambda x: halved(x).sum()), policy=ALWAYS)(x), want)


def test_jax_functions_with_rules_of_their_own(rng):
    x = integers(rng, 4, 4) / 4

    def f(x):
        return jnp.sum(jax.nn.relu(x @ x) + jax.nn.gelu(x @ x) + jax.nn.logsumexp(x @ x))

    got = jax.jit(jax_xdna.offload(jax.value_and_grad(f), policy=ALWAYS))(x)
    for a, b in zip(got, jax.value_and_grad(f)(x), strict=True):
        assert jnp.allclose(a, b, rtol=2e-2, atol=2e-2)
