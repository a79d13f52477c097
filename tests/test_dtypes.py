"""Dtype rules: those of lax.dot_general for float32 and bfloat16, a TypeError for all others."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, F32, LAYOUTS, MODE, same_bits, stored
from oracle import gemm as oracle

import jax_xdna
from jax_xdna._primitive import gemm

NN = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("a_dtype, b_dtype, out", list(itertools.product((F32, BF16), repeat=3)))
def test_any_mix_of_operand_and_result_dtypes(rng, layout, a_dtype, b_dtype, out):
    a = rng.standard_normal((19, 45)).astype(a_dtype)
    b = rng.standard_normal((45, 23)).astype(b_dtype)
    x, y = map(jnp.asarray, stored(a, b, layout))
    same_bits(gemm(x, y, layout=layout, out_dtype=out, **MODE), oracle(a, b, out))


@pytest.mark.parametrize("a_dtype, b_dtype", list(itertools.product((F32, BF16), repeat=2)))
@pytest.mark.parametrize("preferred", [None, F32, BF16])
def test_result_dtype_is_that_of_lax(a_dtype, b_dtype, preferred):
    a, b = jnp.ones((2, 3), a_dtype), jnp.ones((3, 4), b_dtype)
    want = jax.lax.dot_general(a, b, NN, preferred_element_type=preferred)
    got = jax_xdna.dot_general(a, b, NN, preferred_element_type=preferred)
    assert got.dtype == want.dtype and not got.weak_type
    same_bits(got, want)
    dot = jax_xdna.dot(a, b, preferred_element_type=preferred)
    assert dot.dtype == want.dtype


@pytest.mark.parametrize(
    "dtype", [np.int32, np.int8, np.bool_, np.float16, np.complex64, jnp.float8_e4m3fn]
)
def test_other_dtypes_are_refused_and_named(dtype):
    a, b = jnp.ones((2, 2), dtype), jnp.ones((2, 2), F32)
    for x, y, name in ((a, b, "a"), (b, a, "b")):
        with pytest.raises(TypeError, match=f"dot: {name} is {np.dtype(dtype)}"):
            jax_xdna.dot(x, y)
    with pytest.raises(TypeError, match="dot_general: lhs is"):
        jax_xdna.dot_general(a, b, NN)
    with pytest.raises(TypeError, match="preferred_element_type is"):
        jax_xdna.dot(b, b, preferred_element_type=dtype)


def test_float64_is_refused():
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match="a is float64"):
            jax_xdna.dot(np.ones((2, 2)), jnp.ones((2, 2), F32))


def test_numpy_and_python_operands_are_taken_as_jax_takes_them():
    same_bits(
        jax_xdna.dot(np.ones((2, 2)), [[1.0, 2.0], [3.0, 4.0]]), np.array([[4, 6], [4, 6]], F32)
    )


@pytest.mark.parametrize("a_dtype, b_dtype", list(itertools.product((F32, BF16), repeat=2)))
def test_gradients_have_the_dtypes_of_their_operands(a_dtype, b_dtype):
    a, b = jnp.ones((2, 3), a_dtype), jnp.ones((3, 4), b_dtype)
    for fn in (jax_xdna.dot, lambda x, y: jax_xdna.dot_general(x, y, NN)):
        ga, gb = jax.grad(lambda x, y: fn(x, y).astype(F32).sum(), (0, 1))(a, b)  # noqa: B023
        same_bits(ga, np.full((2, 3), 4).astype(a_dtype))
        same_bits(gb, np.full((3, 4), 2).astype(b_dtype))
