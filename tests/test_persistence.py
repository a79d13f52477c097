"""Compiled programs that outlive the process: the compilation cache, and jax.export."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import export
from oracle import F32, same_bits
from programs import ALWAYS, normal

import jax_xdna

CACHED = """
import jax, jax.numpy as jnp, jax_xdna
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
step = jax.jit(jax_xdna.offload(lambda x: jnp.tanh(x @ x.T), policy=jax_xdna.Policy.always()))
before = len(hits)
with jax_xdna.profile() as p:
    y = step(x)
    y.block_until_ready()
print(len(hits) - before, p.calls, float(y.sum()))
"""


def test_a_second_process_takes_the_program_from_the_compilation_cache(tmp_path):
    def run():
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "XLA_FLAGS": ""}
        command = [sys.executable, "-c", CACHED]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, second = run(), run()
    assert first[0] == "0" and int(second[0]) >= 1
    assert first[1:] == second[1:] and second[1] == "1"


ALLOWED = [export.DisabledSafetyCheck.custom_call("jax_xdna_gemm")]


def step(x, w):
    return jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def test_export_refuses_unless_the_call_is_allowed_and_then_gives_the_same_bits(rng):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    x, w = normal(rng, 4, 8), normal(rng, 8, 6)
    offloaded = jax.jit(jax_xdna.offload(step, policy=ALWAYS))
    with pytest.raises(ValueError, match="jax_xdna_gemm"):
        export.export(offloaded)(x, w)
    exported = export.export(offloaded, disabled_checks=ALLOWED)(x, w)
    loaded = export.deserialize(exported.serialize())
    assert loaded.platforms == ("cpu",) and loaded.out_avals[0].dtype == F32
    with jax_xdna.profile() as p:
        got = jax.block_until_ready(loaded.call(x, w))
    assert p.calls == 2
    for a, b in zip(got, offloaded(x, w), strict=True):
        same_bits(a, b)


def test_export_with_a_symbolic_batch(rng):
    (batch,) = export.symbolic_shape("b")
    x, w = jax.ShapeDtypeStruct((batch, 8), F32), normal(rng, 8, 6)
    offloaded = jax.jit(jax_xdna.offload(jnp.matmul, policy=ALWAYS))
    exported = export.export(offloaded, disabled_checks=ALLOWED)(x, w)
    for rows in (3, 5):
        x = normal(rng, rows, 8)
        same_bits(exported.call(x, w), jax_xdna.dot(x, w))
