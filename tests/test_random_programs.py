"""offload changes nothing that it does not take, in random programs with nested control flow."""

import zlib

import jax
import numpy as np
import pytest
from oracle import same_bits
from programs import ALWAYS, NEVER, primitives
from random_programs import inputs, program

import jax_xdna


def half(dot):
    """Takes about every second dot, always the same ones."""
    return zlib.crc32(repr((dot.m, dot.k, dot.n, dot.layout, dot.batch)).encode()) % 2 == 0


def derivative(seed, eligible=True):
    return jax.value_and_grad(program(seed, eligible), has_aux=True)


def compiled(f):
    """jit that spends less on optimizing code that runs once."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("seed", range(8))
def test_taken_dots_cost_bf16_and_left_ones_nothing(seed):
    f, x = derivative(seed), inputs(seed)
    untouched = jax_xdna.offload(f, policy=NEVER)
    program_of = lambda f: primitives(jax.make_jaxpr(f)(x))  # noqa: E731
    assert program_of(untouched) in (program_of(f), ["jit", *program_of(f)])
    want = compiled(f)(x)
    policy = (ALWAYS, half)[seed % 2]
    rows = jax_xdna.explain(f, x, policy=policy, print=False)
    got = compiled(jax_xdna.offload(f, policy=policy))(x)
    taken = sum(row.offloaded for row in rows)
    # Each bf16 operand is off by at most 2^-9; every step keeps or shrinks what came before.
    bound = 2.0**-8 * (4 + taken**0.5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.linalg.norm(a - b) <= bound * (np.linalg.norm(b) + 0.1), (taken, bound)


@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("policy", [ALWAYS, NEVER])
def test_ineligible_and_unwanted_dots_stay_bit_for_bit(seed, policy):
    f, x = derivative(seed, eligible=policy is NEVER), inputs(seed)
    rows = jax_xdna.explain(f, x, policy=policy, print=False)
    assert rows and not any(row.offloaded for row in rows)
    got, want = compiled(jax_xdna.offload(f, policy=policy))(x), compiled(f)(x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same_bits(a, b)


def test_the_programs_are_worth_testing():
    names, rows = set(), []
    for seed in range(8):
        f, x = derivative(seed), inputs(seed)
        names |= set(primitives(jax.make_jaxpr(f)(x)))
        rows += jax_xdna.explain(f, x, policy=(ALWAYS, half)[seed % 2], print=False)
    assert {"scan", "while", "cond", "dot_general"} <= names and names & {"remat2", "checkpoint"}
    assert len(rows) > 50 and {row.offloaded for row in rows} == {True, False}
    assert {row.layout for row in rows} == {"NN", "NT", "TN", "TT"}
    assert any(row.batch > 1 for row in rows) and any(row.calls > 1 for row in rows)
    assert {row.lhs_dtype for row in rows} >= {"float32", "bfloat16", "int32"}
