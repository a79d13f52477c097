"""Every Python snippet of the README and of docs/ runs; those of one page share their names."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page):
    """(line, code) of every Python block."""
    text = page.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start()) + 1, block[1]) for block in blocks]


def readme_names():
    """What the README's reader brings along: a loss, an optimizer and their data."""
    params = {"w": jnp.ones((4, 4))}
    optimizer = optax.adamw(1e-3)
    return {
        "loss_fn": lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        "optimizer": optimizer,
        "params": params,
        "opt_state": optimizer.init(params),
        "batch": jnp.ones((2, 4)),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page):
    found = snippets(page)
    assert page.read_text().count("```python") == len(found)
    names = readme_names() if page.name == "README.md" else {}
    with jax.numpy_rank_promotion("allow"):
        for line, code in found:
            exec(compile("\n" * line + code, str(page), "exec"), names)


def test_the_pages_have_snippets():
    assert {page.stem for page in PAGES if snippets(page)} >= {
        "README",
        "sharding",
        "sharp-bits",
        "transforms",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
