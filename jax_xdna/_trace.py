"""From a user's function and its arguments to a jaxpr, and back to the function's results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax_compat as compat


@dataclass
class Traced:
    """A traced call: its jaxpr, the array arguments, and how to put results together."""

    jaxpr: Any
    inputs: list[Any]
    finish: Callable[[Sequence[Any]], Any]


def _is_array(leaf: object) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def trace(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """Traces `fn(*args, **kwargs)`.

    Array leaves of the arguments become inputs. Every other leaf (Python and NumPy scalars,
    strings, None, functions …) reaches `fn` as it is, and so do results that are not JAX arrays
    reach the caller. Flax nnx objects are updated in place, as `fn` would have updated them.
    """
    if split := _split_nnx(fn, args, kwargs):
        pure, inputs_of_pure, update = split
        inner = trace(pure, inputs_of_pure, {})
        return Traced(inner.jaxpr, inner.inputs, lambda outputs: update(inner.finish(outputs)))

    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    dynamic = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    inputs = [jnp.asarray(x) if isinstance(x := leaves[i], np.ndarray) else x for i in dynamic]
    results: list[Any] = []
    out_tree: Any = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal results, out_tree
        values = list(leaves)
        for i, x in zip(dynamic, arrays, strict=True):
            values[i] = x
        rebuilt_args, rebuilt_kwargs = jax.tree.unflatten(tree, values)
        results, out_tree = jax.tree.flatten(fn(*rebuilt_args, **rebuilt_kwargs))
        outputs = [x for x in results if isinstance(x, jax.Array)]
        # Keep no tracer beyond the trace.
        results = [_HOLE if isinstance(x, jax.Array) else x for x in results]
        return outputs

    flat.__name__ = getattr(fn, "__name__", "offloaded")
    # Inside a jit the whole function becomes one nested jit: one equation to bind instead of a
    # second pass over all of them. Outside it would be compiled anew at every call.
    jaxpr = jax.make_jaxpr(jax.jit(flat) if compat.under_jit() else flat)(*inputs)

    def finish(outputs: Sequence[Any]) -> Any:
        rest = iter(outputs)
        return jax.tree.unflatten(out_tree, [next(rest) if x is _HOLE else x for x in results])

    return Traced(jaxpr, inputs, finish)


_HOLE = object()


def _split_nnx(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Callable[[Any], Any]] | None:
    """For a call with nnx objects: a pure function, its arguments, and what finishes the call.

    nnx modules and optimizers are mutated in place. Flattened as pytrees their updates would land
    in copies, so their state goes in and comes out explicitly, as in `nnx.jit`. The function may
    itself be a module or a method of one. None when no nnx object takes part.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    kind = getattr(nnx, "Pytree", None) or nnx.Object  # its name before flax 0.12

    def is_node(x: object) -> bool:
        return isinstance(x, kind)

    if is_node(fn):
        fn, args = type(fn).__call__, (fn, *args)
    elif is_node(owner := getattr(fn, "__self__", None)):
        fn, args = fn.__func__, (owner, *args)  # type: ignore[attr-defined]

    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_node)
    where = [i for i, leaf in enumerate(leaves) if is_node(leaf)]
    if not where:
        return None
    # All nodes together, so that what they share stays shared.
    nodes = tuple(leaves[i] for i in where)
    graph, state = nnx.split(nodes)

    def pure(state: Any, values: list[Any]) -> tuple[Any, Any]:
        copies = nnx.merge(graph, state)
        values = list(values)
        for i, node in zip(where, copies, strict=True):
            values[i] = node
        new_args, new_kwargs = jax.tree.unflatten(tree, values)
        return fn(*new_args, **new_kwargs), nnx.state(copies)

    def update(outputs: tuple[Any, Any]) -> Any:
        result, state = outputs
        nnx.update(nodes, state)
        return result

    pure.__name__ = getattr(fn, "__name__", "offloaded")
    return pure, (state, [None if is_node(leaf) else leaf for leaf in leaves]), update
