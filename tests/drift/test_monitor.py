"""What a run keeps of a step that drifts, what it says, and how long it may look for the cause."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import CONFIG, overrides

from fp8rl_jax import cli
from fp8rl_jax.config import default_config
from fp8rl_jax.drift import DriftMonitor, attribute, kept_step, monitor
from fp8rl_jax.drift.budget import Budget
from fp8rl_jax.drift.kept_step import KeptStep
from fp8rl_jax.envs import Question
from fp8rl_jax.report.verdicts import step_verdicts
from fp8rl_jax.rollout import Rollout
from fp8rl_jax.training.engine import JaxEngine

_MASK = np.array([[True, True, False]] * 4)


def _state(value=1.0):
    return types.SimpleNamespace(
        params={"w": jnp.full(4, value)}, scaling_state={}, opt_state=jnp.ones(8)
    )


def _runtime():
    """Two questions of two answers each."""
    config = default_config()
    config.rollout.update(prompts_per_step=2, group_size=2, max_new_tokens=3)
    return types.SimpleNamespace(
        config=config,
        resolved=types.SimpleNamespace(step_samples=4, step=None, stale=False, zero_drift=True),
        data_digest="d",
        questions={"train": [Question(str(i), "1") for i in range(5)]},
        engine=types.SimpleNamespace(like=lambda optimizer: _state()),
    )


def _samples(runtime, seed=3):
    rollout = types.SimpleNamespace(
        tokens=np.ones((4, 3), np.int32), mask=_MASK, logprobs=np.full((4, 3), -1, np.float32)
    )
    return types.SimpleNamespace(
        rollout=rollout,
        questions=runtime.questions["train"][1:3],
        prompts=types.SimpleNamespace(
            first_ids=np.array([4, 0]), key=jax.random.key(seed, impl="threefry2x32")
        ),
    )


def _logp(drift):
    logp = np.full((4, 3), -1, np.float32)
    logp[2, 1] += drift
    return logp


class _Run:
    """A monitor, what it says, and which steps it has analysed."""

    def __init__(self, directory, monkeypatch, **options):
        self.said, self.analysed, self.runtime = [], [], _runtime()

        def analyse_step(runtime, kept, note, budget):
            self.analysed.append(kept)
            verdict = {"culprit": "norm", "layer": 0, "sentence": "It is so.", "advice": "mend it"}
            return {"step": kept.step, "drift": kept.drift, "verdict": verdict, "left_out": []}

        monkeypatch.setattr(monitor, "analyse_step", analyse_step)
        monkeypatch.setattr(monitor, "note_drift", lambda *_: None)
        self.monitor = DriftMonitor(self.runtime, directory, self.said.append, **options)

    def step(self, number, drift, seconds=0.0, drifted=False):
        self.monitor.keep(_state(float(number)), drifted)
        self.monitor.seen(number, _samples(self.runtime), _logp(drift), seconds)


def test_first_and_largest_are_analysed(tmp_path, monkeypatch):
    """The first at once, the largest at the end, from what was written; nothing twice."""
    run = _Run(tmp_path, monkeypatch)
    for number, drift in enumerate((1e-3, 1e-2, 0.5, 0.25), 3):
        run.step(number, drift)
    assert [kept.step for kept in run.analysed] == [3]
    run.monitor.finish()
    run.monitor.finish()
    assert [kept.step for kept in run.analysed] == [3, 5]
    found = run.analysed[-1]
    assert found.drift == 0.5 and [q.prompt for q in found.questions] == ["1", "2"]
    np.testing.assert_array_equal(found.policy["params"]["w"], np.full(4, 5.0))
    np.testing.assert_array_equal(found.first_ids, [4, 0])
    np.testing.assert_array_equal(found.rollout["mask"], _MASK)
    np.testing.assert_array_equal(found.logp, _logp(0.5))
    assert jax.random.key_data(found.key).tolist() == [0, 3]
    assert [row["step"] for row in step_verdicts(tmp_path)] == [3, 5]
    assert "for about 3 minutes at most" in run.said[0], "before it begins"
    assert run.said[1] == "drift: It is so. What to do: mend it."


def test_the_run_that_resumes_knows_the_largest(tmp_path, monkeypatch):
    _Run(tmp_path, monkeypatch).step(3, 0.5)
    resumed = _Run(tmp_path, monkeypatch)
    resumed.step(4, 0.25)
    resumed.monitor.finish()
    assert resumed.analysed == [] and KeptStep.drift_of(tmp_path) == 0.5


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, []), (4, []), (5, [3, 5]), (9, [3, 5])])
def test_steps_that_are_done_again_are_forgotten(step, left, tmp_path, monkeypatch):
    """A run that begins anew, or goes on before a step that drifted, says nothing about it."""
    run = _Run(tmp_path, monkeypatch)
    run.monitor.forget_after(step)  # there is nothing
    run.step(3, 1e-3)
    run.step(5, 0.5)
    run.monitor.finish()
    (tmp_path / "drift.html").touch()
    resumed = _Run(tmp_path, monkeypatch)
    resumed.monitor.forget_after(step)
    assert [row["step"] for row in step_verdicts(tmp_path)] == left
    assert (tmp_path / "drift.html").exists() == bool(left)
    assert KeptStep.drift_of(tmp_path) == (0.5 if left else 0.0)


def test_of_other_data_nothing_is_kept(tmp_path, monkeypatch):
    run = _Run(tmp_path, monkeypatch)
    run.step(3, 0.5)
    assert KeptStep.load(run.runtime, tmp_path).step == 3
    run.runtime.data_digest = "another"
    assert KeptStep.load(run.runtime, tmp_path) is None


def test_what_is_kept_outlives_the_update(tmp_path, monkeypatch):
    """The memory of the state is given to the next one."""
    run, state = _Run(tmp_path, monkeypatch), _state(7.0)
    run.monitor.keep(state, False)
    state.params["w"].delete()
    run.monitor.seen(1, _samples(run.runtime), _logp(0.1), 0.0)
    np.testing.assert_array_equal(run.analysed[0].policy["params"]["w"], np.full(4, 7.0))


def test_large_weights_are_kept_once_a_step_has_drifted(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "_COPIED", 8)
    run = _Run(tmp_path, monkeypatch)
    run.step(1, 0.5)
    assert run.analysed == [] and "the next step that drifts is analysed" in run.said[0]
    run.step(2, 0.25, drifted=True)
    assert [kept.step for kept in run.analysed] == [2]


def test_weights_that_are_never_kept_are_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "_COPIED", 8)
    monkeypatch.setattr(monitor, "_COPIED_ONCE_DRIFTED", 8)
    run = _Run(tmp_path, monkeypatch)
    for number in range(1, 5):
        run.step(number, 0.5, drifted=number > 1)
    run.monitor.finish()
    assert run.analysed == [] and len(run.said) == 1
    assert f"`fp8rl drift --checkpoint {tmp_path}`" in run.said[0]


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"budget": 60.0, "clock": lambda: 0.0}, 61.0), ({"stopping": lambda: "SIGTERM"}, 0.0)],
    ids=["longer than the budget", "a signal waits"],
)
def test_no_analysis_where_there_is_no_time(options, seconds, tmp_path, monkeypatch):
    run = _Run(tmp_path, monkeypatch, **options)
    run.step(1, 0.5, seconds)
    assert run.analysed == [] and len(run.said) == 1
    assert f"`fp8rl drift --checkpoint {tmp_path}` does that" in run.said[0]
    assert KeptStep.drift_of(tmp_path) == 0.5


def test_a_run_outlives_its_monitor(tmp_path, monkeypatch):
    run = _Run(tmp_path, monkeypatch)

    def fail(*_):
        raise MemoryError("no room\nat all")

    monkeypatch.setattr(monitor, "analyse_step", fail)
    monkeypatch.setattr(KeptStep, "save", fail)
    run.step(1, 0.5)
    assert "could not be analysed (no room at all)" in run.said[-1]
    (tmp_path / "drift_step" / "3").mkdir(parents=True)
    run.monitor.finish()
    assert "cannot be analysed" in run.said[-1]


class _Side:
    """Programs that give what they are told: `logprobs` of the sampler, `logp` of the learner."""

    def __init__(self, tokens, logprobs, logp):
        self.out = _rollout(tokens, logprobs)
        self.logp = logp

    def rollout(self):
        return self.out

    def batch(self, rollout):
        return {"tokens": rollout.tokens}

    def learner(self, batch):
        return self.logp[: len(batch["tokens"])], {}


def _rollout(tokens, logprobs):
    return Rollout(tokens, _MASK, logprobs, np.zeros(len(tokens), bool), {})


_TOKENS = np.ones((4, 3), np.int32)
_OTHERS = np.where(np.arange(4)[:, None] == 2, 2, _TOKENS)


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize(
    ("tokens", "sampler", "learner", "again"),
    [
        (_TOKENS, 0.0, 0.5, {"sampler": 0, "learner": 0, "drift": 0.5}),
        (_TOKENS, 0.5, 0.5, {"sampler": 1, "learner": 0, "drift": 0.0}),
        (_TOKENS, 0.0, 0.0, {"sampler": 0, "learner": 1, "drift": 0.0}),
        (_TOKENS, 0.25, 0.125, {"sampler": 1, "learner": 1, "drift": 0.125}),
        (_OTHERS, 0.0, 0.5, {"sampler": 2, "learner": 0, "drift": 0.0}),
    ],
    ids=["as before", "the sampler's changed", "the learner's changed", "both", "other tokens"],
)
def test_both_sides_are_compared_with_what_they_recorded(rows, tokens, sampler, learner, again):
    """The step recorded a drift of 0.5; rows behind the first update's are not compared."""
    rollout = {"tokens": _TOKENS, "mask": _MASK, "logprobs": _logp(0.0)}
    kept = KeptStep(3, {}, [], np.zeros(2), None, rollout, _logp(0.5)[:rows])
    programs = _Side(tokens, _logp(sampler), _logp(learner))
    ran, found = kept_step._run_again(programs, kept, Budget())
    assert found == {"tokens": 2 * rows} | again
    assert len(ran.logp) == len(ran.rollout.tokens) == rows


