"""Cells: complete or absent, found by name, refused in a sentence if damaged or of another key."""

import gzip
import json
import pathlib

import numpy as np
import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from studies import frame, subjects
from studies.cells import Cell, Cells, rounded

_KEY = {"model": "tiny", "tokens": [1, 2]}
_FINISHED = {"name": "one", "key": _KEY, "numbers": {}, "commit": "", "cpu": "", "versions": {}}

_ROOT = pathlib.Path(__file__).parents[2]


def _never() -> dict:
    raise AssertionError("measured again")


def test_a_finished_cell_is_not_measured_again(tmp_path):
    cells = Cells(tmp_path, resume=False)
    first = cells.get("s", Cell("one", _KEY, lambda: {"error": 0.5}))
    second = cells.get("s", Cell("two", {}, lambda: {"error": 0.25}))
    assert (first["numbers"], second["numbers"]) == ({"error": 0.5}, {"error": 0.25})
    assert {"commit", "cpu", "versions"} <= set(first)
    again = Cells(tmp_path, resume=True)
    assert again.get("s", Cell("one", _KEY, _never)) == first
    assert again.get("s", Cell("two", {}, _never)) == second
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "s.jsonl.gz"}
    with gzip.open(tmp_path / "s.jsonl.gz") as lines:
        assert len([*lines]) == 2


def test_a_cell_that_is_interrupted_leaves_nothing(tmp_path):
    def killed() -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cells(tmp_path, resume=False).get("s", Cell("one", _KEY, killed))
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_another_process_measured_meanwhile_stays(tmp_path):
    """Several processes may measure seeds of one study."""

    def measure() -> dict:
        Cells(tmp_path, resume=True).get("s", Cell("other", {}, lambda: {"error": 1}))
        return {}

    cells = Cells(tmp_path, resume=False)
    cells.get("s", Cell("one", _KEY, measure))
    assert cells.get("s", Cell("other", {}, _never))["numbers"] == {"error": 1}


def test_cells_of_an_earlier_form_are_not_measured_again(tmp_path):
    (tmp_path / "cases-x-seed0.json").write_text("{}")
    with pytest.raises(UserError, match="earlier version"):
        Cells(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "damaged", "delete it"]),
        ("[]", ["line 2", "damaged", "parts are missing"]),
        ('{"key": {}}', ["line 2", "damaged", "parts are missing"]),
        (json.dumps({**_FINISHED, "name": []}), ["line 2", "damaged", "parts are missing"]),
        (
            json.dumps({**_FINISHED, "name": "two", "key": {**_KEY, "model": "other"}}),
            ["cell two", "another configuration", "model differ"],
        ),
    ],
)
def test_refused(line, words, tmp_path):
    text = f"{json.dumps(_FINISHED)}\n{line}\n"
    (tmp_path / "s.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UserError) as error:
        Cells(tmp_path, resume=True).get("s", Cell("two", _KEY, _never))
    for word in words:
        assert word in str(error.value)


def test_cells_that_are_there_need_resume(tmp_path):
    (tmp_path / "one.jsonl.gz").write_text("")
    with pytest.raises(UserError, match="add --resume"):
        Cells(tmp_path, resume=False)


@pytest.mark.parametrize(
    ("name", "config", "overrides"),
    [
        ("cases", "tiny_arithmetic", ["--config.sft.evaluations=1"]),
        ("accuracy", "tiny_arithmetic", ["--config.sft.evaluations=1", "--config.eval.samples=8"]),
        ("scale", f"{_ROOT}/studies/ladder.py:d8", []),
    ],
)
def test_cells_of_the_documentation_are_found(name, config, overrides, tmp_path):
    """What docs/studies.md says is printed again is not measured again."""
    study = frame.load(name)
    subject = subjects.of_config(load_config(config, overrides), tmp_path, print)
    tracked = Cells(_ROOT / "docs" / "studies" / "cells", resume=True)
    cells = study.cells(subject, frame.Plan([subject], study.full, tmp_path))
    for cell in cells.values():
        tracked.get(name, cell._replace(measure=_never))


def test_rounded():
    assert rounded(np.array([[1.234567e-3, 12.0]])) == [[0.0012346, 12.0]]
