"""What tests look at in a program: its calls, its copies, and values to compare with."""

import re

import jax
import jax.numpy as jnp

import jax_xdna

ALWAYS = jax_xdna.Policy.always()
NEVER = jax_xdna.Policy.never()
NN = (((1,), (0,)), ((), ()))


def matmul(a, b):
    """The last dimension of a with the first of b, through dot_general."""
    return jax_xdna.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())))


def hlo(fn, *args):
    """Optimized HLO of `fn(*args)`."""
    return jax.jit(fn).lower(*args).compile().as_text()


def count(text, *instructions):
    """How often each HLO instruction occurs; fusions' bodies included."""
    return {name: len(re.findall(rf"[ )]{name}(?:-start)?\(", text)) for name in instructions}


def calls(fn, *args):
    """Number of our custom calls in the optimized HLO."""
    return len(re.findall(r'custom_call_target="jax_xdna_gemm"', hlo(fn, *args)))


def rounded(x):
    """bfloat16 values in float32, so that a float32 reference multiplies the same numbers."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def normal(rng, *shape):
    return rounded(jnp.asarray(rng.standard_normal(shape), jnp.float32))


def primitives(jaxpr):
    """Names of all primitives of a jaxpr, nested ones too."""
    from jax_xdna import _jax_compat as compat

    names = []
    for eqn in compat.equations(jaxpr):
        names.append(eqn.primitive.name)
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if compat.is_jaxpr(item):
                    names += primitives(item)
    return names
