"""offload: values, what it leaves alone, and everything of the function it keeps."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, F32, same_bits
from oracle import gemm as oracle
from programs import ALWAYS, NEVER, NN, calls, count, hlo, matmul, normal, primitives

import jax_xdna


def mlp(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b.reshape(1, -1))
    return x


def train_step(params, x, y):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((mlp(p, x) - y) ** 2))(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.fixture
def state(rng):
    params = [(normal(rng, 16, 24) / 4, normal(rng, 24)), (normal(rng, 24, 8) / 4, normal(rng, 8))]
    return params, normal(rng, 5, 16), normal(rng, 5, 8)


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y)


@pytest.mark.parametrize(
    "order",
    [
        lambda f, o: o(f),
        lambda f, o: jax.jit(o(f)),
        lambda f, o: o(jax.jit(f)),
        lambda f, o: jax.jit(o(jax.jit(f))),
        lambda f, o: o(o(f)),
    ],
)
def test_a_train_step_within_bf16_and_every_dot_taken(state, order):
    step = order(train_step, functools.partial(jax_xdna.offload, policy=ALWAYS))
    close(step(*state), train_step(*state))
    names = primitives(jax.make_jaxpr(step)(*state))
    assert names.count("jax_xdna_gemm") == 5 and "dot_general" not in names


def test_gradients_taken_afterwards_run_on_the_device_too(state):
    loss = lambda p, x, y: jnp.mean((mlp(p, x) - y) ** 2)  # noqa: E731
    f = jax_xdna.offload(loss, policy=ALWAYS)
    close(jax.jit(jax.value_and_grad(f))(*state), jax.value_and_grad(loss)(*state))
    assert calls(jax.grad(f), *state) == 5


@pytest.mark.parametrize("policy", [NEVER, jax_xdna.Policy.threshold(), lambda dot: False])
def test_what_stays_has_the_same_bits_and_program(state, policy):
    untouched = jax_xdna.offload(train_step, policy=policy)
    for got, want in zip(
        jax.tree.leaves(jax.jit(untouched)(*state)),
        jax.tree.leaves(jax.jit(train_step)(*state)),
        strict=True,
    ):
        same_bits(got, want)
    (call,) = jax.make_jaxpr(untouched)(*state).jaxpr.eqns  # the step as one nested jit
    assert str(call.params["jaxpr"]) == str(jax.make_jaxpr(train_step)(*state))


def test_a_mixed_program_leaves_its_other_dots_as_they_are(rng):
    x, w, v = normal(rng, 4, 8), normal(rng, 8, 16), normal(rng, 16, 2)
    f = lambda x, w, v: ((x @ w) @ v, x @ w)  # noqa: E731
    got = jax.jit(jax_xdna.offload(f, policy=lambda dot: dot.n == 16))(x, w, v)
    same_bits(got[1], oracle(x, w))
    same_bits(got[0], jax.jit(jnp.matmul)(got[1], v))


# ---- transposes around a dot ----


@pytest.mark.parametrize(
    "f, expected_calls",
    [
        (lambda x, w: x @ w.T, 1),
        (lambda x, w: (w @ x.T).T, 1),
        (lambda x, w: x.T.T @ w.T, 1),
        (lambda x, w: jnp.einsum("mk,nk->nm", x, w).T.T, 1),
        (jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), (0, 1)), 3),
        (lambda x, w: jnp.einsum("mk,nk->nm", x, w), 1),
    ],
)
def test_transposes_are_taken_into_the_product(rng, f, expected_calls):
    x, w = normal(rng, 6, 8), normal(rng, 10, 8)
    g = jax_xdna.offload(f, policy=ALWAYS)
    assert "transpose" not in primitives(jax.make_jaxpr(g)(x, w))
    assert calls(g, x, w) == expected_calls and count(hlo(g, x, w), "transpose")["transpose"] == 0
    close(jax.tree.leaves(g(x, w)), jax.tree.leaves(f(x, w)))


def test_a_transpose_that_is_used_otherwise_stays(rng):
    x, w = normal(rng, 6, 8), normal(rng, 10, 8)
    f = lambda x, w: (x @ w.T, w.T + 1)  # noqa: E731
    got = jax_xdna.offload(f, policy=ALWAYS)(x, w)
    same_bits(got[0], oracle(x, w.T))
    same_bits(got[1], w.T + 1)
    both = lambda x, w: (y := x @ w, y.T)  # noqa: E731
    a, b = jax_xdna.offload(both, policy=ALWAYS)(x, w.T)
    same_bits(a, oracle(x, w.T))
    same_bits(b, oracle(x, w.T).T)


# ---- what makes a dot stay ----


@pytest.mark.parametrize(
    "precision",
    [
        "highest",
        "high",
        "float32",
        jax.lax.Precision.HIGH,
        ("default", "highest"),
        jax.lax.DotAlgorithmPreset.F32_F32_F32,
        jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    ],
)
def test_more_precision_than_bf16_stays(rng, precision):
    x = normal(rng, 8, 8)
    f = lambda x: jax.lax.dot_general(x, x, NN, precision=precision)  # noqa: E731
    (row,) = jax_xdna.explain(f, x, policy=ALWAYS, print=False)
    assert not row.offloaded and "asks for more than bfloat16" in row.reason
    assert "jax_xdna_gemm" not in primitives(jax.make_jaxpr(jax_xdna.offload(f, policy=ALWAYS))(x))


@pytest.mark.parametrize(
    "precision", [None, "default", "bfloat16", jax.lax.DotAlgorithmPreset.BF16_BF16_F32]
)
def test_bf16_precision_goes(rng, precision):
    x = normal(rng, 8, 8)
    f = lambda x: jax.lax.dot_general(x, x, NN, precision=precision)  # noqa: E731
    (row,) = jax_xdna.explain(f, x, policy=ALWAYS, print=False)
    assert row.offloaded


def test_the_default_precision_of_the_configuration_counts(rng):
    x = normal(rng, 8, 8)
    with jax.default_matmul_precision("highest"):
        (row,) = jax_xdna.explain(jnp.matmul, x, x, policy=ALWAYS, print=False)
    assert not row.offloaded and "HIGHEST" in row.reason


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.complex64])
def test_other_dtypes_stay(dtype):
    x = jnp.ones((8, 8), dtype)
    (row,) = jax_xdna.explain(jnp.matmul, x, x, policy=ALWAYS, print=False)
    assert not row.offloaded and f"{np.dtype(dtype)} is not float32 or bfloat16" in row.reason
    same_bits(jax_xdna.offload(jnp.matmul, policy=ALWAYS)(x, x).real, (x @ x).real)


def test_float64_and_empty_dots_stay():
    with jax.enable_x64(True):
        f = jax_xdna.offload(jnp.matmul, policy=ALWAYS)
        same_bits(f(np.ones((2, 2)), np.ones((2, 2))), np.full((2, 2), 2.0))
    same_bits(f(jnp.ones((2, 0)), jnp.ones((0, 3))), np.zeros((2, 3), F32))


def test_preferred_element_type_is_kept(rng):
    x = normal(rng, 8, 8).astype(BF16)
    for preferred, out in ((None, BF16), (F32, F32)):
        f = lambda x: jnp.matmul(x, x, preferred_element_type=preferred)  # noqa: E731, B023
        same_bits(jax_xdna.offload(f, policy=ALWAYS)(x), oracle(x, x, out))


# ---- what it keeps of the function ----


def test_signature_name_and_doc():
    f = jax_xdna.offload(train_step)
    assert inspect.signature(f) == inspect.signature(train_step)
    assert f.__name__ == "train_step" and f.__wrapped__ is train_step
    assert jax_xdna.offload(functools.partial(mlp, None)) is not None


def test_leaves_that_are_not_arrays_pass_untouched(rng):
    sentinel = object()
    seen = {}

    def f(x, n, flag, name, *, options, nothing):
        seen.update(n=n, flag=flag, name=name, options=options, nothing=nothing)
        return {"y": x @ x * n, "n": n, "who": sentinel, "none": None, "f": 0.5, "np": np.arange(3)}

    x = normal(rng, 4, 4)
    g = jax_xdna.offload(f, policy=ALWAYS)
    out = g(x, 3, True, "name", options=["batch_stats", sentinel], nothing=None)
    assert type(seen["n"]) is int and seen["flag"] is True and seen["options"][1] is sentinel
    assert out["who"] is sentinel and out["none"] is None and type(out["n"]) is int
    assert type(out["f"]) is float and isinstance(out["np"], np.ndarray)
    same_bits(out["y"], oracle(x, x) * 3)


def test_weak_types_and_scalars(rng):
    x = normal(rng, 3, 3)
    f = lambda x, s: ((x @ x).astype(jnp.bfloat16) * s, s + 1)  # noqa: E731
    g = jax_xdna.offload(f, policy=ALWAYS)
    weak = jnp.asarray(2.0)
    for args in ((x, 2.0), (x, weak), (x, jnp.float32(2))):
        got, want = jax.eval_shape(g, *args), jax.eval_shape(f, *args)
        assert [(v.dtype, v.weak_type) for v in got] == [(v.dtype, v.weak_type) for v in want]
    strong = jax_xdna.offload(lambda x, s: x * s)(jnp.ones(2, BF16), np.float32(2))
    assert strong.dtype == (jnp.ones(2, BF16) * np.float32(2)).dtype


def test_keys_effects_and_closures(rng, capfd):
    x = normal(rng, 4, 4)
    closed_over = normal(rng, 4, 4)

    def f(key, x):
        y = x @ closed_over + jax.random.normal(key, x.shape)
        jax.debug.print("sum {}", y.shape[0])
        return y, jax.random.split(key)

    key = jax.random.key(3)
    for g in (jax_xdna.offload(f, policy=ALWAYS), jax.jit(jax_xdna.offload(f, policy=ALWAYS))):
        y, keys = g(key, x)
        jax.effects_barrier()
        assert capfd.readouterr().out == "sum 4\n"
        want = oracle(x, closed_over) + jax.random.normal(key, x.shape)
        np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
        assert jnp.array_equal(
            jax.random.key_data(keys), jax.random.key_data(jax.random.split(key))
        )


def test_closing_over_a_tracer(rng):
    x = normal(rng, 4, 4)
    f = lambda w: jax_xdna.offload(lambda x: jnp.sum(x @ w), policy=ALWAYS)(x)  # noqa: E731
    same_bits(jax.grad(f)(x), jax.grad(lambda w: jnp.sum(x @ w))(x))
    same_bits(jax.jit(jax.grad(f))(x), jax.grad(lambda w: jnp.sum(x @ w))(x))


def test_vmap_of_offload(rng):
    x, w = normal(rng, 5, 3, 4), normal(rng, 4, 6)
    f = jax.vmap(jax_xdna.offload(jnp.matmul, policy=ALWAYS), (0, None))
    same_bits(f(x, w), jax.vmap(jax_xdna.dot, (0, None))(x, w))
    assert calls(f, x, w) == 1


def test_name_stacks_and_source_lines_survive(rng):
    x = normal(rng, 4, 4)

    def f(x):
        with jax.named_scope("layer"):
            return jnp.sin(x @ x)

    text = hlo(jax_xdna.offload(f, policy=ALWAYS), x)
    (call,) = [
        line for line in text.splitlines() if "jax_xdna_gemm" in line and "custom-call(" in line
    ]
    assert "layer" in call
    (row,) = jax_xdna.explain(jax_xdna.offload(f, policy=ALWAYS), x, print=False)
    assert row.source.startswith(__file__) or "test_offload.py:" in row.source


def test_a_repeated_call_reuses_what_was_compiled(rng):
    x = normal(rng, 4, 4)
    traces = []

    @jax.jit
    def inner(x):
        traces.append(None)
        return x @ x

    f = jax_xdna.offload(inner, policy=ALWAYS)
    first, second = (step_of(f, x)[0].params["jaxpr"] for _ in range(2))
    assert first is second and len(traces) == 1


def step_of(f, *args):
    """The equations of an offloaded function, which a traced program holds as one nested jit."""
    (call,) = jax.make_jaxpr(f)(*args).jaxpr.eqns
    return call.params["jaxpr"].eqns


def test_layers_that_share_a_jaxpr_still_do(rng):
    layer = jax.jit(lambda x, w: jnp.sin(x @ w))
    x, w = normal(rng, 4, 4), normal(rng, 4, 4)
    f = jax_xdna.offload(lambda x, w: layer(layer(layer(x, w), w), w), policy=ALWAYS)
    bodies = [eqn.params["jaxpr"] for eqn in step_of(f, x, w)]
    assert len(bodies) == 3 and bodies[0] is bodies[1] is bodies[2]


def test_numerics_and_rounding_reach_the_device(rng):
    x = normal(rng, 8, 16)
    for mode in ({"numerics": "bfp16"}, {"rounding": "floor"}):
        f = jax_xdna.offload(lambda x: x @ x.T, policy=ALWAYS, **mode)
        same_bits(f(x / 3), oracle(x / 3, x.T / 3, **mode))


def test_a_pallas_kernel_is_left_alone(rng):
    pl = pytest.importorskip("jax.experimental.pallas")
    x = normal(rng, 8, 8)

    def kernel(x, out):
        out[...] = jnp.dot(x[...], x[...])

    f = lambda x: pl.pallas_call(kernel, out_shape=x, interpret=True)(x)  # noqa: E731
    (row,) = jax_xdna.explain(f, x, policy=ALWAYS, print=False)
    assert not row.offloaded and row.reason == "inside a Pallas kernel"


def test_matmul_variants_of_jax_numpy(rng):
    x, y = normal(rng, 2, 3, 4), normal(rng, 2, 4, 5)
    cases = [
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), 1),
        (lambda x, y: jnp.tensordot(x, y[0], 1), 1),
        (lambda x, y: jnp.einsum("bij,bjk->k", x, y), 1),
        (lambda x, y: jnp.vdot(x[0], x[1]), 1),
        (lambda x, y: jax.nn.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None]), 2),
    ]
    for f, expected in cases:
        g = jax_xdna.offload(f, policy=ALWAYS)
        close([g(x, y)], [f(x, y)])
        assert primitives(jax.make_jaxpr(g)(x, y)).count("jax_xdna_gemm") == expected


def test_dots_of_jax_xdna_inside_are_kept(rng):
    x = normal(rng, 4, 4)
    f = jax_xdna.offload(lambda x: matmul(x, x) @ x, policy=NEVER)
    assert primitives(jax.make_jaxpr(f)(x)) == ["jit", "jax_xdna_gemm", "dot_general"]
