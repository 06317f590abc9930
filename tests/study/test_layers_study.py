"""Study `layers`: the quick run, killed and resumed, and an error that it must show."""

import copy
import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from fp8rl_jax.quant import Operand
from studies import __main__ as commands
from studies import frame, layers, subjects
from studies.cells import Cells
from studies.frame import Plan, Size
from studies.gemm_flow import GEMMS, MODULES, GemmFlow, _make_gemms, execution_order


def _subject() -> subjects.Subject:
    """Two layers of random weights, as the command takes with --quick."""
    return subjects.of_config(subjects.quick_config(), pathlib.Path(), print, questions=False)


@pytest.fixture(scope="module")
def programs() -> GemmFlow:
    """The quick model's programs, which the tests share."""
    return GemmFlow(_subject().model, layers.recipes())


@pytest.fixture(autouse=True)
def _shared_programs(monkeypatch, programs):
    monkeypatch.setattr(layers, "GemmFlow", lambda config, recipes: programs)


@pytest.mark.slow
def test_killed_and_resumed_is_the_same(tmp_path, monkeypatch, capsys):
    """The command writes its files; a run killed after a cell goes on to the same study.json."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert commands.run(["layers", "--quick", f"--out={whole}"]) == 0
    output, progress = capsys.readouterr()
    assert "sequence 3 is there; 3 of 3 cells, 0 left" in progress
    result = json.loads((whole / "study.json").read_text())
    for verdict in result["hypotheses"]:
        assert verdict["verdict"] in ("supported", "not supported", "not resolved")
        assert verdict["sentence"] in output
        assert verdict["sentence"] in (whole / "study.md").read_text()
    assert (whole / "study.png").read_bytes()[:4] == b"\x89PNG"
    _check_errors(result)
    assert " at 0x" not in json.dumps(result["config"]), "an address differs between processes"

    measure, calls = GemmFlow.errors, []

    def killed_in_the_second(self, *arguments):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    command = ["layers", "--quick", f"--out={parts}"]
    monkeypatch.setattr(GemmFlow, "errors", killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        commands.run(command)
    assert commands.run(command) == 2
    assert "add --resume" in capsys.readouterr().err
    assert commands.run([*command, "--resume"]) == 0
    assert len(calls) == 4, "the first cell was measured once"
    for name in ("study.json", "study.md"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


def _check_errors(result: dict) -> None:
    """Bounds from both sides, in percent: what the formats must cost, and no more."""
    equal = 100 * np.array(result["errors"]["equal"])[:, 0]  # (PAIRS, L, MODULES, GEMMS)
    assert equal.shape == (3, 2, len(MODULES), len(GEMMS))
    assert equal[:2].min() > 1.0 and equal[:2].max() < 4.5
    assert equal[2].min() > 0.05 and equal[2].max() < 0.5
    flow = 100 * np.array(result["errors"]["flow"])[:, 0]
    assert flow[0].mean() > equal[0].mean()


def _study(path) -> dict:
    """The study's result for two sequences."""
    return frame.run(layers.STUDY, Plan([_subject()], Size(sequences=2), path), Cells(path, True))


@pytest.mark.slow
def test_a_coarser_format_errs_more(tmp_path, monkeypatch, programs):
    """Planted: gradients in E5M2. The errors of dgrad and wgrad grow, those of fprop stay."""
    recipes = layers.recipes()
    coarse = Operand("float8_e5m2", (1, 128))
    recipes["fp8_blockwise"] = dataclasses.replace(recipes["fp8_blockwise"], gradient=coarse)
    other = copy.copy(programs)  # only the GEMMs from equal inputs are compiled again
    other._gemms = programs._gemms | {"fp8_blockwise": _make_gemms(recipes["fp8_blockwise"])}
    found = [_study(tmp_path / "fine")]
    monkeypatch.setattr(layers, "recipes", lambda: recipes)
    monkeypatch.setattr(layers, "GemmFlow", lambda _, given: other)
    found.append(_study(tmp_path / "coarse"))
    errors = (np.array(x["errors"]["equal"])[0, 0].mean(axis=(0, 1)) for x in found)
    fine, planted = errors
    assert planted[0] == fine[0]
    assert (planted[1:] > 1.3 * fine[1:]).all()


@pytest.mark.slow
def test_other_recipes_are_another_configuration(tmp_path, monkeypatch):
    """Cells of one recipe are not taken for another's."""
    _study(tmp_path)
    recipes = layers.recipes()
    recipes["fp8_blockwise"] = dataclasses.replace(recipes["fp8_blockwise"], last_layers=1)
    monkeypatch.setattr(layers, "recipes", lambda: recipes)
    with pytest.raises(layers.UserError, match="recipes differ"):
        _study(tmp_path)


def test_execution_order():
    """Every GEMM once; forward by layers, backward from the last with dgrad before wgrad."""
    order = execution_order(3)
    assert len(order) == len(set(order)) == 3 * len(MODULES) * len(GEMMS)
    last = len(MODULES) - 1
    assert order[:2] == [(0, 0, 0), (0, 1, 0)]
    assert order[21:24] == [(2, last, 1), (2, last, 2), (2, last - 1, 1)]
    assert order[-1] == (0, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["curves"], ["curves", "python -m studies", "layers"]),
        (["cases"], ["python -m studies cases", "--quick"]),
        (["layers", "--checkpoint=.", "--seeds=0,1"], ["leave out --seeds"]),
        (["all"], ["python -m studies all", "--quick"]),
        (["layers"], ["--config FILE", "--checkpoint DIR", "--quick"]),
        (["layers", "--config=a.py", "--checkpoint=b"], ["name one model"]),
        (["layers", "--checkpoint=none"], ["--checkpoint=none", "no directory"]),
        (["layers", "--quick", "--config.run.steps=1"], ["--config.run.steps=1", "--config"]),
        (["layers", "--quick", "--out=file"], ["--out=file", "another directory"]),
    ],
)
def test_mistakes(arguments, words, tmp_path, monkeypatch, capsys):
    """One sentence and exit status 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert commands.run([*arguments]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error