def test_a_drift_that_does_not_come_back_blames_no_operation():
    result = {
        "step": 79,
        "questions": 2,
        "of": 4,
        "verdict": {"culprit": "none"},
        "again": {"tokens": 1200, "sampler": 4, "learner": 0, "drift": 0.0},
    }
    verdict = kept_step._verdict(result)
    assert verdict["culprit"] == "not repeated"
    assert "of 1,200 log-probabilities the sampler (4) now gives others" in verdict["sentence"]
    result["again"]["drift"] = 1e-3
    verdict = kept_step._verdict(result)
    assert verdict["culprit"] == "rows" and "not with 2 of them" in verdict["sentence"]
    named = {"culprit": "embed", "layer": None, "sentence": "It is.", "advice": "look"}
    assert kept_step._verdict(result | {"verdict": named}) == named


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
    runtime = _runtime()
    runtime.mesh = None
    runtime.config.learner.gradient_accumulation_steps = parts
    monkeypatch.setattr(kept_step, "batch_divisor", lambda mesh: 1)
    monkeypatch.setattr(kept_step, "affordable", lambda runtime, questions: questions[:fit])
    logp = np.full((8, 3), -1, np.float32)
    logp[[1, 4, 6], 0] += np.float32([0.1, 0.3, 0.2])
    rollout = {"mask": np.ones((8, 3), bool), "logprobs": np.full((8, 3), -1, np.float32)}
    questions = runtime.questions["train"][:4]
    kept = KeptStep(1, {}, questions, np.zeros(4), None, rollout, logp[:rows])
    assert kept.groups(runtime).tolist() == groups


