"""The numerical contract, line by line."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    BF16,
    F32,
    LAYOUTS,
    MODE,
    SMALLEST_NORMAL,
    mass_error,
    round_bf16,
    same_bits,
    stored,
)
from oracle import (
    gemm as oracle,
)

import jax_xdna
from jax_xdna._primitive import gemm


def run(a, b, layout="NN", out=F32, **mode):
    return gemm(
        *map(jnp.asarray, stored(a, b, layout)), layout=layout, out_dtype=out, **MODE | mode
    )


# ---- 1. operands are rounded once to bf16, nearest even ----


@pytest.mark.parametrize(
    "value, rounded",
    [
        (1 + 2**-8, 1.0),  # a tie goes to the even neighbour, down
        (1 + 3 * 2**-8, 1 + 2**-6),  # and up
        (1 + 2**-8 + 2**-20, 1 + 2**-7),  # just above a tie
        (3.4e38, np.inf),  # overflow
        (-3.4e38, -np.inf),
        (np.inf, np.inf),
        (np.nan, np.nan),
        (-0.0, 0.0),
    ],
)
def test_operands_are_rounded_to_nearest_even(value, rounded):
    a = np.array([[value]], F32)
    one = np.ones((1, 1), F32)
    same_bits(run(a, one), np.array([[rounded]], F32))
    same_bits(run(one, a), np.array([[rounded]], F32))


def test_a_nan_with_only_low_bits_stays_nan():
    nan = np.array([[0x7F800001]], np.uint32).view(F32)
    assert np.isnan(run(nan, np.ones((1, 1), F32))).all()
    assert np.isnan(run(np.ones((1, 1), F32), nan, "NT")).all()


# ---- 2. exact products, fp32 sums in order of k, one accumulator ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (3, 8, 5), (17, 33, 65), (64, 300, 48), (130, 700, 31), (5, 2000, 100)]
)
def test_the_sum_runs_in_order_of_k(rng, layout, m, k, n):
    a = rng.standard_normal((m, k)).astype(F32)
    b = rng.standard_normal((k, n)).astype(F32)
    same_bits(run(a, b, layout), oracle(a, b))


def test_order_of_k_shows_in_a_sum_that_depends_on_it():
    # (1 + 2^-24) + 2^-24 … stays 1 in order; any split of K would add the small ones up first.
    k = 513
    a, b = np.full((1, k), 2.0**-12, F32), np.full((k, 1), 2.0**-12, F32)
    a[0, 0] = b[0, 0] = 1
    assert float(run(a, b)[0, 0]) == 1.0
    assert float(run(a[:, ::-1].copy(), b[::-1].copy())[0, 0]) == 1 + 512 * 2.0**-24


@pytest.mark.parametrize("m, k, n", [(200, 500, 300), (300, 64, 700)])
def test_a_part_of_the_operands_gives_the_same_part_of_the_result(rng, m, k, n):
    a = rng.standard_normal((m, k)).astype(F32)
    b = rng.standard_normal((k, n)).astype(F32)
    whole = np.asarray(run(a, b))
    for rows, columns in ((1, n), (7, 33), (m, 1), (m - 1, n - 1)):
        same_bits(run(a[:rows], b[:, :columns]), whole[:rows, :columns])
    same_bits(run(np.pad(a, ((0, 9), (0, 0))), np.pad(b, ((0, 0), (0, 5))))[:m, :n], whole)
    same_bits(run(np.pad(a, ((0, 0), (0, 24))), np.pad(b, ((0, 24), (0, 0)))), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_gives_the_bits_of_its_elements(rng, layout):
    a = rng.standard_normal((5, 33, 70)).astype(F32)
    b = rng.standard_normal((5, 70, 41)).astype(F32)
    both = run(a, b, layout)
    left, right = run(a, b[0], layout), run(a[0], b, layout)
    for i in range(5):
        same_bits(both[i], oracle(a[i], b[i]))
        same_bits(left[i], oracle(a[i], b[0]))
        same_bits(right[i], oracle(a[0], b[i]))


DIGEST = """
import hashlib, jax.numpy as jnp, numpy as np, jax_xdna, jax_xdna._ffi as ffi
rng = np.random.default_rng(1)
digest = hashlib.sha256()
for m, k, n in ((300, 700, 500), (33, 1000, 770), (1, 64, 513)):
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    a[0, :3] = 1e-39, 1e-20, np.inf
    b[:3, 0] = 1e-20, 1e-20, 0
    for numerics in ("bf16", "bfp16"):
        c = jax_xdna.dot(jnp.float32(a), jnp.float32(b), numerics=numerics)
        c = np.where(np.isnan(c), np.float32(7), c)
        digest.update(np.ascontiguousarray(c).tobytes())
