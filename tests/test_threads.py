"""Several callers at once, several shards, one-thread pools: right values, and no deadlock."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import gemm as oracle
from oracle import same_bits
from programs import normal

import jax_xdna

pytestmark = pytest.mark.timeout(120)


def test_four_python_threads(rng):
    shapes = [(64, 200, 96), (300, 100, 50), (128, 128, 128), (5, 700, 300)]
    operands = [(normal(rng, m, k), normal(rng, k, n)) for m, k, n in shapes]
    want = [np.asarray(oracle(a, b)) for a, b in operands]
    f = jax.jit(jax_xdna.dot)

    def work(i):
        for _ in range(25):
            same_bits(f(*operands[i]), want[i])
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_eight_shards_at_once(rng):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x, w = normal(rng, 8 * 64, 256), normal(rng, 256, 256) / 16
    f = jax.jit(lambda x, w: jax_xdna.dot(jnp.tanh(jax_xdna.dot(x, w)), w))
    want = f(x, w)
    sharded = jax.device_put(x, NamedSharding(mesh, P("x")))
    for _ in range(20):
        same_bits(f(sharded, w), want)


TRAIN = """
import jax, jax.numpy as jnp, numpy as np, jax_xdna
rng = np.random.default_rng(0)
w = [jnp.float32(rng.standard_normal((256, 256)) / 16) for _ in range(3)]
x = jnp.float32(rng.standard_normal((256, 256)))
def loss(w, x):
    for v in w:
        x = jnp.tanh(x @ v)
    return jnp.sum(x ** 2)
step = jax.jit(jax_xdna.offload(jax.value_and_grad(loss), policy=jax_xdna.Policy.always()))
with jax_xdna.profile() as p:
    for _ in range(30):
        value, grads = step(w, x)
        jax.block_until_ready(grads)
assert p.calls == 30 * 8, p.calls
print(float(value))
"""


def train(prefix=(), flags=""):
    run = subprocess.run(
        [*prefix, sys.executable, "-c", TRAIN],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="taskset")
def test_a_pool_with_one_thread():
    assert train(["taskset", "-c", "0"]) == train()


def test_without_xla_s_own_threads():
    assert train(flags="--xla_cpu_multi_thread_eigen=false") == train()


def test_the_interpreter_ends_with_work_in_flight():
    code = TRAIN.split("with jax_xdna.profile()")[0] + "for _ in range(20): step(w, x)\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


WIDE = """
import sys
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np, jax_xdna
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
devices, runs = len(jax.devices()), int(sys.argv[1])
rng = np.random.default_rng(0)
w = [jnp.float32(rng.standard_normal((160, 160)) / 13) for _ in range(16)]
x = jnp.float32(rng.standard_normal((160 * devices, 160)))
mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
x = jax.device_put(x, NamedSharding(mesh, P("x")))
f = jax.jit(lambda x, w: sum(jax_xdna.dot(jnp.tanh(jax_xdna.dot(x, v)), v) for v in w))
want = np.asarray(f(x, w))
def work(_):
    return all(np.array_equal(f(x, w), want) for _ in range(runs))
with jax_xdna.profile() as p:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
print(p.calls)
"""


@pytest.mark.parametrize(
    ("prefix", "devices"), [((), 1), (("taskset", "-c", "0"), 1), ((), 8)], ids=str
)
@pytest.mark.skipif(sys.platform != "linux", reason="taskset")
def test_ten_thousand_calls_do_not_hang(prefix, devices):
    # Graphs as wide as these, called from four threads, fill XLA's pool with waiting callers.
    runs = -(-10_000 // (4 * 32 * devices * 3))
    done = subprocess.run(
        [*prefix, sys.executable, "-c", WIDE, str(runs)],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 4 * runs * 32 * devices
