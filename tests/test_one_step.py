"""docs/reference/one_step.md names every file and function of an RL step and of an FP8 product."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PAGE = _ROOT / "docs/reference/one_step.md"
# What a process does once, whatever it computes.
_OF_A_START = {"kernels/machine.py", "kernels/reference/probe.py", "fp8rl_jax/base/compiling.py"}
# How this kind of CPU multiplies decides which functions run.
_OF_THE_WAY = {"kernels/reference/matmul.py"}
_RUN = """
import json, size
found = [size.functions_of_a_product(), size.functions_of_a_step()]
print(json.dumps([sorted(functions) for functions in found]))
"""


def _written(title: str, prefix: str = "") -> dict[str, set[str]]:
    """{file: functions} of the table below a title."""
    section = _PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if "| `" in row]
    return {prefix + file.strip("`"): {*re.findall(r"`([^`]+)`", names)} for file, _, names in rows}


_PRODUCT, _STEP = _written("One FP8 product"), _written("One RL step", "fp8rl_jax/")


def test_what_is_named_is_there():
    """In at most 200 lines."""
    assert len(_PAGE.read_text().splitlines()) <= 200
    assert len(_PRODUCT) >= 10 and len(_STEP) > 20
    for file, names in [*_PRODUCT.items(), *_STEP.items()]:
        tree = ast.parse((_ROOT / file).read_text())
        kinds = (ast.FunctionDef, ast.ClassDef)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        assert {part for name in names for part in name.split(".")} <= defined, file


@pytest.mark.slow
def test_nothing_else_runs():
    """In a process of its own: what is cached does not run a second time."""
    path = os.pathsep.join([str(_ROOT / "tests/helpers"), str(_ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for functions in json.loads(done.stdout.splitlines()[-1]):
        ran: dict[str, set[str]] = {}
        for file, name in functions:
            path = str(pathlib.Path(file).relative_to(_ROOT))
            ran.setdefault(path, set()).add(name.partition(".<locals>")[0])
        found.append({file: names for file, names in ran.items() if file not in _OF_A_START})
    product, step = found
    assert step == {file: names for file, names in _STEP.items() if file not in _OF_A_START}
    assert product.keys() == _PRODUCT.keys()
    for file in product.keys() - _OF_THE_WAY:
        assert product[file] == _PRODUCT[file], file
