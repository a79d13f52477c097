"""What each policy of jax.checkpoint keeps of offloaded products, as docs/transforms.md tells."""

import jax
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from oracle import same_bits
from programs import ALWAYS, matmul, normal, primitives

import jax_xdna

# Policy, and the products of one gradient step when offload is around the whole step, and when it
# is inside jax.grad: 3 forward, 6 backward, and the forward ones that are computed again. Inside,
# the policy meets jax_xdna's primitive, which the policies about dots do not know.
POLICIES = {
    "everything": (policies.everything_saveable, 9, 9),
    "nothing": (policies.nothing_saveable, 12, 12),
    "dots": (policies.dots_saveable, 9, 12),
    "no batch": (policies.dots_with_no_batch_dims_saveable, 9, 12),
    "only named": (policies.save_only_these_names("product"), 9, 9),
    "any but named": (policies.save_anything_except_these_names("product"), 9, 9),
    "both": (
        policies.save_from_both_policies(
            policies.dots_saveable, policies.save_only_these_names("product")
        ),
        9,
        9,
    ),
    "named to host": (
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["product"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        9,
        9,
    ),
    "dots to host": (policies.offload_dot_with_no_batch_dims("device", "pinned_host"), 9, 12),
}


def network(dot, policy):
    def f(x, w):
        for _ in range(3):
            x = jnp.sin(checkpoint_name(dot(x, w), "product"))
        return jnp.sum(x)

    return f if policy is None else jax.checkpoint(f, policy=policy)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_keeps_what_it_says_and_changes_no_bit(rng, name):
    policy, around, inside = POLICIES[name]
    x, w = normal(rng, 5, 8), normal(rng, 8, 8)
    want = jax.jit(jax.value_and_grad(network(matmul, None), (0, 1)))(x, w)
    whole = jax_xdna.offload(jax.value_and_grad(network(jnp.matmul, policy), (0, 1)), policy=ALWAYS)
    inner = jax.value_and_grad(network(matmul, policy), (0, 1))
    loss = jax.value_and_grad(jax_xdna.offload(network(jnp.matmul, policy), policy=ALWAYS), (0, 1))
    counts = []
    for step in (whole, inner, loss):
        counts.append(primitives(jax.make_jaxpr(step)(x, w)).count("jax_xdna_gemm"))
        for got, expected in zip(
            jax.tree.leaves(jax.jit(step)(x, w)), jax.tree.leaves(want), strict=True
        ):
            same_bits(got, expected)
    assert counts == [around, inside, inside]


@pytest.mark.parametrize(("name", "around", "inside"), [("named", 6, 6), ("dots", 6, 0)])
def test_products_move_to_host_memory_and_back(rng, name, around, inside):
    """Each of the three is put there and taken back; where a policy knows no product, none is."""
    policy = POLICIES[f"{name} to host"][0]
    x, w = normal(rng, 5, 8), normal(rng, 8, 8)
    whole = jax_xdna.offload(jax.grad(network(jnp.matmul, policy)), policy=ALWAYS)
    loss = jax.grad(jax_xdna.offload(network(jnp.matmul, policy), policy=ALWAYS))
    moves = [primitives(jax.make_jaxpr(f)(x, w)).count("device_put") for f in (whole, loss)]
    assert moves == [around, inside]
