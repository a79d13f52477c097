"""explain: one row per dot, where it is, what it costs, where it goes and why."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from programs import ALWAYS, NEVER, matmul, normal

import jax_xdna


def explain(f, *args, policy=ALWAYS, **kwargs):
    return jax_xdna.explain(f, *args, policy=policy, print=False, **kwargs)


def line_of(fn):
    return inspect.getsourcelines(fn)[1]


def test_rows_carry_shape_flops_and_the_users_line(rng):
    def f(x, w):
        return jnp.einsum("btk,kn->btn", x, w)

    (row,) = explain(f, normal(rng, 2, 3, 4), normal(rng, 4, 5))
    assert (row.batch, row.m, row.k, row.n, row.layout, row.calls) == (1, 6, 4, 5, "NN", 1)
    assert row.flops == 2 * 6 * 4 * 5 and row.copies == 0
    assert row.source.endswith(f"test_explain.py:{line_of(f) + 1}")
    assert (row.lhs_dtype, row.rhs_dtype, row.out_dtype) == ("float32",) * 3


def test_calls_multiply_the_lengths_of_scans(rng):
    def f(x):
        def outer(x, _):
            x, _ = jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=5)
            return x @ x, None

        return jax.lax.scan(outer, x, None, length=3)[0]

    inner, outer = explain(f, normal(rng, 4, 4))
    assert (inner.calls, outer.calls) == (15, 3)
    assert inner.flops == 15 * 2 * 4**3


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.vmap(f),
        lambda f: lambda x: jax.lax.cond(x[0, 0, 0] > 0, f, lambda x: x, x),
        lambda f: lambda x: jax.lax.while_loop(lambda x: x[0, 0, 0] > 0, f, x),
        lambda f: lambda x: jax.lax.map(f, x),
        lambda f: jax.jit(jax.jit(jax.checkpoint(f))),
    ],
)
def test_it_sees_through_transforms(rng, wrap):
    def f(x):
        return jnp.matmul(x, x)

    (row,) = explain(wrap(f), normal(rng, 2, 4, 4))
    assert row.offloaded and row.source.endswith(f"test_explain.py:{line_of(f) + 1}")


def test_backward_dots_are_rows_of_the_forward_line(rng):
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    rows = explain(jax.jit(jax.grad(loss, (0, 1))), normal(rng, 8, 4), normal(rng, 2, 8))
    assert [row.layout for row in rows] == ["NN", "TN", "NT"] or len(rows) == 3
    assert len({row.source for row in rows}) == 1
    assert sum("transpose(jvp(" in row.name_stack for row in rows) == 2


def test_flax_rows_name_the_layer_and_the_users_line(rng):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="first")(x)

    x = normal(rng, 2, 4)
    params = Net().init(jax.random.key(0), x)
    (row,) = explain(Net().apply, params, x)
    assert "first" in row.name_stack
    assert row.source.endswith(f"test_explain.py:{line_of(Net) + 3}")


def test_reasons(rng):
    x = normal(rng, 300, 300)

    def f(x):
        y = x @ x
        y = y[:4] @ x
        y = y.astype(jnp.float16) @ x.astype(jnp.float16)
        return jnp.matmul(y.astype(jnp.float32), x, precision="highest")

    rows = jax_xdna.explain(f, x, print=False)
    assert [row.offloaded for row in rows] == [True, False, False, False]
    for row, word in zip(rows, ("at least 256", "thin", "float16", "HIGHEST"), strict=True):
        assert word in row.reason


def test_it_agrees_with_offload_and_computes_nothing(rng):
    def f(x):
        return jnp.sum((x @ x)[:2] @ x)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    policy = lambda dot: dot.m > 2  # noqa: E731
    with jax_xdna.profile() as p:
        rows = explain(jax.grad(f), x, policy=policy)
    assert p.calls == 0
    jaxpr = str(jax.make_jaxpr(jax_xdna.offload(jax.grad(f), policy=policy))(x))
    assert jaxpr.count("jax_xdna_gemm[") == sum(row.offloaded for row in rows) > 0
    assert jaxpr.count("dot_general[") == sum(not row.offloaded for row in rows) > 0


def test_products_of_this_package_are_listed(rng):
    x = normal(rng, 4, 8)
    rows = explain(lambda x: jax_xdna.dot(x, x.T) + matmul(x, x.T), x, policy=NEVER)
    assert [row.reason for row in rows] == ["already a jax_xdna product"] * 2
    assert all(row.offloaded and (row.m, row.k, row.n) == (4, 8, 4) for row in rows)


def test_the_printed_table(rng, capsys):
    x = normal(rng, 300, 300)
    rows = jax_xdna.explain(lambda x: x @ x + (x[:4] @ x)[0, 0], x)
    out = capsys.readouterr().out
    head, rule, *lines, total = out.splitlines()
    assert len(rows) == len(lines) == 2 and set(rule) == {"-", " "}
    assert head.index("why") == lines[0].index(rows[0].reason) == lines[1].index(rows[1].reason)
    assert "1×300×300×300" in lines[0] and "device" in lines[0] and "54 M" in lines[0]
    assert "CPU" in lines[1] and total.startswith("2 dots, 54.7 MFLOP in total; 1 dots with 98.7%")
    assert jax_xdna.explain(lambda x: x, x) == [] and capsys.readouterr().out == "no dots\n"


def test_static_and_keyword_arguments(rng):
    def f(x, n, *, flip):
        return x @ (x.T if flip else x) * n

    assert len(explain(f, normal(rng, 4, 4), 3, flip=True)) == 1
