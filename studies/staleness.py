"""Study `staleness`: what rollouts ahead of the learner change, and what precision changes.

With `rollout.ahead` = s a step learns from what the weights of s steps ago drew. The ratio of the
two policies has two parts, each of which is computed exactly here, token by token::

    log pi_t^learner - log pi_(t-s)^rollout
        = [log pi_t^learner - log pi_(t-s)^learner]          staleness: other weights
        + [log pi_(t-s)^learner - log pi_(t-s)^rollout]      mismatch: another forward pass

With one recipe on both sides the second part is 0 and the ratio is staleness alone. Where two
engines sample and learn, both are in one number; "Diagnosing" reports (arXiv:2605.14220) name that
as the obstacle to telling them apart.

Arms: FP8 on both sides, and an FP8 rollout with a bf16 learner, each 0, 1, 2 and 4 steps ahead. In
all of them the ratio of PPO is over the recorded log-probabilities, so staleness is clipped, and
mismatch with it. The unit is the seed, as in `accuracy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fp8rl_jax.base.errors import UserError
from studies import writing
from studies.cells import Cell
from studies.frame import Found, Numbers, Plan, Result, Size, Study, Verdict
from studies.hypotheses import Hypothesis, Zone
from studies.runs import Fields, accuracies, accuracy_less, arm_cells, part, series
from studies.statistics import seed_mean
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AHEAD = (0, 1, 2, 4)
MARGIN = 0.03  # in sampled accuracy, as in `accuracy`
_LEARNERS = {"fp8": "FP8 on both sides", "bf16": "FP8 rollout, bf16 learner"}
_MISMATCH, _TOTAL, _CHANGE = (
    "train_rollout_logprob_abs_diff",
    "staleness_abs_diff",
    "learner_change_abs_diff",
)
_OF_MISMATCH = (_MISMATCH, "mismatch_kl")


def _arm(learner: str, ahead: int) -> str:
    return f"{learner}_{ahead}"


def _fields(learner: str, ahead: int) -> Fields:
    return {
        "precision.rollout": "fp8",
        "precision.learner": learner,
        "rollout.ahead": ahead,
        "rollout.most_versions": 1,
        "mesh.rollout": 0,
        "algo.routing_replay": "none",
        "run.check_every": 1,
        "algo.old_logprobs": "rollout",
        "algo.correction": "none",
    }


ARMS = {_arm(learner, s): _fields(learner, s) for learner in _LEARNERS for s in AHEAD}
_TEXTS = {
    _arm(learner, s): f"{text}, {s or 'no'} step{'s' * (s != 1)} ahead"
    for learner, text in _LEARNERS.items()
    for s in AHEAD
}

EXACT = Hypothesis(
    "exact",
    "With FP8 on both sides the ratio is staleness alone, however far ahead",
    "largest mean |mismatch| of an arm, nats",
    Zone(0.0, 0.0),
)
CONSTANT = Hypothesis(
    "constant",
    "The mismatch of a bf16 learner does not depend on the staleness",
    "mean |mismatch| 4 steps ahead over that of none",
    Zone(0.8, 1.25),
)
GROWS = Hypothesis(
    "grows",
    "Staleness grows with the steps ahead",
    "mean |staleness| 4 steps ahead over that of 1, FP8 on both sides",
    Zone(low=1.5),
)
SAME = Hypothesis(
    "same",
    "A bf16 learner moves as fast as an FP8 one",
    "mean |staleness| 1 step ahead with a bf16 learner over that with FP8 on both sides",
    Zone(0.8, 1.25),
)
ADDS = Hypothesis(
    "adds",
    "The two parts do not depend on each other",
    "KL of the ratio over the sum of the KLs of its parts, bf16 learner, 1 step ahead",
    Zone(0.9, 1.1),
)
LARGER = Hypothesis(
    "larger",
    "One step ahead the mismatch is more of the ratio than the staleness",
    "KL of the mismatch over the sum of both, bf16 learner",
    Zone(low=0.5),
)
# (hypothesis, arm, other arm): its figure is the accuracy of the arm minus that of the other.
_LEARNING = (
    (
        Hypothesis(
            "one",
            "With FP8 on both sides one step ahead costs no accuracy, up to the margin",
            "mean of sampled accuracy less that of no step",
            Zone(low=-MARGIN),
        ),
        _arm("fp8", 1),
        _arm("fp8", 0),
    ),
    (
        Hypothesis(
            "four",
            "With FP8 on both sides four steps ahead cost no accuracy, up to the margin",
            "mean of sampled accuracy less that of no step",
            Zone(low=-MARGIN),
        ),
        _arm("fp8", 4),
        _arm("fp8", 0),
    ),
    (
        Hypothesis(
            "learner",
            "Four steps ahead, FP8 on both sides learns no less than a bf16 learner, up to the "
            "margin",
            "mean of sampled accuracy less that of the bf16 learner",
            Zone(low=-MARGIN),
        ),
        _arm("fp8", 4),
        _arm("bf16", 4),
    ),
)


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    if plan.size.steps <= max(AHEAD):
        raise UserError(
            f"python -m studies staleness: {plan.size.steps} steps are too few for rollouts that "
            f"are {max(AHEAD)} steps ahead: write --steps={max(AHEAD) + 1} or more"
        )
    return arm_cells("staleness", subject, plan, ARMS)


def _mean(runs: Sequence[Numbers], ahead: int, metric: str) -> np.ndarray:
    """Returns the mean of a metric for each seed (S,), NaN for none. A mismatch is that of rollouts
    that are learnt `ahead` steps later; before step `ahead` there is less staleness."""
    values = series(runs, metric)
    steps = values.shape[1]
    part = values[:, : steps - ahead] if metric in _OF_MISMATCH else values[:, ahead:]
    return part.mean(axis=1)


def _result(found: Found) -> Result:
    config = found.subjects[0].runtime.config
    return {
        "questions": config.eval.questions,
        "samples": config.eval.samples,
        "runs": {arm: found.each(arm) for arm in ARMS},
    }


def _judge(found: Found) -> list[Verdict]:
    def mean(learner: str, ahead: int, metric: str) -> np.ndarray:
        return _mean(found.each(_arm(learner, ahead)), ahead, metric)

    mismatch, change = (mean("bf16", 1, name) for name in ("mismatch_kl", "learner_change_kl"))
    verdicts = [
        EXACT.judge_seeds(np.max([mean("fp8", s, _MISMATCH) for s in AHEAD], axis=0)),
        CONSTANT.judge_seeds(mean("bf16", 4, _MISMATCH) / mean("bf16", 0, _MISMATCH)),
        GROWS.judge_seeds(mean("fp8", 4, _TOTAL) / mean("fp8", 1, _TOTAL)),
        SAME.judge_seeds(mean("bf16", 1, _CHANGE) / mean("fp8", 1, _TOTAL)),
        ADDS.judge_seeds(mean("bf16", 1, "staleness_kl") / (mismatch + change)),
        LARGER.judge_seeds(mismatch / (mismatch + change)),
    ]
    for hypothesis, arm, other in _LEARNING:
        each, least = accuracy_less(found, arm, other)
        verdicts.append(hypothesis.judge(seed_mean(each, least)))
    return verdicts


def _tables(result: Result) -> str:
    def mean(row: tuple[Sequence[Numbers], int], metric: str) -> str:
        values = _mean(row[0], row[1], metric)
        return "-" if np.isnan(values).any() else writing.each(values)

    columns = {
        "mean abs of the ratio's log": lambda row: mean(row, _TOTAL),
        "staleness": lambda row: mean(row, _CHANGE),
        "mismatch": lambda row: mean(row, _MISMATCH),
        "effective samples": lambda row: mean(row, "staleness_ess"),
        "right in bf16, sampled": lambda row: writing.each(accuracies(row[0], "bf16")),
        "reward, last quarter": lambda row: writing.each(part(series(row[0], "reward_mean"), 3)),
    }
    arms = [
        (_TEXTS[_arm(learner, s)], (result["runs"][_arm(learner, s)], s))
        for learner in _LEARNERS
        for s in AHEAD
    ]
    return (
        f"{result['name']}, {result['steps']} steps of RL, a figure for each seed; "
        f"{result['questions']} held-out questions of {result['samples']} samples. Means over "
        "tokens and steps, in nats; with FP8 on both sides the ratio is the staleness.\n\n"
        f"{writing.table('arm', arms, columns)}\n"
    )


def _figure(result: Result) -> Figure:
    """Draws the parts of the ratio by the steps ahead, and accuracies."""
    figure, (parts, learnt) = writing.panels(2, 11, 4)

    def means(learner: str, metric: str) -> list[float]:
        values = [_mean(result["runs"][_arm(learner, s)], s, metric) for s in AHEAD]
        return [0.0 if np.isnan(x).any() else float(x.mean()) for x in values]

    for colour, (learner, text) in zip(writing.COLOURS, _LEARNERS.items(), strict=False):
        stale = means(learner, _CHANGE if learner == "bf16" else _TOTAL)
        parts.plot(AHEAD, stale, "o-", color=colour, label=f"{text}: staleness")
        parts.plot(AHEAD, means(learner, _MISMATCH), "s--", color=colour, label="its mismatch")
        every = np.array([accuracies(result["runs"][_arm(learner, s)], "bf16") for s in AHEAD])
        learnt.plot(AHEAD, every, "-", color=colour, lw=0.7, alpha=0.4)
        learnt.plot(AHEAD, every.mean(axis=1), "o-", color=colour, label=text)
    writing.plain(parts, "steps ahead", "mean |part of the log ratio|, nats")
    writing.plain(learnt, "steps ahead", "sampled accuracy in bf16")
    for axes in (parts, learnt):
        axes.legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(
    "staleness",
    full=Size(steps=160),
    quick=Size(steps=8),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
