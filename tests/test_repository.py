"""What hosts of repositories read: workflows, forms of issues, CITATION.cff, and paths in texts."""

from __future__ import annotations

import configparser
import pathlib
import re

import pytest
import yaml

from fp8rl_jax.base.version import __version__
from fp8rl_jax.cli import start

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GITHUB = _ROOT / ".github"
_WORKFLOWS = sorted((_GITHUB / "workflows").glob("*.yml"))
_FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}  # of a form


@pytest.mark.parametrize("path", _WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_scripts_that_exist(path):
    """Steps are pinned actions or scripts of launch/; a matrix has what its step asks for."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow[True] and workflow["permissions"] == {
        "contents": "read"
    }  # YAML 1.1: on is True
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
            else:
                (script,) = re.findall(r"^bash (launch/\w+\.sh)", step["run"])
                assert (_ROOT / script).is_file()
            asked = re.findall(r"matrix\.(\w+)", str(step))
            assert {*asked} <= {*matrix}


def test_every_python_that_is_named_is_tested():
    jobs = yaml.safe_load((_GITHUB / "workflows/tests.yml").read_text())["jobs"]
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    named = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert jobs["quick"]["strategy"]["matrix"]["python"] == named
    parts = jobs["slow"]["strategy"]["matrix"]["part"]
    assert parts == [f"{k}/{len(parts)}" for k in range(1, len(parts) + 1)]


@pytest.mark.parametrize(
    "path", sorted((_GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_forms_for_issues(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len({*ids}) == len(ids) > 0
    assert {field["type"] for field in form["body"]} <= _FIELDS
    assert all(field["attributes"]["label"] for field in form["body"])


def test_citation():
    citation = yaml.safe_load((_ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= {*citation}
    assert citation["version"] == __version__


@pytest.mark.parametrize("name", ["SECURITY.md", ".github/pull_request_template.md"])
def test_paths_in_texts_exist(name):
    text = (_ROOT / name).read_text()
    paths = re.findall(r"`(?:bash )?((?:tests|configs|docs|launch)/[\w*./]+)", text)
    assert paths and all(any(_ROOT.glob(path)) for path in paths)


def test_a_missing_package_of_train_is_known():
    """The sentence for an installation without [train] knows all of its packages."""
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    modules = {"orbax-checkpoint": "orbax"}
    names = re.findall(r"^([\w-]+)", setup["options.extras_require"]["train"].strip(), re.M)
    assert {modules.get(name, name.replace("-", "_")) for name in names} == {*start._TRAIN.split()}
