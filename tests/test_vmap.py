"""vmap: always one call, and no loop or transpose where a reshape can do."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import F32, LAYOUTS, MODE, same_bits
from programs import ALWAYS, calls, count, hlo, matmul, normal

import jax_xdna
from jax_xdna._partition import factors
from jax_xdna._primitive import gemm

SIZE = {"g": 3, "m": 4, "k": 5, "n": 6}


def operands(rng, layout, ranks, dims, size=2):
    letters = factors(layout, *ranks)[:3]
    arrays = []
    for word, dim in zip(letters, dims, strict=False):
        shape = [SIZE[c] for c in word]
        if dim is not None:
            shape.insert(dim, size)
        arrays.append(jnp.asarray(rng.integers(-8, 9, shape), F32))
    names = [w if d is None else w[:d] + "x" + w[d:] for w, d in zip(letters, dims, strict=False)]

    def reference(out):
        result = letters[2][:out] + "x" + letters[2][out:]
        return np.einsum(f"{names[0]},{names[1]}->{result}", *map(np.asarray, arrays))

    return arrays, reference


@pytest.mark.parametrize(
    "layout, ranks", list(itertools.product(LAYOUTS, itertools.product((2, 3), repeat=2)))
)
def test_every_position_of_the_new_axis(rng, layout, ranks):
    def product(a, b):
        return gemm(a, b, layout=layout, out_dtype=F32, **MODE)

    choices = [
        dims
        for dims in itertools.product(*[(None, *range(rank + 1)) for rank in ranks])
        if dims != (None, None)
    ]
    cases = [operands(rng, layout, ranks, dims) for dims in choices]

    @jax.jit
    def all_of_them(arrays):  # one compilation for all
        return [jax.vmap(product, d)(*x) for d, x in zip(choices, arrays, strict=True)]

    traced = all_of_them.trace([arrays for arrays, _ in cases])
    assert str(traced.jaxpr).count("jax_xdna_gemm[") == len(choices)
    results = traced.lower().compile()([arrays for arrays, _ in cases])
    for got, (_, reference) in zip(results, cases, strict=True):
        same_bits(got, reference(0))


@pytest.mark.parametrize(
    "layout, ranks, dims, out",
    [
        ("NN", (2, 2), (0, None), 0),  # rows of M
        ("NT", (2, 2), (1, None), 1),
        ("TN", (2, 2), (0, None), 0),  # shared b
        ("TN", (2, 2), (1, None), 0),
        ("NN", (2, 2), (None, 0), 0),  # shared a
        ("NN", (2, 2), (None, 1), 1),  # columns of N
        ("NT", (2, 2), (None, 0), 0),
        ("NN", (2, 2), (0, 0), 0),  # a batch
        ("TT", (2, 2), (0, 0), 0),
        ("NN", (3, 3), (0, 0), 0),
        ("NT", (3, 2), (0, None), 0),
        ("NN", (3, 2), (0, 0), 0),
        ("NT", (2, 3), (None, 0), 0),
        ("NN", (3, 2), (None, 0), 0),
    ],
)
def test_nothing_moves_when_a_reshape_can_do(rng, layout, ranks, dims, out):
    (a, b), reference = operands(rng, layout, ranks, dims, size=7)

    def product(a, b):
        return gemm(a, b, layout=layout, out_dtype=F32, **MODE)

    batched = jax.vmap(product, dims, out)
    text = hlo(batched, a, b)
    assert text.count('custom_call_target="jax_xdna_gemm"') == 1
    assert count(text, "transpose", "while", "copy", "fusion") == dict.fromkeys(
        ("transpose", "while", "copy", "fusion"), 0
    )
    same_bits(batched(a, b), reference(out))


@pytest.mark.parametrize("dot", [jax_xdna.dot, matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)])
def test_nested_vmap(rng, dot):
    a = jnp.asarray(rng.integers(-8, 9, (2, 3, 4, 5)), F32)
    b = jnp.asarray(rng.integers(-8, 9, (3, 2, 5, 6)), F32)
    both = jax.vmap(jax.vmap(dot), (0, 1))
    same_bits(both(a, b), jnp.einsum("xymk,yxkn->xymn", a, b))
    assert calls(both, a, b) == 1
    outer = jax.vmap(jax.vmap(dot, (0, None)), (None, 0))
    same_bits(outer(a[0], b[0]), jnp.einsum("amk,bkn->bamn", a[0], b[0]))
    assert calls(outer, a[0], b[0]) == 1


@pytest.mark.parametrize("dot", [jax_xdna.dot, matmul])
def test_vmap_of_grad_and_grad_of_vmap(rng, dot):
    x = jnp.asarray(rng.integers(-2, 3, (7, 3, 4)), F32)
    w = jnp.asarray(rng.integers(-2, 3, (4, 5)), F32)

    def value(dot):
        return lambda w, x: jnp.sum(dot(x, w) ** 2) / 2

    per_example = jax.vmap(jax.grad(value(dot)), (None, 0))
    same_bits(per_example(w, x), jax.vmap(jax.grad(value(jnp.matmul)), (None, 0))(w, x))
    total = jax.grad(lambda w: jax.vmap(value(dot), (None, 0))(w, x).sum())
    same_bits(total(w), per_example(w, x).sum(0))


def test_grad_of_vmap_sums_over_the_batch_inside_one_product(rng):
    x, w = normal(rng, 7, 3, 4), normal(rng, 4, 5)
    grad = jax.grad(lambda w: jnp.sin(jax.vmap(matmul, (0, None))(x, w)).sum())
    assert calls(grad, w) == 2  # forward and dW


def test_vmap_with_an_axis_name_and_a_collective(rng):
    x, w = normal(rng, 4, 3, 5), normal(rng, 5, 6)
    f = jax_xdna.offload(lambda x: jax.lax.psum(x @ w, "i"), policy=ALWAYS)
    got = jax.vmap(f, axis_name="i")(x)
    np.testing.assert_allclose(got[0], jnp.sum(x @ w, 0), rtol=1e-5, atol=1e-5)


USERS = [jax_xdna.dot, matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)]


@pytest.mark.parametrize("dot", USERS)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_in_axes_and_out_axes_anywhere(rng, dot, jit):
    """Negative ones and None too, nested, with the axes of both levels in any place."""
    for inner, outer, out in [
        ((0, None), (None, -1), 1),
        ((1, 0), (-2, None), -1),
        ((None, 2), (0, 0), 0),
        ((-1, -3), (1, 1), 2),
    ]:
        words = ["mk", "kn"]
        for name, axes in (("i", inner), ("o", outer)):
            for side, axis in enumerate(axes):
                if axis is not None:
                    place = axis % (len(words[side]) + 1)
                    words[side] = words[side][:place] + name + words[side][place:]
        size = {"m": 2, "k": 3, "n": 4, "i": 5, "o": 6}
        a, b = (jnp.asarray(rng.integers(-8, 9, [size[c] for c in w]), F32) for w in words)
        mapped = jax.vmap(jax.vmap(dot, inner, out % 3), outer, out % 4)
        result = "mn"[: out % 3] + "i" + "mn"[out % 3 :]
        result = result[: out % 4] + "o" + result[out % 4 :]
        same_bits(jit(mapped)(a, b), np.einsum(f"{words[0]},{words[1]}->{result}", a, b))
        assert calls(mapped, a, b) == 1


@pytest.mark.parametrize("dot", USERS)
def test_a_batch_of_the_left_operand_is_rows_in_the_compiled_call(rng, dot):
    x, w = normal(rng, 7, 3, 4), normal(rng, 4, 5)
    text = hlo(jax.vmap(dot, (0, None)), x, w)
    assert re.findall(r"= f32(\S+?){.*jax_xdna_gemm", text) == ["[21,5]"]
    text = hlo(jax.vmap(dot), x, jnp.stack([w] * 7))
    assert re.findall(r"= f32(\S+?){.*jax_xdna_gemm", text) == ["[7,3,5]"]


@pytest.mark.parametrize("dot", [matmul, jax_xdna.offload(jnp.matmul, policy=ALWAYS)])
def test_the_gradients_under_vmap_compile_to_one_call_each_and_no_loop(rng, dot):
    x, w = normal(rng, 7, 3, 4), normal(rng, 4, 5)
    loss = lambda w, x: jnp.sum(jnp.sin(dot(x, w)))  # noqa: E731
    per_example = jax.vmap(jax.grad(loss), (None, 0))
    total = jax.grad(lambda w, x: jnp.sum(jax.vmap(loss, (None, 0))(w, x)))
    stacked = jax.grad(lambda w, x: jnp.sum(jax.vmap(loss)(w, x)))
    for f, weight in ((per_example, w), (total, w), (stacked, jnp.stack([w] * 7))):
        text = hlo(f, weight, x)
        assert text.count('custom_call_target="jax_xdna_gemm"') == 2  # forward and dW
        assert set(count(text, "while", "transpose", "copy").values()) == {0}
        want = jax.jit(f)(weight, x)
        reference = jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)))
        each = jnp.stack([reference(w, v) for v in x])
        assert jnp.allclose(want, each.sum(0) if f is total else each, atol=0.05)
