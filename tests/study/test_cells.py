"""Cells: whole or absent, found by their key, refused in a sentence where they are not right."""

import json

import numpy as np
import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.study.cells import Cells, rounded

_KEY = {"model": "tiny", "tokens": [1, 2]}


def _never() -> dict:
    raise AssertionError("measured again")


def test_a_finished_cell_is_not_measured_again(tmp_path):
    first = Cells(tmp_path, resume=False).get("one", _KEY, lambda: {"error": 0.5})
    assert first["numbers"] == {"error": 0.5}
    assert {"commit", "cpu", "versions"} <= set(first)
    assert Cells(tmp_path, resume=True).get("one", _KEY, _never) == first
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_a_cell_that_is_interrupted_leaves_nothing(tmp_path):
    def killed() -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cells(tmp_path, resume=False).get("one", _KEY, killed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["damaged", "delete it"]),
        ("[]", ["damaged", "parts are missing"]),
        ('{"key": {}}', ["damaged", "parts are missing"]),
        (
            json.dumps(
                {
                    "key": {"model": "other", "tokens": [1, 2]},
                    "numbers": {},
                    "commit": "",
                    "cpu": "",
                    "versions": {},
                }
            ),
            ["another configuration", "model differ"],
        ),
    ],
)
def test_refused(content, words, tmp_path):
    (tmp_path / "one.json").write_text(content)
    with pytest.raises(UserError) as error:
        Cells(tmp_path, resume=True).get("one", _KEY, _never)
    for word in words:
        assert word in str(error.value)


def test_cells_that_are_there_need_resume(tmp_path):
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(UserError, match="add --resume"):
        Cells(tmp_path, resume=False)


def test_rounded():
    assert rounded(np.array([[1.234567e-3, 12.0]])) == [[0.0012346, 12.0]]
