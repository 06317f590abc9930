"""Random bits are those of one generator, whatever JAX's settings say."""

from __future__ import annotations

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.rollout.sampling import sample_keys, sample_token

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FOLDERS = ("fp8rl_jax", "kernels", "tests", "configs", "docs/scripts")
_MADE_BY = {"key", "PRNGKey", "wrap_key_data"}


def _unnamed(source: str) -> list[int]:
    """Lines that make or wrap a key without naming its generator."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
            found += [node.lineno for alias in node.names if alias.name in _MADE_BY]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_made = node.func.attr in _MADE_BY and ast.unparse(node.func.value).endswith("random")
            if is_made and "impl" not in {keyword.arg for keyword in node.keywords}:
                found.append(node.lineno)
    return found


def test_every_key_names_its_generator():
    found = [
        f"{path.relative_to(_ROOT)}:{line}"
        for folder in _FOLDERS
        for path in sorted((_ROOT / folder).rglob("*.py"))
        for line in _unnamed(path.read_text())
    ]
    assert not found, "without impl: " + ", ".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.random.key(0)",
        "from jax import random\nrandom.PRNGKey(seed=3)",
        "jax.random.wrap_key_data(state.rng)",
        "from jax.random import key",
    ],
)
def test_a_key_without_a_generator_is_found(source):
    assert _unnamed(source)


def _draws() -> np.ndarray:
    """Tokens of rows that are drawn together, as a sampler draws them."""
    data = jax.random.key_data(jax.random.key(5, impl="threefry2x32"))
    key = jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), 2)
    ids = jnp.arange(8, dtype=jnp.int32)
    keys = sample_keys(key, ids, jnp.full(8, 3, jnp.int32))
    return np.asarray(sample_token(jnp.zeros((8, 97)), keys, jnp.ones(8)))


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_draws_are_equal_under_every_default_generator(generator):
    """With another default a row's draw depended on the rows beside it."""
    expected = _draws()
    with jax.default_prng_impl(generator):
        np.testing.assert_array_equal(_draws(), expected)
