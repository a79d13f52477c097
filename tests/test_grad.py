"""Derivatives: all layouts, mixed dtypes, forward and reverse, to second order and beyond."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, F32, LAYOUTS, MODE, round_bf16, same_bits, stored
from oracle import gemm as oracle
from programs import ALWAYS, matmul, normal, primitives

import jax_xdna
from jax_xdna._dot import _product
from jax_xdna._mode import mode
from jax_xdna._primitive import gemm
from jax_xdna._shapes import Ranks


def bilinear(layout, out=F32):
    return lambda a, b: gemm(a, b, layout=layout, out_dtype=out, **MODE)


def custom_vjp(layout, out=F32):
    return lambda a, b: _product(a, b, layout, Ranks(), np.dtype(out), mode(None, None, None))


@pytest.mark.parametrize("make", [bilinear, custom_vjp])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "a_dtype, b_dtype, out",
    [(F32, F32, F32), (BF16, F32, F32), (BF16, BF16, F32), (F32, BF16, BF16)],
)
def test_cotangents_are_products_in_order_of_k(rng, make, layout, a_dtype, b_dtype, out):
    a = rng.standard_normal((9, 20)).astype(a_dtype)
    b = rng.standard_normal((20, 13)).astype(b_dtype)
    c = jnp.asarray(rng.standard_normal((9, 13)).astype(out))
    x, y = map(jnp.asarray, stored(a, b, layout))
    ga, gb = jax.vjp(make(layout, out), x, y)[1](c)
    want = stored(oracle(c, b.T, a_dtype), oracle(a.T, c, b_dtype), layout)
    same_bits(ga, want[0])
    same_bits(gb, want[1])


@pytest.mark.parametrize("make", [bilinear, custom_vjp])
@pytest.mark.parametrize(
    "layout, ranks", list(itertools.product(LAYOUTS, [(3, 3), (3, 2), (2, 3)]))
)
def test_cotangent_of_a_shared_operand_sums_over_the_batch_in_one_product(rng, make, layout, ranks):
    a = rng.standard_normal((4, 5, 6)[3 - ranks[0] :]).astype(F32)
    b = rng.standard_normal((4, 6, 7) if ranks[1] == 3 else (6, 7)).astype(F32)
    c = rng.standard_normal((4, 5, 7)).astype(F32)
    x, y = map(jnp.asarray, stored(a, b, layout))
    pull = jax.vjp(make(layout), x, y)[1]
    ga, gb = pull(jnp.asarray(c))
    if ranks[0] == 3:
        want_a = np.stack([oracle(c[i], (b[i] if b.ndim == 3 else b).T) for i in range(4)])
    else:  # K runs over the batch and N
        want_a = oracle(np.concatenate(list(c), 1), np.concatenate([x.T for x in b], 0))
    if ranks[1] == 3:
        want_b = np.stack([oracle((a[i] if a.ndim == 3 else a).T, c[i]) for i in range(4)])
    else:  # K runs over the batch and M
        want_b = oracle(np.concatenate(list(a), 0).T, np.concatenate(list(c), 0))
    want = stored(want_a, want_b, layout)
    same_bits(ga, want[0])
    same_bits(gb, want[1])
    assert primitives(jax.make_jaxpr(pull)(jnp.asarray(c))).count("jax_xdna_gemm") == 2


def test_the_transposes_of_dense_layers_are_reshapes_only(rng):
    x, w = normal(rng, 3, 4, 8), normal(rng, 8, 6)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sin(matmul(x, w)).sum(), (0, 1)))(x, w)
    names = primitives(jaxpr)
    assert names.count("jax_xdna_gemm") == 3 and "transpose" not in names


def loss(dot):
    return lambda a, b: jnp.sum(jnp.sin(dot(jnp.tanh(dot(a, b)), b.T)))


@pytest.mark.parametrize("dot", [jax_xdna.dot, matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_grad_is_that_of_float32_within_bf16(rng, dot, jit):
    a, b = normal(rng, 12, 20) / 4, normal(rng, 20, 9) / 4
    got = jit(jax.grad(loss(dot), (0, 1)))(a, b)
    want = jax.grad(loss(jnp.matmul), (0, 1))(a, b)
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(y)


# A function whose derivatives are exact in bf16: small integers throughout.
def cubic(dot):
    return lambda a, b: jnp.sum(dot(a, b) * dot(a, b) * 0.5)


@pytest.mark.parametrize("dot", [jax_xdna.dot, matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)])
def test_reverse_over_reverse_to_third_order(rng, dot):
    a = jnp.asarray(rng.integers(-2, 3, (3, 2)), F32)
    b = jnp.asarray(rng.integers(-2, 3, (2, 3)), F32)
    derivative, want = cubic(dot), cubic(jnp.matmul)
    for _ in range(3):
        derivative, want = (jax.jacrev(f, 1) for f in (derivative, want))
        same_bits(derivative(a, b), want(a, b))


@pytest.mark.parametrize("dot", [matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)])
def test_forward_mode(rng, dot):
    a, b, da, db = (jnp.asarray(rng.integers(-3, 4, s), F32) for s in ((3, 4), (4, 5)) * 2)
    got = jax.jvp(dot, (a, b), (da, db))
    same_bits(got[0], a @ b)
    same_bits(got[1], da @ b + a @ db)
    same_bits(jax.linearize(dot, a, b)[1](da, db), da @ b + a @ db)
    for transform in (jax.jacfwd, jax.hessian, lambda f: jax.jacfwd(jax.jacrev(f))):
        f = lambda b: cubic(dot)(a[:2], b)  # noqa: E731, B023
        g = lambda b: cubic(jnp.matmul)(a[:2], b)  # noqa: E731, B023
        same_bits(transform(f)(b), transform(g)(b))


def test_forward_mode_of_dot_names_dot_general(rng):
    a = normal(rng, 3, 3)
    for transform in (jax.jacfwd, jax.hessian):
        with pytest.raises(TypeError, match="dot_general"):
            transform(lambda x: jax_xdna.dot(x, x).sum())(a)
    with pytest.raises(TypeError, match="dot_general"):
        jax.jvp(jax_xdna.dot, (a, a), (a, a))
    assert "dot_general" in jax_xdna.dot.__doc__


def test_linear_transpose(rng):
    a, b = normal(rng, 3, 4), normal(rng, 4, 5)
    c = normal(rng, 3, 5)
    (got,) = jax.linear_transpose(lambda x: matmul(x, b), a)(c)
    same_bits(got, oracle(c, round_bf16(b).T))


def test_symbolic_zeros_cost_nothing(rng):
    a, b = normal(rng, 3, 4), normal(rng, 4, 5)
    names = primitives(jax.make_jaxpr(jax.grad(lambda a: matmul(a, b).sum()))(a))
    assert names.count("jax_xdna_gemm") <= 2  # value (kept by the trace) and dA, no dB
