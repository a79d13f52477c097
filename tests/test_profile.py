"""profile: calls, FLOPs and times of what ran inside the block, and nothing else."""

import jax
import jax.numpy as jnp
from programs import ALWAYS, normal

import jax_xdna


def test_rows_per_shape_with_exact_counts(rng):
    a, b = normal(rng, 70, 80), normal(rng, 80, 90)
    jax_xdna.dot(a, b).block_until_ready()
    with jax_xdna.profile() as p:
        for _ in range(3):
            jax_xdna.dot(a, b).block_until_ready()
        jax_xdna.dot(a.T, a, numerics="bfp16").block_until_ready()
    jax_xdna.dot(a, b).block_until_ready()  # outside
    by_shape = {(row.m, row.k, row.n): row for row in p.rows}
    assert set(by_shape) == {(70, 80, 90), (80, 70, 80)} and p.calls == 4
    row = by_shape[70, 80, 90]
    assert (row.device, row.layout, row.numerics, row.batch, row.calls) == (
        "emulated",
        "NN",
        "bf16",
        1,
        3,
    )
    assert row.flops == 3 * 2 * 70 * 80 * 90
    assert by_shape[80, 70, 80].numerics == "bfp16"
    assert p.flops == sum(row.flops for row in p.rows)


def test_stage_times_add_up(rng):
    a = normal(rng, 400, 400)
    with jax_xdna.profile() as p:
        jax_xdna.dot(a, a).block_until_ready()
    (row,) = p.rows
    work = row.pack_a + row.pack_b + row.run + row.unpack
    assert 0 < row.run and 0 < row.seconds
    assert work <= row.seconds * row.threads * 1.1 and 1 <= row.threads
    assert (p.seconds, p.run, p.pack_a, p.pack_b, p.unpack) == (
        row.seconds,
        row.run,
        row.pack_a,
        row.pack_b,
        row.unpack,
    )


def test_blocks_nest_and_can_be_read_from_inside(rng):
    a = normal(rng, 8, 8)
    with jax_xdna.profile() as outer:
        jax_xdna.dot(a, a).block_until_ready()
        assert outer.calls == 1
        with jax_xdna.profile() as inner:
            jax_xdna.dot(a, a).block_until_ready()
    assert (outer.calls, inner.calls) == (2, 1)


def test_scanned_products_count_each_time(rng):
    a = normal(rng, 8, 8)
    f = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=7)[0])
    g = jax_xdna.offload(f, policy=ALWAYS)
    with jax_xdna.profile() as p:
        jax.block_until_ready(g(a))
    assert p.calls == 7 == sum(r.calls for r in jax_xdna.explain(f, a, policy=ALWAYS, print=False))


def test_the_table(rng):
    with jax_xdna.profile() as p:
        pass
    assert str(p) == "no calls" and p.rows == [] and p.seconds == 0
    with jax_xdna.profile() as p:
        jax_xdna.dot(jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))).block_until_ready()
    head, rule, line, total = str(p).splitlines()
    assert "2×3×4×5" in line and "pack A" in head and total.startswith("1 calls, 240 FLOP in ")
