"""`fp8rl recipe`: it prints the whole table of GEMMs, and a mistake costs one sentence."""

from __future__ import annotations

import re
import sys

import pytest

from fp8rl_jax import cli
from fp8rl_jax.quant import gemm_table, get_recipe, recipe_names
from fp8rl_jax.quant.recipe import DESCRIPTIONS
from fp8rl_jax.quant.table import WIDTH

_USERS = """\
import dataclasses
from fp8rl_jax.quant import Operand, Recipe, dynamic

def mine():
    policy = dataclasses.replace(dynamic(), name="a_policy_with_a_long_name_" + "x" * 40)
    return Recipe(
        "mine", activation=Operand(block=(1, -1), policy=policy), weight=Operand(block=(-1, 1)),
        backward="bf16", kv="calibrated", fp8_attention=True, first_layers=2, last_layers=1,
        bf16_modules=("[qkv]_proj", "[bold]down_proj"),
    )

def nothing():
    return 3
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """A module of the user's, `my_recipes`, that Python finds."""
    (tmp_path / "my_recipes.py").write_text(_USERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("my_recipes", None)


def _shown(capsys, *arguments: str) -> str:
    assert cli.run(["recipe", *arguments]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    return output


def _fact(text: str, label: str) -> str:
    """What stands beside a label, its continuation lines joined."""
    found = re.search(rf"^{label}  +(\S.*(?:\n  +\S.*)*)", text, re.MULTILINE)
    assert found, f"no line {label!r} in:\n{text}"
    return " ".join(found[1].split())


def test_list_names_every_recipe(capsys):
    """One line a name, aliases included, each with what it is; none is wider than the table."""
    lines = _shown(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines] == recipe_names() == list(DESCRIPTIONS)
    assert all(len(line.split()) >= 3 and len(line) <= WIDTH for line in lines)


@pytest.mark.parametrize("name", recipe_names())
def test_show_holds_the_table(name, capsys):
    """Every row of gemm_table is there in order, uncut, in lines of the fixed width."""
    text = _shown(capsys, "show", name)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "\x1b" not in text and "…" not in text
    place = 0
    for row in gemm_table(name):
        start = r"\s+".join(
            re.escape(row[k]) for k in ("gemm", "operand", "format", "block") if row[k]
        )
        place = next(i for i in range(place, len(lines)) if re.match(rf"\s*{start}\b", lines[i]))
        rest = re.sub(r"\s", "", "".join(lines[place : place + 4]))
        for word in (*row["policy"].split(), *row["note"].split()):
            assert word in rest, f"{row}: {word!r} is missing"
        place += 1


@pytest.mark.parametrize(
    ("name", "label", "words"),
    [
        ("fp8", "product", ["real", "FP8 operands"]),
        ("fp8", "KV cache", ["INT8", "(token, kv head)", "dynamic"]),
        ("fp8_blockwise", "KV cache", ["E4M3", "(token, kv head)", "dynamic"]),
        ("fp8", "FP8 attention", ["no", "q stays bf16"]),
        ("fp8", "row-local", ["yes", "exactly zero"]),
        ("fp8", "state", ["none"]),
        ("fp8_tensorwise", "row-local", ["no", "zero drift is refused"]),
        ("fp8_delayed", "row-local", ["yes"]),
        ("fp8_delayed", "state", ["weight", "activation", "gradient", "checkpoints"]),
        ("mxfp8", "KV cache", ["power_of_two(dynamic)"]),
        ("fake_forward", "product", ["fake", "forward only", "bf16"]),
        ("fake", "product", ["fake"]),
        ("bf16", "product", ["not FP8", "bf16"]),
        ("bf16", "layers in bf16", ["all"]),
        ("bf16", "KV cache", ["bf16", "not quantised"]),
        ("f32", "between operations", ["float32"]),
        ("f32", "modules in float32", ["all"]),
    ],
)
def test_show_says_the_rest(name, label, words, capsys):
    """The properties below the table, in words."""
    fact = _fact(_shown(capsys, "show", name), label)
    for word in words:
        assert word in fact, f"{word!r} is missing in: {fact}"


def test_fake_of_both_directions_is_not_forward_only(capsys):
    """The two imitations are told apart."""
    assert "forward only" not in _shown(capsys, "show", "fake")


def test_block_names(capsys):
    """Blocks that span axes are named, not written as -1 or 'all'."""
    lines = _shown(capsys, "show", "fp8_delayed").splitlines()
    assert sum(" tensor  " in line for line in lines) == 6
    assert re.search(r"dgrad +dy +E5M2 +tensor", "\n".join(lines))


def test_recipe_of_a_user(users_module, capsys):
    """A function of the user's is shown under its own name; brackets and long names survive."""
    text = _shown(capsys, "show", "my_recipes:mine")
    assert text.startswith("mine\n")
    assert _fact(text, "layers in bf16") == "the first 2 and the last 1"
    assert _fact(text, "modules in bf16").endswith("[qkv]_proj, [bold]down_proj")
    assert "calibrated" in text and "measured at every update" in _fact(text, "KV cache")
    assert _fact(text, "FP8 attention").startswith("yes")
    assert _fact(text, "row-local").startswith("yes")
    assert "forward only" in _fact(text, "product")
    assert re.search(r"fprop +x +E4M3 +row", text)
    assert re.search(r"fprop +w +E4M3 +column", text)
    assert text.count("x" * 15) >= 2, "the policy's long name was cut"
    assert max(map(len, text.splitlines())) <= WIDTH


def test_width_is_fixed(capsys, monkeypatch):
    """The terminal, real or claimed, changes nothing."""
    before = _shown(capsys, "show", "fp8_delayed")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert _shown(capsys, "show", "fp8_delayed") == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["recipe list", "recipe show NAME"]),
        (["show"], ["fp8_blockwise", "package.module:function"]),
        (["show", "fp8_blokwise"], ["fp8_blokwise", "did you mean 'fp8_blockwise'"]),
        (["show", "nothing_like_it"], ["nothing_like_it", "write one of", "mxfp8"]),
        (["show", "fp8", "bf16"], ["'bf16'", "it takes NAME"]),
        (["show", "no_module:mine"], ["no_module:mine", "package.module:function"]),
        (["show", "my_recipes:absent"], ["my_recipes:absent", "package.module:function"]),
        (["show", "my_recipes:nothing"], ["my_recipes:nothing", "int", "Recipe"]),
        (["list", "junk"], ["junk", "recipe list"]),
        (["shwo", "fp8"], ["shwo", "show"]),
        (["show", "fp8", "--junk"], ["junk", "--help"]),
        (["show", "fp8", "--config.run.steps=3"], ["--config.run.steps=3"]),
        (["list", "--config.run.steps=3"], ["--config.run.steps=3"]),
    ],
)
def test_mistakes(arguments, words, users_module, capsys):
    """Exit status 2 and one sentence that names the mistake and the way out."""
    assert cli.run(["recipe", *arguments]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error, f"{word!r} is missing in: {error}"


def test_shown_facts_follow_the_recipe():
    """The properties that the text states are those of the recipe object."""
    for name in recipe_names():
        recipe, text = get_recipe(name), str(get_recipe(name))
        assert _fact(text, "row-local").startswith("yes" if recipe.row_local else "no")
        assert (_fact(text, "state") == "none") != recipe.stateful
        assert _fact(text, "KV cache").startswith(("E4M3", "INT8")) == recipe.kv_quantized
