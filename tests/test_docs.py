"""The examples of docs/recipes.md run, and the documents name what there is."""

from __future__ import annotations

import pathlib
import re

import ema_policy
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.config import FIELDS
from fp8rl_jax.quant import recipe_names
from fp8rl_jax.quant.scaling import check_policy

_TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
_BLOCKS = re.findall(r"```python\n(.*?)```", _TEXT, re.S)


@pytest.fixture(scope="module")
def model_example() -> dict:
    """Names that the model example and the one after it leave behind, with the first loss."""
    names: dict = {}
    setup, loop = _BLOCKS[1].split("for _ in range(200):")
    exec(setup, names)
    first = float(names["step"](names["params"], names["state"])[2])
    exec("for _ in range(200):" + loop, names)
    return {**names, "first": first}


def test_policy_of_ten_lines():
    """The page's policy is at most ten lines, well-formed, and the one that the tests train."""
    names: dict = {}
    exec(_BLOCKS[0], names)
    assert len([line for line in _BLOCKS[0].splitlines() if line]) <= 10
    ours, tested = check_policy(names["ema"]()), ema_policy.ema()
    state = ours.init((2,))
    for amax in ([1.0, 0.0], [3.0, jnp.inf], [0.5, 2.0]):
        amax = jnp.asarray(amax)
        np.testing.assert_array_equal(
            ours.scale(state, amax, 448.0), tested.scale(state, amax, 448.0)
        )
        state, other = ours.update(state, amax), tested.update(state, amax)
        np.testing.assert_array_equal(state, other)


@pytest.mark.slow
def test_model_example_trains(model_example):
    """FP8 layers in a plain linen model: the loss falls by more than a half, with FP8's floor."""
    assert 1e-6 < float(model_example["loss"]) < 0.5 * model_example["first"]


@pytest.mark.slow
def test_stateful_example_runs(model_example):
    """States in a linen model and by hand: histories fill, scales follow."""
    names = dict(model_example)
    for block in _BLOCKS[2:]:
        exec(block, names)
    assert float(names["value"]) < 1.2  # about 1.5 at the start
    assert (names["scaling"]["Fp8DotGeneral_0"]["site"].site.weight.age == 0).all()
    for operand in ("weight", "activation", "gradient"):
        state = getattr(names["site"], operand).state
        assert (np.asarray(state["history"])[:3] > 0).all()
        assert not np.asarray(state["history"])[3:].any()
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(names["grad"]))


def test_tables_name_what_there_is():
    for name in recipe_names():
        assert f"`{name}`" in _TEXT, name
    for name in re.findall(r"`precision\.(\w+)`", _TEXT):
        assert name in FIELDS["precision"], name


def test_documents_name_files_and_tests_that_exist():
    """Paths are from the root, the package or the tests; a bare name is unique enough to find."""
    root = pathlib.Path(__file__).parents[1]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md")]
    bases = (root, root / "fp8rl_jax", root / "tests", root / "tests" / "kernels")
    folders = [
        root / name for name in ("fp8rl_jax", "kernels", "tests", "docs", "configs", "launch")
    ]
    names = {path.name for folder in folders for path in folder.rglob("*.*")}
    missing = []
    for page in pages:
        if page.name == "CHANGELOG.md":  # history
            continue
        text = page.read_text()
        for path, test in re.findall(
            r"`(?:\w+=\S+ )*(?:python |bash )?((?:\w+/)*\w+\.(?:py|sh))(?:::(\w+))?", text
        ):
            if path.startswith("my_"):
                continue
            files = [base / path for base in (*bases, page.parent) if (base / path).is_file()]
            known = bool(files) if "/" in path else bool(files) or path in names
            if not known or (test and f"def {test}(" not in files[0].read_text()):
                missing.append(f"{page.name}: {path} {test}")
    assert not missing
