"""Errors while a program runs, and programs that run while the interpreter ends."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import F32, MODE, same_bits
from programs import ALWAYS, normal

import jax_xdna
from jax_xdna._primitive import gemm

pytestmark = pytest.mark.timeout(120)


def scanned(body):
    return jax.jit(lambda w, x: jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0])


def usable(rng):
    w, x = normal(rng, 3, 64, 64) / 8, normal(rng, 64, 64)
    want = x
    for v in w:
        want = jax_xdna.dot(want, v)
    same_bits(scanned(jax_xdna.dot)(w, x), want)
    return True


@pytest.mark.parametrize("size", [4, 300])  # on the calling thread, and on XLA's pool
def test_a_device_lost_in_a_scanned_body(rng, size):
    """The device is checked when a product is traced; here it is gone when the product runs."""

    def body(x, w):
        return gemm(x, w, layout="NN", out_dtype=F32, **{**MODE, "device": "absent"})

    w, x = normal(rng, 3, size, size), normal(rng, size, size)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="UNAVAILABLE.*absent"):
            jax.block_until_ready(scanned(body)(w, x))
        assert usable(rng)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_callback_that_raises_between_products(rng):
    calls = []

    def check(x):
        calls.append(x.shape)
        if len(calls) == 2:
            raise FloatingPointError("the second step")
        return x

    def body(x, w):
        x = jax.pure_callback(check, x, x)
        return jnp.tanh(x @ w)

    f = jax.jit(jax_xdna.offload(lambda w, x: scanned(body)(w, x), policy=ALWAYS))
    w, x = normal(rng, 4, 200, 200), normal(rng, 200, 200)
    with pytest.raises(Exception, match="the second step"):
        jax.block_until_ready(f(w, x))
    assert len(calls) == 2 and usable(rng)
    jax.block_until_ready(f(w, x))  # and so is the very program that failed


def test_four_threads_that_trace_compile_and_train_at_once(rng):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - grad, loss

    shared = jax_xdna.offload(step, policy=ALWAYS)
    operands = [(normal(rng, n, n) / n**0.5, normal(rng, 3 * n, n)) for n in (40, 64, 96, 130)]

    def train(i):
        jitted, (w, x) = jax.jit(shared), operands[i]
        for _ in range(10):
            w, loss = jitted(w, x)
        return np.asarray(w), float(loss)

    alone = [train(i) for i in range(4)]
    jax.clear_caches()
    shared = jax_xdna.offload(step, policy=ALWAYS)
    with ThreadPoolExecutor(4) as pool, jax_xdna.profile() as p:
        together = list(pool.map(train, range(4)))
    assert p.calls == 4 * 10 * 2
    for (w, loss), (want, want_loss) in zip(together, alone, strict=True):
        same_bits(w, want)
        assert loss == want_loss


def test_dispatch_is_asynchronous_and_results_wait(rng):
    # XLA runs a program at once, on the calling thread, when it counts few operations in it, and
    # it counts none in a custom call; the additions stand for the rest of a train step.
    w, x = normal(rng, 60, 512, 512) / 512**0.5, normal(rng, 512, 512)
    f = scanned(lambda x, w: jax_xdna.dot(x, w) + x)
    jax.block_until_ready(f(w, x))
    start = time.perf_counter()
    y = f(w, x)
    dispatched = time.perf_counter() - start
    jax.block_until_ready(y)
    finished = time.perf_counter() - start
    assert dispatched < finished / 2
    same_bits(y, f(w, x))


IN_FLIGHT = """
import sys, threading, time
import jax, jax.numpy as jnp, jax_xdna
w = jnp.ones((200, 512, 512)) / 512
f = jax.jit(lambda w, x: jax.lax.scan(lambda x, w: (jax_xdna.dot(x, w) + x, None), x, w)[0])
x = jax.block_until_ready(f(w, jnp.ones((512, 512))))
def work():
    global ys
    ys = [f(w, x) for _ in range(3)]
if sys.argv[1] == "thread":
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.02)
else:
    work()
assert not any(y.is_ready() for y in ys[1:]), "nothing was in flight"
if sys.argv[1] == "exception":
    raise SystemExit("stopped by the user")
"""


@pytest.mark.parametrize("how, code", [("main", 0), ("thread", 0), ("exception", 1)])
def test_the_interpreter_ends_promptly_with_work_in_flight(how, code):
    command = [sys.executable, "-c", IN_FLIGHT, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == code, (run.returncode, run.stderr)
    assert run.stderr.strip() == ("stopped by the user" if code else "")
