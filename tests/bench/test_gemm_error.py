"""Benchmark `gemm-error`: the errors that FP8 must have, from both sides, and what is written."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import jax
import numpy as np
import pytest
from oracles import quant_oracle as oracle

from benchmarks import __main__ as benchmarks
from benchmarks.gemm_error import ARTICLE, draw, gemm_errors
from benchmarks.gemm_error import format_table as format_error_table
from fp8rl_jax.quant import recipe_names

_SMALL = [(256, 128, 256), (320, 64, 336)]
_ONE = [(256, 128, 192)]  # not among the article's
_USERS = """\
from fp8rl_jax.quant import Operand, Recipe, delayed, power_of_two

def mine():
    policy = power_of_two(delayed(history=4))
    tensor = Operand(block=(-1, -1), policy=policy)
    return Recipe("mine", weight=tensor, activation=tensor, backward="bf16")
"""


@pytest.fixture(scope="module")
def small() -> dict:
    """Two of the article's shapes under one recipe."""
    return gemm_errors(["fp8"], _SMALL)


@pytest.fixture(scope="module")
def every() -> dict:
    """Every recipe at one shape: {recipe: {GEMM: error}}."""
    result = gemm_errors(shapes=_ONE)
    return {r["recipe"]: {g: e[0] for g, e in r["errors"].items()} for r in result["recipes"]}


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(_SMALL)))
def test_the_articles_table(place, small):
    """Both columns: our bounds, the article's figure, and what the residual must do to them."""
    row, shape = small["article"][place], _SMALL[place]
    assert tuple(row["shape"]) == shape
    assert (row["article_cublas"], row["article_deepgemm"]) == ARTICLE[shape]
    assert 6.0e-4 < row["cublas"] < 7.2e-4
    assert row["cublas"] == pytest.approx(row["article_cublas"], rel=0.05)
    assert row["deepgemm"] == pytest.approx(row["article_deepgemm"], rel=0.06)
    assert 5.9e-4 < row["deepgemm_undiluted"] < row["cublas"], "finer blocks err less"
    depth = shape[1]
    for plain, diluted in (("cublas", "cublas_diluted"), ("deepgemm_undiluted", "deepgemm")):
        # To 6%: the sampled variance of a product differs from K by a few percent.
        assert row[diluted] == pytest.approx(row[plain] * depth / (depth + 100), rel=0.06)


def test_article_is_whole():
    """The eight shapes of the article, in its order, each with two figures of one magnitude."""
    assert len(ARTICLE) == 8
    shapes = list(ARTICLE)
    assert (shapes[0], shapes[-1]) == ((128, 128, 128), (1024, 1024, 1024))
    assert all(6.6e-4 < cublas < 6.9e-4 for cublas, _ in ARTICLE.values())
    assert all(2e-4 < deepgemm < cublas for cublas, deepgemm in ARTICLE.values())


# Two-sided bounds of calc_diff. bf16: the rounding of the result; 1e-16..1e-13: float32 sums.
_FP32_SCALES, _POW2 = (6.0e-4, 7.2e-4), (6.8e-4, 7.5e-4)
_TENSOR, _E5M2 = (6.6e-4, 7.5e-4), (1.6e-3, 1.85e-3)
_ROUNDED, _SUMS = (1.2e-6, 1.6e-6), (1e-16, 1e-13)
_EXPECTED = {
    "fp8": [_FP32_SCALES] * 3,
    "fp8_blockwise": [_FP32_SCALES] * 3,
    "fp8_linear": [_FP32_SCALES] * 3,
    "fp8_blockwise_pow2": [_POW2] * 3,
    "fp8_tensorwise": [_TENSOR] * 3,
    "fp8_delayed": [_TENSOR, _E5M2, _E5M2],
    "mxfp8": [_POW2] * 3,
    "fake_forward": [_FP32_SCALES, _ROUNDED, _SUMS],
    "fake": [_FP32_SCALES] * 3,
    "bf16": [_ROUNDED, _ROUNDED, _SUMS],
    "f32": [_SUMS] * 3,
}


@pytest.mark.slow
def test_every_recipe_is_measured(every):
    """Without --recipes: all names."""
    assert list(every) == list(_EXPECTED) == list(recipe_names())


@pytest.mark.slow  # the recipes' errors themselves: tests/quant/test_recipes.py
@pytest.mark.parametrize("recipe", _EXPECTED)
def test_recipes(recipe, every):
    """Each GEMM of each recipe has the error that its formats cause: neither more nor less."""
    for (low, high), (gemm, error) in zip(_EXPECTED[recipe], every[recipe].items(), strict=True):
        assert low < error < high, f"{recipe} {gemm}: {error}"


@pytest.mark.slow
def test_relations_between_recipes(every):
    """What one recipe shares with another shows in the figures."""
    assert list(every["fp8_blockwise"]) == ["fprop", "dgrad", "wgrad"]
    assert every["fp8_delayed"]["fprop"] == every["fp8_tensorwise"]["fprop"], "the same amaxes"
    assert every["fake_forward"]["fprop"] == every["fake"]["fprop"]
    assert every["fake_forward"]["dgrad"] == every["bf16"]["dgrad"]
    assert every["fake"]["fprop"] != every["fp8_blockwise"]["fprop"]


