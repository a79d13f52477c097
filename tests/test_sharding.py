"""Sharded operands. A bare custom call would silently gather them, and silently sum only its own
part of a sharded K; these tests read the collectives in the HLO and compare values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import BF16, F32, LAYOUTS, MODE, round_bf16, same_bits, stored
from programs import ALWAYS, count, matmul, normal

import jax_xdna
from jax_xdna._primitive import gemm

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
DOTS = [jax_xdna.dot, matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)]


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def integers(rng, *shape):
    return jnp.asarray(rng.integers(-4, 5, shape), F32)


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def collectives(f, *args):
    found = count(jax.jit(f).lower(*args).compile().as_text(), *COLLECTIVES)
    return {name: n for name, n in found.items() if n}


def check(f, want, *args):
    """Compiles, runs, compares; returns the collectives and the result's axes."""
    got = jax.jit(f)(*args)
    same_bits(got, want)
    return collectives(f, *args), tuple(got.sharding.spec) + (None,) * (
        got.ndim - len(got.sharding.spec)
    )


@pytest.mark.parametrize("dot", DOTS)
def test_rows_columns_and_batches_are_cut_without_a_collective(rng, mesh, dot):
    a, b = integers(rng, 8, 12), integers(rng, 12, 16)
    assert check(dot, a @ b, put(mesh, a, "x"), b) == ({}, ("x", None))
    assert check(dot, a @ b, a, put(mesh, b, None, "x")) == ({}, (None, "x"))
    x = integers(rng, 4, 5, 12)
    assert check(dot, x @ b, put(mesh, x, "x"), b)[0] == {}


