"""Small models and texts that the tests of this folder share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import processes
from models.gpt2 import GPT2, Config


@pytest.fixture(scope="session", autouse=True)
def one_device():
    """The fine-tuner uses all devices; most people have one, and most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "visible_devices", lambda: jax.devices()[:1])
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """Token caches of this session alone; subprocesses find them, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))
        yield


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory):
    """JAX's cache on disk, for tests that run the same program again in a new function."""
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def config() -> Config:
    """A GPT-2 whose vocabulary needs padding."""
    return Config(vocab_size=101, n_positions=48, n_embd=32, n_layer=2, n_head=4)


@pytest.fixture(scope="module")
def params(config):
    """Random weights in every tensor, biases and layer norms too, large enough to matter."""
    shapes = jax.eval_shape(GPT2(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    leaves, tree = jax.tree.flatten(shapes["params"])
    rng = np.random.default_rng(0)
    values = [jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32) for leaf in leaves]
    params = jax.tree.unflatten(tree, values)
    # As after loading: rows of the padding are zero.
    table = params["wte"]["embedding"]
    params["wte"]["embedding"] = table.at[config.vocab_size :].set(0)
    return params


@pytest.fixture(scope="module")
def tokens(config):
    rng = np.random.default_rng(1)
    return rng.integers(0, config.vocab_size, (3, config.n_positions)).astype(np.int32)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Thirty short documents of made-up prose."""
    folder = tmp_path_factory.mktemp("text")
    words = "the river old stone walks over a green hill and sings to its quiet lake".split()
    rng = np.random.default_rng(2)
    for i in range(30):
        sentences = [" ".join(rng.choice(words, 8)) + ".\n" for _ in range(6)]
        (folder / f"note-{i:02}.txt").write_text("".join(sentences))
    return folder
