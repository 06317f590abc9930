"""The table of metrics has what a run writes, and what its report plots."""

from __future__ import annotations

import pytest

from fp8rl_jax.report.metrics import FILES, find
from fp8rl_jax.report.run import _PLOTS
from fp8rl_jax.training.logs import read_jsonl

# Lines that the report computes from others.
_COMPUTED = {
    "running_mean": "reward_mean",
    "1 - logprob_equal_frac": "logprob_equal_frac",
    **{f"{phase}/greedy": "accuracy_greedy" for phase in ("sft", "rl")},
    **{f"{phase}/sampled": "accuracy_sampled" for phase in ("sft", "rl")},
}


@pytest.mark.parametrize("file", FILES)
def test_every_key_of_a_run_and_every_row_of_the_table(tiny_run, file):
    directory, _ = tiny_run
    keys = {key for line in read_jsonl(directory / "run" / f"{file}.jsonl") for key in line}
    found = {key: find(file, key) for key in keys}
    assert not [key for key, metric in found.items() if metric is None]
    always = {metric.name for metric in FILES[file] if not metric.when}
    assert always <= {metric.name for metric in found.values()}


def test_placeholders():
    assert find("metrics", "clipfrac_low/2").name == "NAME/K"
    assert find("metrics", "reward/my_module:f").name == "reward/NAME"
    assert find("metrics", "correction/tis_ess").name == "correction/NAME_ess"
    assert find("eval", "pass@4_se").name == "pass@K_se"
    assert find("metrics", "clipfrac_low/x") is None and find("sft", "entropy") is None


def test_panels_are_those_of_the_report():
    for heading, (source, _, *plots) in _PLOTS.items():
        file = source if source in FILES else "metrics"
        plotted = [_COMPUTED.get(key, key) for _, *keys in plots for key in keys]
        for key in plotted:
            metric = find(file, key.replace("*", "/kv"))
            assert metric is not None and metric.panel == heading, (heading, key)
    panels = {metric.panel for metrics in FILES.values() for metric in metrics} - {""}
    assert panels <= set(_PLOTS)
