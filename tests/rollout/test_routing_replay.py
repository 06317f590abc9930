"""Routing replay: nothing at all between equal recipes, and what it is good for between others."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from drift_harness import Case, run

_EXPERTS = Case("f32", experts=8, prompts=(1, 7, 20), tap_logits=True)
_DEEPSEEK = dataclasses.replace(_EXPERTS, family="deepseek", layers=3, extra_slots=30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "replayed"),  # experts alone, or their weights too
    [
        (_EXPERTS, 1),
        (_DEEPSEEK, 1),
        (_DEEPSEEK, 2),
        (dataclasses.replace(_EXPERTS, recipe="fp8", micro_batches=3), 2),
    ],
    ids=["softmax", "sigmoid", "sigmoid, weights", "fp8, micro-batches, weights"],
)
def test_replay_changes_nothing_at_zero_drift(case, replayed):
    """Log-probabilities and logits have the same bits; the update is the same but for rounding.

    (Padding follows no recorded choice, so wgrad adds up an expert's tokens in other tiles, and
    under FP8 quantises them in blocks that hold other padding.)
    """
    own, other = run(case), run(dataclasses.replace(case, replay=replayed))
    assert own.differing() == other.differing() == (0, 0)
    np.testing.assert_array_equal(own.learner_logits, other.learner_logits)
    pairs = zip(*(jax.tree.leaves(r.params) for r in (own, other)), strict=True)
    close = np.concatenate([np.isclose(a, b, rtol=1e-5, atol=1e-6).ravel() for a, b in pairs])
    assert close.mean() > (0.99 if case.recipe == "fp8" else 0.999)


@pytest.mark.slow
def test_replay_lowers_drift_between_recipes():
    """An FP8 rollout and a bf16 learner choose other experts; replayed, they cannot."""
    case = dataclasses.replace(_EXPERTS, recipe="bf16", group_size=8, experts=16)

    def drift(replayed):
        result = run(dataclasses.replace(case, replay=replayed), rollout_recipe="fp8")
        return np.abs(result.rollout_logp - result.learner_logp).mean()

    none, experts, weights = (drift(count) for count in range(3))
    assert 0 < experts < 0.9 * none
    assert 0 < weights < none
