"""Randomised: GEMMs against the bit-exact oracle, and programs with and without offload."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import BF16, F32, LAYOUTS, MODE, mass_error, same_bits, stored
from oracle import gemm as oracle
from programs import ALWAYS, NEVER

import jax_xdna
from jax_xdna._primitive import gemm

SETTINGS = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SIZE = st.integers(1, 300)
DTYPE = st.sampled_from((F32, BF16))


@SETTINGS
@given(SIZE, SIZE, SIZE, st.sampled_from(LAYOUTS), DTYPE, DTYPE, DTYPE, st.integers(0, 2**32 - 1))
def test_any_shape_layout_and_dtype(m, k, n, layout, a_dtype, b_dtype, out, seed):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, k)).astype(a_dtype)
    b = rng.standard_normal((k, n)).astype(b_dtype)
    got = gemm(*map(jnp.asarray, stored(a, b, layout)), layout=layout, out_dtype=out, **MODE)
    same_bits(got, oracle(a, b, out))
    if out == F32:
        assert np.abs(mass_error(got, a.astype(F32), b.astype(F32))).max() < 8 * k**0.5 * 2**-24


@SETTINGS
@given(
    st.integers(1, 9),
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60)),
    st.sampled_from(LAYOUTS),
    st.sampled_from([(True, True), (True, False), (False, True)]),
    DTYPE,
    st.integers(0, 2**32 - 1),
)
def test_any_batch(batch, shape, layout, batched, dtype, seed):
    rng = np.random.default_rng(seed)
    m, k, n = shape
    a = rng.standard_normal((batch, m, k) if batched[0] else (m, k)).astype(dtype)
    b = rng.standard_normal((batch, k, n) if batched[1] else (k, n)).astype(F32)
    got = gemm(*map(jnp.asarray, stored(a, b, layout)), layout=layout, out_dtype=F32, **MODE)
    for i in range(batch):
        same_bits(got[i], oracle(a[i] if batched[0] else a, b[i] if batched[1] else b))


@SETTINGS
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["bf16", "bfp16"]),
    st.sampled_from(["nearest", "floor"]),
    st.floats(-30, 30),
    st.integers(0, 2**32 - 1),
)
def test_any_mode_and_magnitude(m, k, n, numerics, rounding, exponent, seed):
    rng = np.random.default_rng(seed)
    a = (rng.standard_normal((m, k)) * 2.0**exponent).astype(F32)
    b = (rng.standard_normal((k, n)) * 2.0 ** rng.integers(-9, 9, (k, n))).astype(F32)
    got = jax_xdna.dot(a, b, numerics=numerics, rounding=rounding)
    same_bits(got, oracle(a, b, F32, numerics, rounding))


# ---- random programs: a value, its transforms, and dots of many kinds, nested in control flow ----

STEPS = {
    "dot": lambda x: x @ x,
    "transposed": lambda x: (x @ x.T).T,
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "two contractions": lambda x: x * jnp.einsum("ij,ij->", x, x),
    "batched": lambda x: jnp.einsum("bji,bjk->bik", x.reshape(2, 2, 4), x.reshape(2, 2, 4))[0],
    "bf16": lambda x: (x.astype(BF16) @ x.astype(BF16)).astype(F32),
    "half": lambda x: (x.astype(np.float16) @ x.astype(np.float16)).astype(F32),
    "integers": lambda x: (jnp.sign(x).astype(jnp.int32) @ jnp.ones((4, 4), jnp.int32)).astype(F32),
    "clip": lambda x: jnp.clip(x, -2, 2),
    "sign": jnp.sign,
}
WRAPS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x - 1, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x.T]))[1],
    "plain": lambda f: f,
}
STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(sorted(WRAPS)))
CHAIN = st.lists(STEP, min_size=1, max_size=4)


@settings(SETTINGS, max_examples=12)
@given(CHAIN, st.booleans(), st.integers(0, 2**32 - 1))
def test_offload_changes_nothing_but_who_computes(chain, gradient, seed):
    def f(x):
        for step, wrap in chain:
            # Values stay in {-1, 0, 1} · small, where every dot is exact in bfloat16.
            x = WRAPS[wrap](lambda x, s=step: jnp.clip(jnp.round(STEPS[s](x)), -1, 1))(x)
        return x

    x = jnp.asarray(np.random.default_rng(seed).integers(-1, 2, (4, 4)), F32)
    g = jax.grad(lambda x: jnp.sum(f(x) * x)) if gradient else f
    want = jax.jit(g)(x)
    for policy in (ALWAYS, NEVER, lambda dot: dot.layout == "NN"):
        same_bits(jax.jit(jax_xdna.offload(g, policy=policy))(x), want)