print(digest.hexdigest(), ffi.isa())
"""


def test_every_instruction_set_and_thread_count_gives_the_same_bits():
    def digest(prefix=(), **env):
        import os

        command = [*prefix, sys.executable, "-c", DIGEST]
        environment = {**os.environ, "XLA_FLAGS": "", **env}
        out = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
        assert out.returncode == 0, out.stderr
        return out.stdout.split()

    bits, isa = digest()
    for name in {"avx2", "baseline"} - {isa}:
        assert digest(JAX_XDNA_ISA=name)[0] == bits
    if sys.platform == "linux":
        assert digest(["taskset", "-c", "0"])[0] == bits


# ---- 3. subnormals ----


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("size", [1, 300])  # on the calling thread, and on the pool
def test_subnormal_operands_and_results_are_zero(jit, size):
    product = jax.jit(run) if jit else run
    tiny = np.full((size, size), SMALLEST_NORMAL / 2, F32)
    big = np.zeros((size, size), F32)
    np.fill_diagonal(big, 2.0**100)
    assert not np.asarray(product(tiny, big)).any()  # operand
    assert not np.asarray(product(big, tiny)).any()
    small = np.full((size, size), SMALLEST_NORMAL, F32)
    half = big / F32(2.0**101)
    assert not np.asarray(product(small, half)).any()  # result
    same_bits(product(small, half * 2), small)  # the smallest normal number survives
    # An operand just below the smallest normal number rounds up to it first.
    same_bits(product(np.nextafter(small, F32(0)), half * 2), small)


# ---- 4. float32, or rounded once to bf16 ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bf16_result_is_the_float32_one_rounded_once(rng, layout):
    a = rng.standard_normal((65, 129)).astype(F32)
    b = rng.standard_normal((129, 70)).astype(F32)
    same_bits(run(a, b, layout, out=BF16), np.asarray(run(a, b, layout)).astype(BF16))


# ---- 5. the models of other hardware modes ----


@pytest.mark.parametrize("rounding", ["nearest", "floor"])
@pytest.mark.parametrize("numerics", ["bf16", "bfp16"])
@pytest.mark.parametrize("out", [F32, BF16])
def test_the_modes_are_exact(rng, numerics, rounding, out):
    a = (rng.standard_normal((37, 99)) * 10.0 ** rng.integers(-3, 3, (37, 99))).astype(F32)
    b = (rng.standard_normal((99, 53)) * 10.0 ** rng.integers(-3, 3, (99, 53))).astype(F32)
    a[3], b[:16, 2] = 0, 0
    for layout in LAYOUTS:
        got = run(a, b, layout, out, numerics=numerics, rounding=rounding)
        same_bits(got, oracle(a, b, out, numerics, rounding))


def test_floor_biases_and_nearest_does_not(rng):
    a = rng.standard_normal((64, 512)).astype(F32)
    b = np.abs(rng.standard_normal((512, 64))).astype(F32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bias = {
        r: float((np.asarray(run(a, b, rounding=r)) - exact).mean()) for r in ("nearest", "floor")
    }
    assert bias["floor"] < -0.3 and abs(bias["nearest"]) < 0.05


# ---- accuracy against float64 ----


def test_error_over_the_accumulated_mass_is_small_and_has_no_bias_in_k(rng):
    for k in (64, 512, 4096):
        a = rng.standard_normal((48, k)).astype(F32)
        b = rng.standard_normal((k, 48)).astype(F32)
        error = mass_error(run(a, b), a, b)
        assert np.abs(error).max() < 4 * k**0.5 * 2.0**-24
        assert abs(error.mean()) < 4 * 2.0**-24  # does not grow with K


def test_operands_already_in_bf16_give_the_bits_of_rounded_float32(rng):
    a = rng.standard_normal((40, 60)).astype(F32)
    b = rng.standard_normal((60, 50)).astype(F32)
    want = jax_xdna.dot(a, b)
    same_bits(jax_xdna.dot(round_bf16(a), b.astype(BF16)), want)