def test_a_budget_ends():
    time = iter((69.0, 69.0, 71.0))
    budget = Budget(70.0, lambda: next(time))
    assert budget.allows(0.0) and not budget.allows(2.0) and not budget.allows(0.0)
    assert Budget().allows(1e9)


def test_taps_end_with_the_budget():
    """Where every tap changes the bits, a pair of programs takes 10 s, and 45 s are left."""
    from test_attribute import _PLAIN, _Disturbed

    from fp8rl_jax.models.taps import LOGITS

    programs = _Disturbed({*_PLAIN, LOGITS}, "")
    rollout = programs.rollout()
    ticks = itertools.count(0, 5)  # of a clock that is asked twice a pair, and before one
    batch = types.SimpleNamespace(
        tokens=np.zeros((2, 4), np.int32), prompt_lengths=np.array([1, 1], np.int32)
    )
    said: list[str] = []
    budget = Budget(45.0, lambda: float(next(ticks)))
    seen = attribute.observe(programs, rollout, batch, programs.logp, said.append, budget, 10.0)
    assert seen.pieces == len(said) == 3, "and a line before each that follows"
    assert len(seen.left_out) == len(_PLAIN) + 1 and not seen.rows and not seen.unobservable


@pytest.mark.slow
def test_planted_drift(tmp_path, monkeypatch, capsys):
    """The sampler's record is changed at steps 3 and 5 of 6: what the run prints, its report and
    status, and what `fp8rl drift` says of it afterwards."""
    sample, rollouts = JaxEngine.sample, itertools.count(1)

    def perturbed(self, *arguments, **options):
        out = sample(self, *arguments, **options)
        # A step that is run again passes its sampler.
        if "sampler" not in options and (drift := {3: 1e-4, 5: 0.03}.get(next(rollouts))):
            logprobs = np.array(out.logprobs)
            logprobs[3, 0] += drift
            out = dataclasses.replace(out, logprobs=logprobs)
        return out

    monkeypatch.setattr(JaxEngine, "sample", perturbed)
    arguments = overrides(tmp_path, **{"sft.steps": 0})
    assert cli.run(["train", "--config", str(CONFIG), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("warning: drift") == 1
    for step in (3, 5):
        assert out.count(f"The drift of RL step {step} does not come back") == 1
    lines = out.splitlines()
    assert lines[-1].startswith("What to do: ") and "cpu_products=exact" in lines[-1]
    note = next(line for line in lines if line.startswith("The recipes are equal, but"))
    assert "2 of 6 steps (RL steps 3, 5), the largest 0.03 at RL step 5" in note
    page = (tmp_path / "run" / "report.html").read_text()
    assert "RL steps 3, 5" in page and "What to do: start again" in page
    assert "every log-probability" not in page.lower() and "nothing to do" not in page
    assert (
        cli.run(
            ["drift", "--config", str(CONFIG), "--checkpoint", str(tmp_path / "run"), *arguments]
        )
        == 0
    )
    assert "The drift of RL step 5 does not come back" in " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "run" / "drift.json").read_text())
    assert result["again"] == {
        "tokens": result["again"]["tokens"],
        "sampler": 1,
        "learner": 0,
        "drift": 0.0,
    }
