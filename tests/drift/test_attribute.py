"""The analysis names what is at fault: planted faults, faults without effect, taps that disturb."""

from __future__ import annotations

import json
import types

import drift_faults
import numpy as np
import pytest

from fp8rl_jax.batch import of_sequences
from fp8rl_jax.drift import Programs, affordable, analyse, attribute
from fp8rl_jax.drift.explain import Evidence, explain
from fp8rl_jax.drift.operations import CUTS, LAYER_TAPS, OPERATIONS, tap_names
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.taps import LOGITS
from fp8rl_jax.quant import get_recipe


@pytest.mark.slow
@pytest.mark.parametrize("name", drift_faults.FAULTS)
def test_planted_fault_is_named(name):
    """Each of them is named, with the layer and a sentence that helps; or it has no effect."""
    fault = drift_faults.FAULTS[name]
    result = drift_faults.plant(name)
    verdict, head = result["verdict"], result["headline"]
    json.dumps(result)
    if fault.may_vanish and verdict["culprit"] == "none":
        assert "without an effect on" in verdict["sentence"] or result["first"] is None
        pytest.skip("leaves every bit as it is on this platform, and the analysis says so")
    assert (verdict["culprit"], verdict["layer"]) == (fault.culprit, fault.layer)
    text = f"{verdict['sentence']} {verdict['advice']}"
    assert [word for word in fault.words if word not in text] == []
    assert head["train_rollout_logprob_abs_diff_max"] > 0
    assert result["worst"][0]["difference"] != 0
    if verdict["culprit"] in LAYER_TAPS:  # from equal inputs it gives other results
        guilty = [row["op"] for row in result["by_operation"]]
        assert verdict["culprit"] in guilty
        before = LAYER_TAPS[: LAYER_TAPS.index(verdict["culprit"])]
        assert not set(before) & set(guilty) or fault.everywhere


_OF_EXPERTS = ("router_logits", "router_experts", "router_weights", "experts_output")
_MODEL = ModelConfig(259, 64, 96, 2, 2, 1, 32)
_PLAIN = set(tap_names(_MODEL)) - {LOGITS}


def _programs(*overrides: str) -> Programs:
    return drift_faults.programs(drift_faults.Fault(overrides))


@pytest.mark.slow
def test_nothing_differs():
    """Log-probabilities, logits and every value of every layer have equal bits."""
    result = analyse(_programs())
    assert result["verdict"]["culprit"] == "none"
    assert "every intermediate value" in result["verdict"]["sentence"]
    assert result["headline"]["logprob_equal_frac"] == 1.0
    assert result["logits"] == {"differ": 0.0, "max": 0.0}
    assert result["first"] is None and result["unobservable"] == []
    names = {row["op"] for row in result["operations"]}
    assert names == _PLAIN and not names & {*_OF_EXPERTS}
    assert not any(row["differ"] for row in result["operations"])


@pytest.mark.slow
def test_nothing_differs_with_experts():
    """The router's logits, choice and weights and the experts' sum are compared too."""
    result = analyse(_programs("model.num_experts=8", "model.moe_intermediate_size=64"))
    assert result["verdict"]["culprit"] == "none" and result["first"] is None
    assert {row["op"] for row in result["operations"]} >= {*_OF_EXPERTS, "residual_mlp"}


@pytest.mark.slow
def test_a_difference_without_effect_is_said():
    """An embedding row of a token that never occurs differs: no log-probability does."""
    programs = _programs()
    batch = programs.batch(programs.rollout())
    table = np.array(programs.weights["embed_tokens"])
    table[min(set(range(256)) - set(np.asarray(batch.tokens).flat))] += 1
    programs.weights = {**programs.weights, "embed_tokens": table}
    result = analyse(programs)
    assert result["weights"]["differing"] == ["embed_tokens"]
    assert result["verdict"]["culprit"] == "none"
    assert "without an effect on the" in result["verdict"]["sentence"]


class _Disturbed:
    """Two sides of made-up values, equal but for one operation; some taps move a log-prob."""

    def __init__(self, disturbing: set[str], different: str):
        self.disturbing, self.different, self.calls = disturbing, different, 0
        self.runtime = types.SimpleNamespace(resolved=types.SimpleNamespace(model=_MODEL))
        self.logp = np.linspace(-3, -1, 6, dtype=np.float32).reshape(2, 3)

    def _taps(self, names, offset):
        values = {}
        for name in names:
            layers = (2,) if name in LAYER_TAPS else ()
            shape = (2, 3, 5) if name == LOGITS else (*layers, 2, 4, 5)
            values[name] = np.ones(shape, np.float32) + offset * (name == self.different)
        return values

    def rollout(self, names=()):
        self.calls += 1
        out = types.SimpleNamespace(
            tokens=np.zeros((2, 3), np.int32),
            mask=np.ones((2, 3), bool),
            logprobs=self.logp,
            taps=self._taps(names, 0.5),
        )
        return out

    def learner(self, batch, names=()):
        logp = self.logp.copy()
        if self.disturbing & set(names):
            logp[0, 0] = np.nextafter(logp[0, 0], np.float32(0))
        return logp, self._taps(names, 0.0)


