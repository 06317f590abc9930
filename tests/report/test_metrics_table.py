"""The table of metrics has what a run writes, and nothing else; the report and the live line are
drawn from it."""

from __future__ import annotations

import pathlib
import re

import pytest

from fp8rl_jax.report import metrics
from fp8rl_jax.report.metrics import FILES, SECTIONS, find, live_line
from fp8rl_jax.report.run import _CAPTIONS
from fp8rl_jax.training.logs import read_jsonl

_SOURCES = ("training", "rl", "rollout")  # where metrics are computed


@pytest.mark.parametrize("file", FILES)
def test_every_key_of_a_run_and_every_row_of_the_table(tiny_run, file):
    """`tiny_run.reproducible` checks the keys of other runs."""
    directory, _ = tiny_run
    keys = {key for line in read_jsonl(directory / "run" / f"{file}.jsonl") for key in line}
    found = {key: find(file, key) for key in keys}
    assert not [key for key, metric in found.items() if metric is None]
    always = {metric.name for metric in FILES[file] if not metric.when}
    assert always <= {metric.name for metric in found.values()}


def test_what_only_some_runs_write_is_computed_somewhere():
    """Every part of such a name, around its placeholders, is in a text of the sources."""
    package = pathlib.Path(metrics.__file__).parents[1]
    text = "".join(p.read_text() for room in _SOURCES for p in (package / room).glob("*.py"))
    names = {m.name for rows in FILES.values() for m in rows if m.when} - {
        "time_calibrate",
        "time_wait",
    }
    parts = {part for name in names for part in re.split("[A-Z]+", name) if part not in "/_"}
    assert not {part for part in parts if not re.search(rf"\W{part}\W|{part}=", text)}
    assert 'timed("calibrate")' in text, "time_calibrate"


def test_placeholders():
    assert find("metrics", "clipfrac_low/2").name == "NAME/K"
    assert find("metrics", "reward/my_module:f").name == "reward/NAME"
    assert find("metrics", "correction/tis_ess").name == "correction/NAME_ess"
    assert find("eval", "pass@4_se").name == "pass@K_se"
    assert find("metrics", "clipfrac_low/x") is None and find("sft", "entropy") is None


def test_sections_are_those_of_the_report():
    assert [*_CAPTIONS] == [*SECTIONS]
    for heading, (_, section) in SECTIONS.items():
        assert any(metric.panel for metric in section), heading


def test_live_line():
    record = {metric.name: 0.0 for metric in FILES["metrics"]}
    line = "reward 0.000  accuracy -  turns 0.0  drift 0 exactly  rollout 0 tok/s  padding 0%"
    assert live_line("metrics", record, "-") == line
    record |= {metrics.DRIFT_MAX: 1e-45, "reward_mean": 0.3114, "tokens_per_s_rollout": 47.2}
    line = "reward 0.311  accuracy 0.2/0.3  turns 0.0  drift 1.0e-45  rollout 47 tok/s  padding 0%"
    assert live_line("metrics", record, "0.2/0.3") == line
    assert live_line("sft", {"loss": 0.5}, "-") == "loss 0.500  accuracy -"
    assert live_line("metrics", {"reward_mean": 0.5}, "-") == "reward 0.500  accuracy -"
