"""Shape logic: every dot_general is a GEMM, and the ones that matter copy nothing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import F32, round_bf16, same_bits

import jax_xdna
from jax_xdna import _shapes
from jax_xdna._partition import factors

NONE = ((), ())


@pytest.mark.parametrize(
    "lhs, rhs, numbers, layout, batch, m, k, n",
    [
        ((4, 8, 16), (16, 32), (((2,), (0,)), NONE), "NN", 1, 32, 16, 32),  # dense, forward
        ((4, 8, 32), (16, 32), (((2,), (1,)), NONE), "NT", 1, 32, 32, 16),  # dX
        ((4, 8, 32), (4, 8, 16), (((0, 1), (0, 1)), NONE), "TN", 1, 32, 32, 16),  # dW
        ((16, 5), (7, 16), (((0,), (1,)), NONE), "TT", 1, 5, 16, 7),
        ((3, 5, 6), (3, 6, 7), (((2,), (1,)), ((0,), (0,))), "NN", 3, 5, 6, 7),
        ((2, 3, 5, 6), (2, 3, 7, 6), (((3,), (3,)), ((0, 1), (0, 1))), "NT", 6, 5, 6, 7),
        ((1, 5, 6), (1, 6, 7), (((2,), (1,)), ((0,), (0,))), "NN", 1, 5, 6, 7),
        # A dimension of size 1 is never in the way.
        ((5, 1, 6), (6, 7), (((2,), (0,)), NONE), "NN", 1, 5, 6, 7),
        ((6, 1, 5), (6, 7), (((0,), (0,)), NONE), "TN", 1, 5, 6, 7),
        # The order of contracted dimensions is free when both sides agree.
        ((4, 8, 32), (4, 8, 16), (((1, 0), (1, 0)), NONE), "TN", 1, 32, 32, 16),
    ],
)
def test_common_dots_are_reshapes_only(lhs, rhs, numbers, layout, batch, m, k, n):
    plan = _shapes.canonicalize(lhs, rhs, numbers)
    assert (plan.layout, plan.batch, plan.m, plan.k, plan.n) == (layout, batch, m, k, n)
    assert plan.copies == 0
    # Dimensions stay apart, so that each can be sharded; those of size 1 go.
    for shape, operand in ((lhs, plan.lhs), (rhs, plan.rhs)):
        assert operand.shape == tuple(size for size in shape if size != 1)


def test_interleaved_dimensions_copy_only_the_operand_that_has_them():
    # Attention as Flax writes it: (batch, time, heads, size).
    plan = _shapes.canonicalize((2, 5, 3, 4), (2, 3, 7, 4), (((3,), (3,)), ((0, 2), (0, 1))))
    assert plan.lhs.permutation is not None and plan.rhs.permutation is None
    assert (plan.batch, plan.m, plan.k, plan.n) == (6, 5, 4, 7)


def test_contracted_dimensions_in_conflicting_order_copy_the_smaller_operand():
    plan = _shapes.canonicalize((4, 8, 1000), (8, 4, 2), (((0, 1), (1, 0)), NONE))
    assert plan.lhs.permutation is None and plan.rhs.permutation is not None


def all_dimension_numbers(lhs_rank, rhs_rank):
    for count in range(min(lhs_rank, rhs_rank) + 1):
        for left in itertools.permutations(range(lhs_rank), count):
            for right in itertools.permutations(range(rhs_rank), count):
                for batch in range(count + 1):
                    yield (left[batch:], right[batch:]), (left[:batch], right[:batch])


@pytest.mark.parametrize("ranks", [(1, 1), (1, 3), (2, 2), (3, 2), (3, 3)])
def test_every_dimension_number_gives_the_value_of_lax(rng, ranks):
    for numbers in all_dimension_numbers(*ranks):
        (lc, rc), (lb, rb) = numbers
        lhs_shape = [2, 3, 4][: ranks[0]]
        rhs_shape = [5, 1, 6][: ranks[1]]
        for i, j in zip((*lc, *lb), (*rc, *rb), strict=True):
            rhs_shape[j] = lhs_shape[i]
        a, b = (rng.integers(-8, 8, s).astype(F32) for s in (lhs_shape, rhs_shape))
        plan = _shapes.canonicalize(tuple(lhs_shape), tuple(rhs_shape), numbers)
        x, y = (
            np.transpose(v, o.permutation or range(v.ndim)).reshape(o.shape)
            for v, o in ((a, plan.lhs), (b, plan.rhs))
        )
        letters = factors(plan.layout, x.ndim, y.ndim, plan.ranks)
        got = np.einsum(f"{letters.a},{letters.b}->{letters.c}", x, y)
        expected = einsum_of(a, b, numbers)
        assert expected.shape == plan.out_shape, numbers
        np.testing.assert_array_equal(got.reshape(plan.out_shape), expected, str(numbers))


def einsum_of(a, b, numbers):
    """dot_general by its definition: batch, then lhs free, then rhs free dimensions."""
    (lc, rc), (lb, rb) = numbers
    left = "abcd"[: a.ndim]
    names = dict(zip((*rc, *rb), (left[d] for d in (*lc, *lb)), strict=True))
    right = "".join(names.get(d, "wxyz"[d]) for d in range(b.ndim))
    batch = "".join(left[d] for d in lb)
    free = [c for d, c in enumerate(left) if d not in (*lc, *lb)]
    free += [c for d, c in enumerate(right) if d not in (*rc, *rb)]
    return np.einsum(f"{left},{right}->{batch}{''.join(free)}", a, b)


def test_an_operand_seen_through_a_transpose(rng):
    a, b = rng.integers(-8, 8, (4, 2, 3)).astype(F32), rng.integers(-8, 8, (3, 5)).astype(F32)
    plan = _shapes.canonicalize(a.shape, b.shape, (((2,), (0,)), NONE), lhs_order=(1, 0, 2))
    assert plan.out_shape == (2, 4, 5) and plan.copies == 1
    plan = _shapes.canonicalize(b.shape, b.shape, (((1,), (0,)), NONE), lhs_order=(1, 0))
    assert plan.layout == "TN" and plan.copies == 0 and plan.out_shape == (5, 5)


@pytest.mark.parametrize("numbers", [(((2,), (0,)), NONE), (((0, 2), (0, 1)), NONE)])
def test_dot_general_runs_the_plan(rng, numbers):
    a = rng.standard_normal((3, 4, 5)).astype(F32)
    b = rng.standard_normal((5, 6) if numbers[0][0] == (2,) else (3, 5, 6)).astype(F32)
    want = jax.lax.dot_general(round_bf16(a), round_bf16(b), numbers, precision="highest")
    np.testing.assert_allclose(jax_xdna.dot_general(a, b, numbers), want, rtol=1e-5, atol=1e-5)


MATMUL = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5, 3)),
    ((7, 2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((5,), (2, 5, 3)),
    ((2, 4, 5), (5,)),
    ((2, 4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 6)),
    ((2, 3, 4, 5), (3, 5, 6)),
    ((1, 4, 5), (1, 1, 5, 6)),
    ((0, 4, 5), (5, 3)),
    ((0, 4, 5), (1, 5, 3)),
    ((4, 0), (0, 3)),
    ((0, 5), (5, 0)),
    ((2, 4, 5), (2, 5, 0)),
    ((1, 4, 5), (0, 5, 3)),
]


@pytest.mark.parametrize("a_shape, b_shape", MATMUL)
def test_dot_has_the_shapes_and_values_of_matmul(rng, a_shape, b_shape):
    a, b = rng.integers(-8, 8, a_shape).astype(F32), rng.integers(-8, 8, b_shape).astype(F32)
    same_bits(jax_xdna.dot(a, b), np.matmul(a, b))
    # Gradients too, where lax gives them by its own rules.
    ours, theirs = (
        jax.grad(lambda x, y: (f(x, y) ** 2).sum() / 2, (0, 1))(a, b)  # noqa: B023
        for f in (jax_xdna.dot, lambda x, y: jnp.matmul(x, y, precision="highest"))
    )
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=2)


@pytest.mark.parametrize(
    "a_shape, b_shape, numbers",
    [
        ((0, 3), (3, 2), (((1,), (0,)), NONE)),
        ((2, 0), (0, 3), (((1,), (0,)), NONE)),
        ((0, 2, 3), (0, 3, 4), (((2,), (1,)), ((0,), (0,)))),
        ((2, 2, 0), (2, 0, 4), (((2,), (1,)), ((0,), (0,)))),
    ],
)
def test_empty_sizes_are_those_of_lax(a_shape, b_shape, numbers):
    a, b = np.ones(a_shape, F32), np.ones(b_shape, F32)
    for jit in (jax.jit, lambda f: f):
        got = jit(lambda x, y: jax_xdna.dot_general(x, y, numbers))(a, b)
        same_bits(got, jax.lax.dot_general(a, b, numbers))
