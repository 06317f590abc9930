"""A step that drifted is run again: which it is, which of its questions are analysed, what is
said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
from tiny_run import CONFIG, overrides

from fp8rl_jax import cli
from fp8rl_jax.config import default_config, load_config
from fp8rl_jax.replay import drifting_step
from fp8rl_jax.training.engine import JaxEngine


@pytest.mark.parametrize(
    ("fit", "parts", "rows", "groups"),
    [
        (4, 1, 8, [0, 1, 2, 3]),
        (2, 1, 8, [2, 3]),
        (1, 1, 8, [2]),
        (3, 4, 8, [2, 3]),
        (4, 1, 4, [0, 1]),
    ],
    ids=["all", "two", "one", "equal parts", "the first update's"],
)
def test_groups_with_the_largest_drift(fit, parts, rows, groups, monkeypatch):
    """As many as fit, of the first update's rows, in equal parts."""
    config = default_config()
    config.rollout.update(prompts_per_step=2, group_size=2, max_new_tokens=3)
    config.learner.gradient_accumulation_steps = parts
    runtime = types.SimpleNamespace(config=config, mesh=None)
    monkeypatch.setattr(drifting_step, "batch_divisor", lambda mesh: 1)
    monkeypatch.setattr(drifting_step, "affordable", lambda runtime, questions: questions[:fit])
    gap = np.zeros((8, 3))
    gap[[1, 4, 6], 0] += [0.1, 0.3, 0.2]
    assert drifting_step._largest(gap[:rows], runtime, [*"abcd"]).tolist() == groups


@pytest.mark.parametrize(
    ("fields", "traced"),
    [
        ([], True),
        (["precision.zero_drift=report"], False),
        (["rollout.ahead=1"], False),
        (["env.step=echo_env:step", "env.max_turns=6", "rollout.slots=16"], False),
    ],
    ids=["single replies", "drift on purpose", "ahead", "conversations"],
)
def test_whose_drift_is_traced(fields, traced):
    config = load_config(str(CONFIG), [f"--config.{field}" for field in fields])
    assert drifting_step.is_analysed(config) == traced


def test_a_drift_that_does_not_come_back_blames_no_operation():
    result = {"step": 79, "questions": 2, "of": 4, "drift": 1e-3, "verdict": {"culprit": "none"}}
    verdict = drifting_step._verdict(result, False)
    assert verdict["culprit"] == "not repeated"
    assert "RL step 79 recorded drift of 0.001, and run again" in verdict["sentence"]
    verdict = drifting_step._verdict(result, True)
    assert verdict["culprit"] == "rows" and "not with 2 of them" in verdict["sentence"]
    named = {"culprit": "embed", "layer": None, "sentence": "It is.", "advice": "look"}
    assert drifting_step._verdict(result | {"verdict": named}, True) == named


@pytest.mark.slow
def test_planted_drift(tmp_path, monkeypatch, capsys):
    """The sampler's record is changed at steps 3 and 5 of 6: what the run prints, its report and
    status, and what `fp8rl drift` says of it afterwards."""
    sample, rollouts = JaxEngine.sample, itertools.count(1)

    def perturbed(self, *arguments, **options):
        out = sample(self, *arguments, **options)
        # Evaluations, and a step that is analysed, pass their sampler.
        if "sampler" not in options and (drift := {3: 1e-4, 5: 0.03}.get(next(rollouts))):
            logprobs = np.array(out.logprobs)
            logprobs[3, 0] += drift
            out = dataclasses.replace(out, logprobs=logprobs)
        return out

    monkeypatch.setattr(JaxEngine, "sample", perturbed)
    arguments = overrides(tmp_path, **{"sft.steps": 0})
    run = tmp_path / "run"
    assert cli.run(["train", "--config", str(CONFIG), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("warning: drift") == 1
    assert f"`fp8rl drift --checkpoint {run}` runs it again and names the operation" in out
    note = next(line for line in out.splitlines() if line.startswith("The recipes are equal, but"))
    assert "2 of 6 steps (RL steps 3, 5), the largest 0.03 at RL step 5" in note
    assert "RL steps 3, 5" in (run / "report.html").read_text()
    command = ["drift", "--checkpoint", str(run), "--allow-import=dense_reward"]
    for step, more in ((5, []), (3, ["--step=3"])):
        assert cli.run([*command, *more]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"RL step {step} recorded drift of" in said and "agree bit for bit" in said
        assert json.loads((run / "drift.json").read_text())["step"] == step
    assert drifting_step.largest_drift(run) == 5
