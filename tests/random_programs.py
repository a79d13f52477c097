"""Random JAX programs: dots of every kind among other operations, nested in control flow."""

import jax
import jax.numpy as jnp
import numpy as np

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def random_dot(rng, values, eligible):
    """A dot_general of two values with random contracted and batch dimensions, then a squashing.

    Sizes are 2 and 3 throughout, so any two dimensions of one size can be paired. Without
    `eligible` its dtype or its precision keeps the dot from the device.
    """
    lhs, rhs = (values[i] for i in rng.integers(len(values), size=2))
    left, right = list(rng.permutation(lhs.ndim)), list(rng.permutation(rhs.ndim))
    pairs = []
    for i in left:
        match = [j for j in right if lhs.shape[i] == rhs.shape[j]]
        if match:
            pairs.append((int(i), int(match[0])))
            right.remove(match[0])
    pairs = pairs[: rng.integers(1, 4)]
    while lhs.ndim + rhs.ndim - 2 * len(pairs) > 4 or not pairs:  # keep ranks small
        axis = max(range(lhs.ndim), key=lambda d: d not in [i for i, _ in pairs])
        lhs = lhs.sum(axis)
        pairs = [(i - (i > axis), j) for i, j in pairs if i != axis]
        if lhs.ndim == 0:
            return lhs.reshape(1, 1) + rhs.sum()
    split = rng.integers(0, len(pairs)) if rng.random() < 0.4 else 0
    batch, contract = pairs[:split], pairs[split:]
    dtypes = [(F32, F32), (BF16, BF16), (F32, BF16)] if eligible else [(F32, F32), (F16, F16)]
    to = dtypes[rng.integers(len(dtypes))]
    precision = None if eligible or to[0] == F16 else jax.lax.Precision.HIGHEST
    preferred = F32 if rng.random() < 0.7 or to[0] != to[1] else None
    out = jax.lax.dot_general(
        lhs.astype(to[0]),
        rhs.astype(to[1]),
        (tuple(zip(*contract, strict=True)), tuple(zip(*batch, strict=True)) or ((), ())),
        precision=precision,
        preferred_element_type=preferred,
    )
    out = out.astype(F32)
    return jnp.tanh(out / 3) if out.ndim else jnp.tanh(out / 3).reshape(1, 1)


def integer_dot(values):
    """A dot of integers that the result depends on, in a way a small change cannot flip."""
    counts = jnp.full(values[0].shape, 2, jnp.int32).reshape(-1)
    return values[0] * (counts @ counts).astype(F32) / 4 / counts.size


def run(rng, values, depth, eligible):
    """One random step after another on a list of float32 values; returns a list of equal types."""
    values = list(values)
    for _ in range(3 if depth == 2 else rng.integers(1, 3)):
        kind = rng.integers(10 if depth else 5)
        slot = int(rng.integers(len(values)))
        x = values[slot]
        if kind < 3:
            made = random_dot(rng, values, eligible)
            values[slot] = x + 0.5 * made.mean() + _fit(made, x.shape)
        elif kind == 3:
            values[slot] = jnp.sin(jnp.swapaxes(x, -1, -2).reshape(x.shape)) + 0.1 * x
        elif kind == 4:
            values[slot] = integer_dot([x])
        else:
            values = nested(rng, values, depth - 1, eligible, kind)
    return values


def _fit(x, shape):
    """The elements of `x`, repeated or cut to fill `shape`."""
    return jnp.resize(x, shape) if x.size else jnp.zeros(shape)


def nested(rng, values, depth, eligible, kind):
    """A sub-program in a random form of control flow."""
    seeds = rng.integers(2**32, size=2)

    def body(values, which=0):
        return run(np.random.default_rng(seeds[which]), values, depth, eligible)

    if kind == 5:
        return jax.lax.scan(lambda c, _: (body(c), c[0].sum()), values, None, length=2)[0]
    if kind == 6:
        # Which branch runs must not depend on the last bits of a product.
        index = jnp.int32(values[0].size % 2)
        return jax.lax.switch(index, [lambda v, i=i: body(v, i) for i in range(2)], values)
    if kind == 7:
        values = jax.lax.stop_gradient(values)  # a while loop has no reverse mode
        return jax.lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, body(s[1])), (0, values)
        )[1]
    if kind == 8:
        wrap = (jax.jit, jax.checkpoint)[rng.integers(2)]
        return wrap(body)(values)
    batched = jax.vmap(body)([jnp.stack([v, 0.5 * v]) for v in values])
    return [v[0] + v[1] for v in batched]


def program(seed, eligible=True):
    """A scalar function of `inputs(seed)`; always the same one for the same seed."""

    def f(values):
        outputs = run(np.random.default_rng(seed), values, 2, eligible)
        return sum(jnp.mean(jnp.sin(v)) for v in outputs), outputs

    return f


def inputs(seed):
    """Three float32 arrays of ranks 2 to 4 with sizes 2 and 3."""
    rng = np.random.default_rng(seed + 1)
    shapes = [tuple(rng.integers(2, 4, size=rank)) for rank in (2, 3, 4)]
    return [jnp.asarray(rng.standard_normal(shape), F32) for shape in shapes]
