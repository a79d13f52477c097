"""Small models and texts that the tests of this folder share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.gpt2 import GPT2, Config


@pytest.fixture(scope="session")
def config() -> Config:
    """A GPT-2 whose vocabulary needs padding."""
    return Config(vocab_size=101, n_positions=48, n_embd=32, n_layer=2, n_head=4)


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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
