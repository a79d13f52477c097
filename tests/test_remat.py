"""jax.checkpoint: products are recomputed or kept as its policy says."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from oracle import same_bits
from programs import ALWAYS, matmul, normal, primitives

import jax_xdna


def network(dot, **options):
    @jax.checkpoint
    def plain(x, w):
        return jnp.sin(dot(jnp.sin(dot(x, w)), w))

    named = jax.checkpoint(
        lambda x, w: jnp.sin(checkpoint_name(dot(jnp.sin(dot(x, w)), w), "product")), **options
    )
    return lambda x, w: jnp.sum((named if options else plain)(x, w))


@pytest.mark.parametrize("dot", [jax_xdna.dot, matmul])
def test_recomputed_products_have_the_same_bits(rng, dot):
    x, w = normal(rng, 5, 8), normal(rng, 8, 8)
    f = network(dot)
    g = lambda x, w: jnp.sum(jnp.sin(dot(jnp.sin(dot(x, w)), w)))  # noqa: E731
    for got, want in zip(
        jax.jit(jax.grad(f, (0, 1)))(x, w), jax.jit(jax.grad(g, (0, 1)))(x, w), strict=True
    ):
        same_bits(got, want)


def test_a_named_product_can_be_kept(rng):
    x, w = normal(rng, 5, 8), normal(rng, 8, 8)
    keep = jax.checkpoint_policies.save_only_these_names("product")

    def products(policy):
        grad = jax.grad(network(matmul, policy=policy), (0, 1))
        return primitives(jax.make_jaxpr(grad)(x, w)).count("jax_xdna_gemm")

    assert products(keep) < products(jax.checkpoint_policies.nothing_saveable)


def test_offload_outside_sees_the_recomputation(rng):
    x, w = normal(rng, 5, 8), normal(rng, 8, 8)
    step = jax.value_and_grad(network(jnp.matmul), (0, 1))
    rows = jax_xdna.explain(step, x, w, policy=ALWAYS, print=False)
    assert len(rows) > 6 and all(row.offloaded for row in rows)
    assert any("rematted_computation" in row.name_stack for row in rows)
    got = jax.jit(jax_xdna.offload(step, policy=ALWAYS))(x, w)
    want = jax.jit(jax.value_and_grad(network(matmul), (0, 1)))(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same_bits(a, b)


def test_dots_saveable_applies_before_offload(rng):
    x, w = normal(rng, 5, 8), normal(rng, 8, 8)
    keep = jax.checkpoint_policies.dots_saveable
    step = jax.grad(network(jnp.matmul, policy=keep), (0, 1))
    assert len(jax_xdna.explain(step, x, w, policy=ALWAYS, print=False)) == 6
