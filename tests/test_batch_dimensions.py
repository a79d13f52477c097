"""Several batch dimensions: one call, nothing copied, and each of them can be sharded."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import F32, LAYOUTS, MODE, same_bits
from programs import ALWAYS, count, hlo, primitives

import jax_xdna
from jax_xdna._partition import factors
from jax_xdna._primitive import gemm

RANKS = [(4, 4), (4, 2), (2, 4), (5, 5)]
SIZE = dict(zip("ghimkn", (2, 3, 2, 4, 5, 6), strict=True))
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Attention as Flax and GPT-2 write it: two batch dimensions, one of them interleaved.
SCORES = "bqhd,bkhd->bhqk"


def integers(rng, *shape):
    return jnp.asarray(rng.integers(-3, 4, shape), F32)


def product(layout):
    return lambda a, b: gemm(a, b, layout=layout, out_dtype=F32, **MODE)


def operands(rng, letters):
    return [integers(rng, *(SIZE[c] for c in word)) for word in letters]


@pytest.mark.parametrize("layout, ranks", list(itertools.product(LAYOUTS, RANKS)))
def test_values_and_cotangents(rng, layout, ranks):
    letters = factors(layout, *ranks)[:3]
    a, b, c = operands(rng, letters)
    x, y, z = letters
    got, pull = jax.vjp(jax.jit(product(layout)), a, b)
    same_bits(got, np.einsum(f"{x},{y}->{z}", a, b))
    same_bits(pull(c)[0], np.einsum(f"{z},{y}->{x}", c, b))
    same_bits(pull(c)[1], np.einsum(f"{z},{x}->{y}", c, a))
    assert primitives(jax.make_jaxpr(pull)(c)).count("jax_xdna_gemm") == 2
    text = hlo(product(layout), a, b)
    assert text.count('custom_call_target="jax_xdna_gemm"') == 1
    assert set(count(text, "transpose", "copy", "while", "fusion").values()) == {0}


@pytest.mark.parametrize("layout, ranks", list(itertools.product(LAYOUTS, RANKS[:3])))
def test_vmap_at_every_position(rng, layout, ranks):
    letters = factors(layout, *ranks)[:3]
    places = [(None, *range(rank + 1)) for rank in ranks]
    choices = [dims for dims in itertools.product(*places) if dims != (None, None)]
    choices = choices[:: 1 if len(choices) < 16 else 3]

    def case(dims):
        names = [
            w if d is None else w[:d] + "x" + w[d:] for w, d in zip(letters, dims, strict=False)
        ]
        arrays = [integers(rng, *({**SIZE, "x": 2}[c] for c in word)) for word in names]
        return arrays, np.einsum(f"{names[0]},{names[1]}->x{letters[2]}", *arrays)

    cases = [case(dims) for dims in choices]
    run = jax.jit(
        lambda all_of: [
            jax.vmap(product(layout), dims)(*x) for dims, x in zip(choices, all_of, strict=True)
        ]
    )
    arrays = [x for x, _ in cases]
    assert primitives(jax.make_jaxpr(run)(arrays)).count("jax_xdna_gemm") == len(cases)
    for got, (_, want) in zip(run(arrays), cases, strict=True):
        same_bits(got, want)


def test_explain_counts_the_whole_batch(rng):
    q, k = integers(rng, 2, 4, 3, 5), integers(rng, 2, 6, 3, 5)
    f = lambda q, k: jnp.einsum(SCORES, q, k)  # noqa: E731
    for fn in (f, jax_xdna.offload(f, policy=ALWAYS)):
        (row,) = jax_xdna.explain(fn, q, k, policy=ALWAYS, print=False)
        assert (row.batch, row.m, row.k, row.n) == (6, 4, 5, 6) and row.offloaded


@pytest.mark.parametrize("spec", [("x",), (None, "x"), ("y", "x")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_inner_batch_dimension_is_cut_without_a_collective(rng, spec, kind):
    mesh = jax.make_mesh((2, 2), ("y", "x"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    q, k = integers(rng, 2, 4, 6, 5), integers(rng, 2, 4, 3, 5)
    dot = jax_xdna.offload(lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), policy=ALWAYS)
    gradient = jax.grad(lambda q, k: jnp.sum(dot(q, k) * dot(q, k)) / 2, (0, 1))
    want = np.einsum("bhqd,bhkd->bhqk", q, k)
    want_gradient = np.einsum("bhqk,bhkd->bhqd", want, k), np.einsum("bhqk,bhqd->bhkd", want, q)
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(x, NamedSharding(mesh, P(*spec, *[None] * (4 - len(spec)))))
            for x in (q, k)
        ]
        compiled = jax.jit(dot).lower(*args).compile()
        assert set(count(compiled.as_text(), *COLLECTIVES).values()) == {0}
        got = compiled(*args)
        same_bits(got, want)
        assert tuple(got.sharding.spec)[: len(spec)] == spec
        for g, r in zip(jax.jit(gradient)(*args), want_gradient, strict=True):
            np.testing.assert_allclose(g, r, rtol=2e-2, atol=2)
        assert set(count(hlo(gradient, *args), *COLLECTIVES).values()) == {0}
        rows = jax_xdna.explain(
            lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), *args, policy=ALWAYS, print=False
        )
        assert all(row.offloaded for row in rows)