@pytest.mark.parametrize("disturbing", [(), ("self_attn/q_rope",), ("embed", "gated", LOGITS)])
def test_taps_that_change_the_bits_are_left_out(disturbing):
    """Halving finds the values whose taps disturb; all others are compared all the same."""
    programs = _Disturbed(set(disturbing), "o_proj/output")
    rollout = programs.rollout()
    batch = types.SimpleNamespace(
        tokens=np.zeros((2, 4), np.int32), lengths=np.array([4, 4], np.int32)
    )
    said: list[str] = []
    seen = attribute.observe(programs, rollout, batch, programs.logp, said.append)
    assert set(seen.unobservable) == set(disturbing)
    assert (seen.pieces > 1) == bool(disturbing) == bool(said)
    compared = [row["op"] for row in seen.rows]
    assert set(compared) == _PLAIN - set(disturbing)
    assert (seen.logits is None) == (LOGITS in disturbing)
    order = list(OPERATIONS)
    places = [
        (row["layer"], order.index(row["op"])) for row in seen.rows if row["layer"] is not None
    ]
    assert places == sorted(places), "rows come in the order of computation"
    assert [row["op"] for row in seen.rows if row["differ"]] == ["o_proj/output"] * 2


def _explained(first=None, unobservable=(), logits=None, drifts=True):
    result = {
        "first": first,
        "logits": logits,
        "unobservable": list(unobservable),
        "tapped_programs": 1,
        "weights": {"comparable": True, "leaves": 1, "differing": []},
        "headline": {"drift_tokens": 812.0},
    }
    recipe = get_recipe("f32")
    return explain(Evidence(recipe, recipe, drifts, result, {}))["sentence"]


def test_what_was_not_observed_is_not_called_equal():
    """No sentence speaks of values that were not compared."""
    name = "self_attn/q_rope"
    first = {"op": name, "layer": 1, "differ": 0.5, "max": 1.0, "float32_only": None}
    assert "everything computed before it is equal" in _explained(first)
    sentence = _explained(first, ["embed", "gated"])
    assert sentence.startswith("Of the values that were compared the first that differs is self_")
    assert "everything compared before it is equal" in sentence
    assert sentence.endswith("2 could not be compared.")
    sentence = _explained(None, ["embed", "gated"])
    assert "not observable without changing the bits: embed, gated" in sentence
    logits = {"differ": 0.5, "max": 1.0}
    assert _explained(None, ["norm/output"], logits).startswith("The compared hidden states")
    assert "every intermediate value" in _explained(drifts=False)
    assert "every intermediate value" not in _explained(None, ["embed"], drifts=False)
    assert "without an effect on the 812 tokens" in _explained(first, drifts=False)


def test_every_value_has_its_operation():
    """The table of operations covers what is tapped, in order, with inputs that exist before."""
    for index, (name, operation) in enumerate(OPERATIONS.items()):
        assert set(operation.inputs) <= set(list(OPERATIONS)[:index]), name
    assert set(CUTS) < set(OPERATIONS)


@pytest.mark.slow
def test_questions_are_limited_by_memory(monkeypatch):
    """Where the values of all questions would not fit, fewer are taken, at least one a device."""
    programs = _programs()
    questions = programs.questions
    assert affordable(programs.runtime, questions) == questions
    monkeypatch.setattr("fp8rl_jax.drift.programs._MOST_BYTES", 1)
    assert affordable(programs.runtime, questions) == questions[:1]


@pytest.mark.slow
def test_calibrated_scales_and_micro_batches():
    """Calibrated KV scales and FP8 attention: all values equal, q as read among them."""
    programs = _programs(
        "precision.kv_cache=fp8_calibrated",
        "precision.attention=fp8",
        "learner.gradient_accumulation_steps=2",
    )
    runtime = programs.runtime
    state = runtime.engine.calibrate(
        programs.state, of_sequences(*runtime.prompts(programs.questions))
    )
    programs.state, programs.weights = state, runtime.engine.refit(state).weights
    result = analyse(programs)
    assert result["verdict"]["culprit"] == "none" and result["first"] is None