def test_against_the_oracle():
    """The figure of the default recipe is that of a product written in another way."""
    shape = m, k, n = 40, 200, 24
    result = gemm_errors(["fp8"], [shape])
    rng = np.random.default_rng((0, *shape))
    x, w, dy = (
        oracle.round_bf16(rng.standard_normal(s).astype(np.float32))
        for s in ((m, k), (k, n), (m, n))
    )
    x, w, dy = (np.float32(a) for a in (x, w, dy))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    theirs = oracle.calc_diff(oracle.matmul_1x128_128x128(x, w), exact)
    assert result["article"][0]["cublas"] == pytest.approx(theirs, rel=1e-4)
    exact = x.T.astype(np.float64) @ dy.astype(np.float64)
    theirs = oracle.calc_diff(oracle.wgrad_reference(x, dy), exact)
    assert result["recipes"][0]["errors"]["wgrad"][0] == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_other_shapes_change_nothing(small):
    """Equal shapes give equal figures, whatever else is measured."""
    again = gemm_errors(["f32"], [_SMALL[1]])
    assert again["article"][0] == small["article"][1]


@pytest.mark.slow
def test_stateful_recipe_of_a_user(tmp_path, monkeypatch):
    """State of any policy comes from one earlier step: without it the scale would be 1."""
    (tmp_path / "recipes_of_the_bench.py").write_text(_USERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    result = gemm_errors(["recipes_of_the_bench:mine", "fp8"], _ONE)
    mine = result["recipes"][0]
    assert mine["stateful"]
    assert 6.5e-4 < mine["errors"]["fprop"][0] < 7.6e-4
    assert mine["errors"]["dgrad"][0] < 2e-6
    table = format_error_table(result)
    assert "recipes_of_the_bench:mine: the scales come from one earlier step" in table
    sys.modules.pop("recipes_of_the_bench", None)


def test_files_and_table(small, tmp_path):
    """The result can be written as JSON and drawn, the table has every figure."""
    assert json.loads(json.dumps(small)) == small
    draw(small).savefig(tmp_path / "gemm_error.png")
    assert (tmp_path / "gemm_error.png").stat().st_size > 20_000
    table = format_error_table(small)
    for row in small["article"]:
        shape = ",".join(map(str, row["shape"]))
        (line,) = (s for s in table.splitlines() if s.strip().startswith(shape))
        cells = [float(c) for c in line.split()[1:]]
        keys = ("article_cublas", "cublas", "article_deepgemm", "deepgemm")
        assert cells[:4] == [pytest.approx(row[key], abs=1e-6) for key in keys]
    (line,) = (s for s in table.splitlines() if s.startswith("fp8 "))
    assert f"{np.median(small['recipes'][0]['errors']['dgrad']):.2e}" in line.split()
    assert "K / (K + 100)" in table and max(map(len, table.splitlines())) <= 110


def test_shape_of_ones_own():
    """A shape that the article does not have: a dash in the table, no mark in the picture."""
    result = gemm_errors(["bf16"], _ONE)
    assert result["article"][0]["article_cublas"] is None
    assert " - " in format_error_table(result)
    draw(result)


def test_command(tmp_path, monkeypatch, capsys):
    """The command prints the table and names the files, which are where --out says."""
    module = sys.modules["benchmarks.gemm_error"]
    monkeypatch.setattr(module, "ARTICLE", {_SMALL[0]: ARTICLE[_SMALL[0]]})
    monkeypatch.chdir(tmp_path)
    out = pathlib.Path("deep", "gemm-error")
    assert benchmarks.run(["gemm-error", "--recipes=bf16,fp8", "--out", str(out)]) == 0
    output, _ = capsys.readouterr()
    written = json.loads((out / "gemm_error.json").read_text())
    assert format_error_table(written) in output
    assert output.endswith(f"{out / 'gemm_error.json'}\n{out / 'gemm_error.png'}\n")
    assert [r["recipe"] for r in written["recipes"]] == ["bf16", "fp8"]
    assert (out / "gemm_error.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


_compiled: list[str] = []


def _note(event: str, duration: float, **details) -> None:
    if "backend_compile" in event:
        _compiled.append(event)


@pytest.fixture
def count_compilations():
    jax.monitoring.register_event_duration_secs_listener(_note)
    yield
    jax.monitoring.unregister_event_duration_listener(_note)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gemm-error", "--recipes=fp9"], ["fp9", "did you mean 'fp8'"]),
        (["gemm-error", "--recipes="], ["fp8_blockwise"]),
        (["gemm-error", "--recipes=fp8,"], ["fp8_blockwise"]),
        (["gemm-error", "--recipes=no_module:f"], ["no_module:f", "package.module:function"]),
        (["gemm-error", "junk"], ["junk", "--recipes", "--out"]),
        (["gemm-error", "--config=tiny.py"], ["config", "--help"]),
        (["gemm-error", "--config.run.steps=3"], ["--config.run.steps=3", "no config"]),
        (["gemm-error", "--repeats=3"], ["repeats"]),
        (["gemm-error", "--out=file"], ["--out=file", "another directory"]),
        (["gemm-error", "--out=file/below"], ["--out=file/below", "another directory"]),
        (["gemm-error", "--out="], ["--out", "directory"]),
        (["gemm_error"], ["gemm_error", "`python -m benchmarks gemm-error`"]),
    ],
)
def test_mistakes(arguments, words, tmp_path, monkeypatch, capsys, count_compilations):
    """One sentence, exit status 2, before anything is compiled or written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    before = len(_compiled)
    assert benchmarks.run(arguments) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error, f"{word!r} is missing in: {error}"
    assert _compiled[before:] == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
