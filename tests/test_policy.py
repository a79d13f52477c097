"""Policies: the threshold's rule, users' callables, and what is not a policy."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jax_xdna
from jax_xdna import Policy
from jax_xdna._policy import Dot

BASE = Dot("f.py:1", "", 1, 256, 256, 256, "NN", 0, "float32", "float32", "float32", 1)


def taken(policy, **change):
    verdict, reason = policy(dataclasses.replace(BASE, **change))
    assert reason
    return verdict


@pytest.mark.parametrize(
    "m, k, n, verdict",
    [
        (256, 256, 256, True),  # at the boundary
        (255, 256, 256, False),
        (255, 256, 258, True),
        (256, 768, 2304, True),
        (32, 1024, 1024, True),  # 256/8 rows
        (31, 4096, 4096, False),  # thin
        (4096, 31, 4096, False),
        (4096, 4096, 31, False),
        (128, 128, 128, False),
        (8, 50304, 768, False),
    ],
)
def test_threshold_is_the_geometric_mean_with_no_thin_dimension(m, k, n, verdict):
    assert taken(Policy.threshold(256), m=m, k=k, n=n) is verdict
    assert taken(Policy.threshold(256), m=m, k=k, n=n, batch=100) is verdict


def test_threshold_scales_and_can_be_zero():
    assert taken(Policy.threshold(64), m=64, k=64, n=64)
    assert taken(Policy.threshold(0), m=1, k=1, n=1)
    assert not taken(Policy.threshold(512))


@pytest.mark.parametrize("size", [-1, 2.5, "256", True, None])
def test_threshold_refuses_what_is_not_a_size(size):
    with pytest.raises(ValueError, match="min_size is"):
        Policy.threshold(size)


def test_always_and_never():
    assert taken(Policy.always(), m=1) and not taken(Policy.never())
    assert repr(Policy.threshold(64)) == "Policy.threshold(64)"


def test_a_callable_sees_the_dot_and_may_give_a_reason():
    seen = []

    def mine(dot):
        seen.append(dot)
        return dot.layout == "NN", f"layout {dot.layout}"

    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    (row,) = jax_xdna.explain(
        lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32),
        x,
        w,
        policy=mine,
        print=False,
    )
    (dot,) = seen
    assert (dot.batch, dot.m, dot.k, dot.n, dot.calls) == (1, 16, 16, 32, 1)
    assert (dot.lhs_dtype, dot.rhs_dtype, dot.out_dtype) == ("bfloat16", "float32", "float32")
    assert dot.flops == 2 * 16 * 16 * 32 and "test_policy.py:" in dot.source
    assert row.offloaded and row.reason == "layout NN"
    with pytest.raises(dataclasses.FrozenInstanceError):
        dot.m = 3


def test_a_bare_bool_will_do():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    for answer in (True, False):
        (row,) = jax_xdna.explain(jnp.matmul, x, x, policy=lambda dot: answer, print=False)  # noqa: B023
        assert row.offloaded is answer and row.reason


@pytest.mark.parametrize("answer", [None, 1, "yes", (True,), (True, 3), (1, "x"), jnp.array(True)])
def test_another_answer_is_a_type_error_that_shows_it(answer):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(TypeError, match="it must return a bool, or a bool and a reason"):
        jax_xdna.explain(jnp.matmul, x, x, policy=lambda dot: answer, print=False)


@pytest.mark.parametrize("policy", ["always", 256, Policy, [True]])
def test_what_is_not_a_policy(policy):
    with pytest.raises(TypeError, match="policy is"):
        jax_xdna.offload(jnp.matmul, policy=policy)