def test_a_true_batch_is_cut_without_a_collective(rng, mesh):
    a, b = integers(rng, 8, 3, 5), integers(rng, 8, 5, 7)
    found, spec = check(jax_xdna.dot, a @ b, put(mesh, a, "x"), put(mesh, b, "x"))
    assert found == {} and spec == ("x", None, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(rng, mesh, layout):
    a, b = integers(rng, 8, 12), integers(rng, 12, 16)
    x, y = map(jnp.asarray, stored(np.asarray(a), np.asarray(b), layout))
    f = lambda x, y: gemm(x, y, layout=layout, out_dtype=F32, **MODE)  # noqa: E731
    rows = ("x", None) if layout[0] == "N" else (None, "x")
    columns = (None, "x") if layout[1] == "N" else ("x", None)
    assert check(f, a @ b, put(mesh, x, *rows), y)[0] == {}
    assert check(f, a @ b, x, put(mesh, y, *columns))[0] == {}
    both = put(mesh, x, *rows[::-1]), put(mesh, y, *columns[::-1])
    assert check(f, a @ b, *both)[0] == {"all-reduce": 1}


@pytest.mark.parametrize("dot", DOTS)
def test_a_sharded_k_is_summed_over_the_mesh(rng, mesh, dot):
    a, b = integers(rng, 8, 12), integers(rng, 12, 16)
    found, _ = check(dot, a @ b, put(mesh, a, None, "x"), put(mesh, b, "x"))
    assert found == {"all-reduce": 1}
    found, _ = check(dot, a @ b, put(mesh, a, None, "x"), b)
    assert found == {"all-reduce": 1}


def test_a_sharded_k_is_rounded_to_bf16_once(rng, mesh):
    a, b = normal(rng, 8, 12).astype(BF16), normal(rng, 12, 16).astype(BF16)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    got = jax.jit(jax_xdna.dot)(put(mesh, a, None, "x"), put(mesh, b, "x"))
    same_bits(got, exact.astype(F32).astype(BF16))


def test_a_k_that_does_not_divide_is_right(rng, mesh):
    a, b = integers(rng, 8, 12), integers(rng, 12, 16)
    f = lambda a, b: jax_xdna.dot(a[:, :10], b[:10])  # noqa: E731
    check(f, a[:, :10] @ b[:10], put(mesh, a, None, "x"), put(mesh, b, "x"))
    g = lambda a, b: jax_xdna.dot(a[:7], b[:, :9])  # noqa: E731
    check(g, a[:7] @ b[:, :9], put(mesh, a, "x"), put(mesh, b, None, "x"))


@pytest.mark.parametrize("dot", DOTS)
def test_gradients_of_a_data_parallel_and_a_tensor_parallel_layer(rng, mesh, dot):
    x, w = integers(rng, 8, 12), integers(rng, 12, 16)
    loss = lambda dot: lambda w, x: jnp.sum(dot(x, w) * jnp.arange(16.0).reshape(1, 16))  # noqa: E731
    grad, reference = (jax.grad(loss(d), (0, 1)) for d in (dot, jnp.matmul))
    for shardings in ((P(), P("x")), (P(None, "x"), P()), (P("x"), P(None, "x"))):
        args = [put(mesh, v, *s) for v, s in zip((w, x), shardings, strict=True)]
        for got, want in zip(jax.jit(grad)(*args), reference(w, x), strict=True):
            same_bits(got, want)
        assert "all-gather" not in collectives(grad, *args)


def test_a_two_dimensional_mesh_and_a_scan(rng):
    mesh = jax.make_mesh(
        (2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    x, w = integers(rng, 4, 8), jnp.stack([jnp.eye(8)] * 3)

    def f(x, w):
        return jax.lax.scan(lambda x, w: (jax_xdna.dot(x, w), None), x, w)[0]

    rows = put(mesh, x, "d")
    assert check(f, x, rows, w)[0] == {}
    check(f, x, rows, put(mesh, w, None, None, "t"))  # the next step needs whole rows again
    # K over "t", rows over "d": one sum in the body of the loop.
    assert check(f, x, rows, put(mesh, w, None, "t"))[0].get("all-reduce") == 1
    grad = jax.jit(jax.grad(lambda x, w: f(x, w).sum()))
    same_bits(grad(rows, put(mesh, w, None, "t")), np.ones((4, 8), F32))


@pytest.mark.parametrize("dot", DOTS)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_shard_map_with_a_replicated_weight(rng, mesh, dot, check_vma, jit):
    x, w = integers(rng, 8, 12), integers(rng, 12, 16)
    mapped = jax.shard_map(
        dot, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma
    )
    same_bits(jit(mapped)(x, w), x @ w)
    scale = jnp.arange(16.0).reshape(1, 16)
    got = jit(jax.grad(lambda x, w: jnp.sum(mapped(x, w) * scale), (0, 1)))(x, w)
    want = jax.grad(lambda x, w: jnp.sum((x @ w) * scale), (0, 1))(x, w)
    for g, r in zip(got, want, strict=True):
        same_bits(g, r)
    assert collectives(mapped, x, w) == {}


def test_offload_around_a_shard_map(rng, mesh):
    x, w = integers(rng, 8, 12), integers(rng, 12, 16)

    def loss(x, w):
        f = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        return jnp.sum(f(x, w) * jnp.arange(16.0).reshape(1, 16))

    grad = jax.grad(loss, (0, 1))
    rows = jax_xdna.explain(grad, x, w, policy=ALWAYS, print=False)
    assert len(rows) == 3 and all(
        row.offloaded and row.m * row.k * row.n == 2 * 12 * 16 for row in rows
    )
    for got, want in zip(
        jax.jit(jax_xdna.offload(grad, policy=ALWAYS))(x, w), grad(x, w), strict=True
    ):
        same_bits(got, want)


def test_a_shard_map_over_some_axes_only_is_left_alone(rng):
    mesh = jax.make_mesh(
        (2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    x, w = integers(rng, 8, 12), integers(rng, 12, 16)
    f = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}
    )
    (row,) = jax_xdna.explain(jax.jit(f), x, w, policy=ALWAYS, print=False)
    assert not row.offloaded and "some mesh axes only" in row.reason
    same_bits(jax.jit(jax_xdna.offload(f, policy=ALWAYS))(x, w), x @ w)


@pytest.mark.parametrize("dot", DOTS)
def test_an_explicit_mesh(rng, dot):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    a, b = integers(rng, 8, 12), integers(rng, 12, 16)
    x = integers(rng, 4, 5, 12)
    loss = lambda dot: lambda a, b: jnp.sum(dot(a, b) ** 2) / 2  # noqa: E731
    cases = [
        (a, ("x", None), (None, None)),
        (a, (None, None), (None, "x")),
        (x, ("x", None, None), (None, None)),
    ]
    for left, a_spec, b_spec in cases:
        want, want_grads = np.asarray(left @ b), jax.grad(loss(jnp.matmul), (0, 1))(left, b)
        with jax.set_mesh(mesh):
            args = put(mesh, left, *a_spec), put(mesh, b, *b_spec)
            got = jax.jit(dot)(*args)
            same_bits(got, want)
            assert jax.typeof(got).sharding.spec == P(*a_spec[:-1], b_spec[-1])
            grads = jax.jit(jax.grad(loss(dot), (0, 1)))(*args)
            for g, r, v in zip(grads, want_grads, args, strict=True):
                np.testing.assert_allclose(g, r, rtol=1e-2, atol=4)
                assert jax.typeof(g).sharding.spec == jax.typeof(v).sharding.spec


def test_an_explicit_mesh_with_a_sharded_k_sums(rng):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    a, b = integers(rng, 8, 12), integers(rng, 12, 16)
    want = np.asarray(a @ b)
    with jax.set_mesh(mesh):
        args = put(mesh, a, None, "x"), put(mesh, b, "x", None)
        same_bits(jax.jit(jax_xdna.dot)(*args), want)
        numbers = (((1,), (0,)), ((), ()))
        f = lambda a, b: jax_xdna.dot_general(a, b, numbers, out_sharding=P("x", None))  # noqa: E731
        got = jax.jit(f)(*args)
        same_bits(got, want)
        assert jax.typeof(got).sharding.spec == P("x", None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [(None, "x"), ("y", "x")])
@pytest.mark.parametrize("dot", DOTS)
def test_sequence_parallel_rows_are_cut_without_a_gather(rng, kind, spec, dot):
    """(B, T) form the rows of a layer's products, and the K of its weight's gradient."""
    mesh = jax.make_mesh((2, 2), ("y", "x"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    x, w = integers(rng, 2, 4, 12), integers(rng, 12, 16)
    grad = jax.grad(lambda x, w: jnp.sum(dot(x, w) ** 2) / 2, (0, 1))
    want = np.asarray(x @ w)
    want_x, want_w = want @ w.T, np.einsum("btk,btn->kn", x, want)
    with jax.set_mesh(mesh):
        args = put(mesh, x, *spec, None), put(mesh, w, None, None)
        assert check(dot, want, *args) == ({}, (*spec, None))
        got_x, got_w = jax.jit(grad)(*args)
        same_bits(got_x, round_bf16(want) @ np.asarray(w).T)
        assert tuple(got_x.sharding.spec)[:2] == spec
        np.testing.assert_allclose(got_x, want_x, rtol=1e-2, atol=4)
        np.testing.assert_allclose(got_w, want_w, rtol=1e-2, atol=4)
        found = collectives(grad, *args)
        assert found and set(found) == {"all-reduce"}


def test_heads_stay_apart(rng):
    """A projection into (heads, size), as Flax writes attention: heads over the mesh."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, w = integers(rng, 2, 3, 6), integers(rng, 6, 4, 5)
    out = integers(rng, 4, 5, 6)
    dot = jax_xdna.offload(lambda x, w: jnp.einsum("btk,khd->bthd", x, w), policy=ALWAYS)
    heads = check(dot, np.einsum("btk,khd->bthd", x, w), x, put(mesh, w, None, "x"))
    assert heads == ({}, (None, None, "x", None))
    y = integers(rng, 2, 3, 4, 5)
    back = jax_xdna.offload(lambda y, w: jnp.einsum("bthd,hdk->btk", y, w), policy=ALWAYS)
    args = put(mesh, y, None, None, "x"), put(mesh, out, "x")
    assert check(back, np.einsum("bthd,hdk->btk", y, out), *args)[0] == {"all-reduce": 1}
