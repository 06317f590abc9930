"""Study `accuracy`: what precision and correction cost in accuracy after RL.

"FP8-RL", according to a digest of it, trains an 8B model with an FP8 rollout and a bf16 learner:
with truncated importance sampling (TIS) it tracks BF16, and without TIS it degrades. NVIDIA's
report on FP8 for RL gives Llama 3.1 8B 0.616 in BF16, 0.586 with FP8 generation only and 0.613 in
FP8 end to end after 4,000 steps. Here all arms of a seed have the same start, order of questions
and sampling keys, so the figures are differences within seeds.

Every arm is evaluated under bf16, the same engine for all, and under its own recipe. The hypotheses
use the accuracy under bf16: they are about what was learned.

Differences of 0.03 may be below the noise of a small model, so two *stress* arms have a large
mismatch: an FP8 rollout whose activations have a fixed scale that clips them at CLIP, like a scale
that was calibrated once and is out of date, with a learner in bf16. How many activations are above
CLIP depends on the model, so whether the mismatch is large is a hypothesis too.

The unit is the seed. Hypotheses with a margin look only at the mean over seeds; those about a
direction require every seed to agree. One seed resolves nothing. Two seeds may have nearly the same
difference by chance, so the standard deviation of a difference is taken as at least the noise of
its two evaluations: the root of the sum of their squared standard errors, clustered by question.
The arms answer the same questions, so the noise of a difference is smaller than that; this errs
on the side of "not resolved".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from studies import writing
from studies.cells import Cell
from studies.frame import Found, Plan, Result, Size, Study, Verdict
from studies.hypotheses import ANY, SUPPORTED, Hypothesis, Zone
from studies.runs import (
    TIS,
    UNCORRECTED,
    Fields,
    accuracies,
    accuracy_less,
    arm_cells,
    part,
    series,
)
from studies.statistics import equivalence, seed_mean, seeds_needed
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = 0.03  # in sampled accuracy; NVIDIA's difference between BF16 and FP8 generation only
CLIP = 32.0  # largest activation in the rollout of the stress arms

_BF16: Fields = {
    "precision.rollout": "bf16",
    "precision.learner": "bf16",
    "algo.correction": "none",
}
_FP8: Fields = {
    "precision.rollout": "fp8_blockwise",
    "precision.learner": "fp8_blockwise",
    "algo.correction": "none",
}
_MIXED: Fields = {"precision.rollout": "fp8_blockwise", "precision.learner": "bf16"}
_CLIPPED: Fields = {**_MIXED, "precision.activation_policy": f"static(amax={CLIP})"}
BASELINE = "bf16"
ARMS: dict[str, Fields] = {
    BASELINE: _BF16,
    "rollout": {**_MIXED, **UNCORRECTED},
    "rollout_tis": {**_MIXED, **TIS},
    "unified": _FP8,
    "stress_rollout": {**_CLIPPED, **UNCORRECTED},
    "stress_rollout_tis": {**_CLIPPED, **TIS},
}
_TEXTS = {
    "bf16": "bf16",
    "rollout": "FP8 rollout, bf16 learner",
    "rollout_tis": "the same with TIS",
    "unified": "FP8 end to end",
    "stress_rollout": "stress: FP8 rollout that clips, bf16 learner",
    "stress_rollout_tis": "stress: the same with TIS",
}

_TOST = "two one-sided t-tests"
UNIFIED = Hypothesis(
    "unified",
    "FP8 end to end learns as much as bf16",
    "mean of sampled accuracy less that of bf16",
    Zone(-MARGIN, MARGIN),
    _TOST,
)
TRACKS = Hypothesis(
    "tracks",
    "With TIS an FP8 rollout with a bf16 learner learns as much as bf16",
    "mean of sampled accuracy less that of bf16",
    Zone(-MARGIN, MARGIN),
    _TOST,
)
DEGRADES = Hypothesis(
    "degrades",
    "Without correction an FP8 rollout with a bf16 learner learns less than bf16",
    "mean of sampled accuracy less that of bf16",
    Zone(high=-ANY),
)
NARROWS = Hypothesis(
    "narrows",
    "With TIS an FP8 rollout with a bf16 learner learns more than without",
    "mean of sampled accuracy less that without correction",
    Zone(low=ANY),
)
STRESSED = Hypothesis(
    "stressed",
    "The stress is one: its mismatch is at least twice that of the FP8 rollout (if "
    "not, the hypotheses under stress say little)",
    "mean |D| over the steps, uncorrected, under stress over without",
    Zone(low=2.0),
)
STRESS_DEGRADES = Hypothesis(
    "stress_degrades",
    "Under stress the arm without correction learns less than bf16",
    "mean of sampled accuracy less that of bf16",
    Zone(high=-ANY),
)
STRESS_TIS = Hypothesis(
    "stress_tis",
    "Under stress TIS learns more than no correction",
    "mean of sampled accuracy less that without correction",
    Zone(low=ANY),
)
STRESS_RECOVERS = Hypothesis(
    "stress_recovers",
    "Under stress TIS recovers what bf16 learns, up to the margin",
    "mean of sampled accuracy less that of bf16",
    Zone(low=-MARGIN),
)
# (hypothesis, arm, other arm): its figure is the accuracy of the arm minus that of the other.
HYPOTHESES = (
    (UNIFIED, "unified", BASELINE),
    (TRACKS, "rollout_tis", BASELINE),
    (DEGRADES, "rollout", BASELINE),
    (NARROWS, "rollout_tis", "rollout"),
    (STRESS_DEGRADES, "stress_rollout", BASELINE),
    (STRESS_TIS, "stress_rollout_tis", "stress_rollout"),
    (STRESS_RECOVERS, "stress_rollout_tis", BASELINE),
)


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    return arm_cells("accuracy", subject, plan, ARMS)


def _result(found: Found) -> Result:
    config = found.subjects[0].runtime.config
    return {
        "questions": config.eval.questions,
        "samples": config.eval.samples,
        "margin": MARGIN,
        "runs": {arm: found.each(arm) for arm in ARMS},
        "differences": {arm: _differences(found, arm) for arm in ARMS if arm != BASELINE},
    }


def _differences(found: Found, arm: str) -> dict[str, Any]:
    """Returns an arm's accuracy minus bf16's for each seed, its standard deviation over seeds, and
    how many seeds would find a difference of MARGIN (the last two are None for one seed)."""
    each, least = accuracy_less(found, arm, BASELINE)
    several = len(each) > 1
    return {
        "each": each.tolist(),
        "sd": max(float(each.std(ddof=1)), least) if several else None,
        "seeds_needed": seeds_needed(each, MARGIN, least) if several else None,
    }


def _judge(found: Found) -> list[Verdict]:
    verdicts: dict[str, Verdict] = {}
    for hypothesis, arm, other in HYPOTHESES:
        (each, least), p, unresolved = accuracy_less(found, arm, other), None, ""
        if hypothesis.test:
            p = equivalence(each, MARGIN, least) if len(each) > 1 else math.nan
        directed = ANY in (hypothesis.zone.low, -hypothesis.zone.high)
        seeds = each.tolist() if directed else ()
        lost = verdicts.get(STRESS_DEGRADES.name, {}).get("verdict")
        if hypothesis is STRESS_RECOVERS and lost != SUPPORTED:
            unresolved = "without correction nothing was seen to be lost"
        mean = seed_mean(each, least)
        verdicts[hypothesis.name] = hypothesis.judge(mean, p, seeds, unresolved)
    stressed, plain = (
        series(found.each(arm), "train_rollout_logprob_abs_diff").mean(axis=1)
        for arm in ("stress_rollout", "rollout")
    )
    return [*verdicts.values(), STRESSED.judge_seeds(stressed / plain)]


def _tables(result: Result) -> str:
    """Returns a table of all arms, and how many seeds would resolve the margin."""
    differences = {arm: writing.each(found["each"]) for arm, found in result["differences"].items()}
    columns = {
        "right in bf16, sampled": lambda row: writing.each(accuracies(row[1], "bf16")),
        "less bf16": lambda row: differences.get(row[0], ""),
        "right under its own recipe": lambda row: writing.each(accuracies(row[1], "own")),
        "mean abs D": lambda row: writing.each(
            series(row[1], "train_rollout_logprob_abs_diff").mean(axis=1)
        ),
        "reward, last quarter": lambda row: writing.each(part(series(row[1], "reward_mean"), 3)),
    }
    arms = [(_TEXTS[arm], (arm, runs)) for arm, runs in result["runs"].items()]
    return (
        f"{result['name']}, {result['steps']} steps of RL, a figure for each seed; "
        f"{result['questions']} held-out questions of {result['samples']} samples. Under "
        f"stress the rollout clips activations at {CLIP:g}.\n\n"
        f"{writing.table('arm', arms, columns)}\n{format_power(result)}\n"
    )


def format_power(result: Result) -> str:
    """Returns a sentence: deviations of the paired differences, and the seeds that they demand."""
    found = {_TEXTS[arm]: less for arm, less in result["differences"].items()}
    if len(result["subjects"]) < 2:
        return (
            "One seed has no standard deviation of paired differences, so nothing is resolved and "
            "the number of seeds that would resolve the margin is unknown: name two or more by "
            "--seeds."
        )
    parts = [f"{text}: {x['sd']:.3g}, {x['seeds_needed']} seeds" for text, x in found.items()]
    return (
        "Standard deviation of the paired differences to bf16, and the seeds with which "
        f"{result['margin']:g} is found four times in five: {'; '.join(parts)}."
    )


def _figure(result: Result) -> Figure:
    """Draws accuracies, with a line for each seed, and curves of the reward."""
    figure, (paired, rewards) = writing.panels(2, 14, 4)
    names = list(result["runs"])
    runs = list(result["runs"].values())
    every = np.array([accuracies(found, "bf16") for found in runs])  # (arms, seeds)
    paired.plot(range(len(names)), every, "o-", color="#999999", ms=3, lw=0.8)
    paired.plot(range(len(names)), every.mean(axis=1), "ko", ms=7)
    labels = [name.replace("_", "\n") for name in names]
    paired.set_xticks(range(len(names)), labels, fontsize=8)
    writing.plain(paired, "", "sampled accuracy in bf16")
    writing.rewards(rewards, {_TEXTS[name]: found for name, found in result["runs"].items()})
    return figure


STUDY = Study(
    "accuracy",
    full=Size(steps=160),
    quick=Size(steps=3),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
    remark=format_power,
)
