"""Study `training`: the mismatch of an FP8 rollout and a bf16 learner over RL training.

"FP8-RL", according to a summary of the paper (not read itself), finds that the mismatch KL of a
mixture of experts rises over training, and that truncated importance sampling (TIS) keeps training
stable. Here a model is trained with an FP8 rollout and a bf16 learner from one start, with TIS and
without any correction. A mixture of experts is compared with a dense model by running the study on
a config of each.

Entropy is the confounder. Let quantisation move each logit by an independent error of variance v.
Then, to the second order, KL(rollout || learner) is ``v / 2 (1 - sum p^2)`` in expectation. That
factor falls with the policy's entropy H, so the mismatch may fall in RL while the error v grows.
Hence two more figures. The first, the RMS of the logits' difference, is the root of v and has no
such factor. But an error in proportion to the logits grows with them, and logits grow where RL
sharpens the policy; so it is divided by the RMS of the logits. It needs the full vocabulary, so it
is measured before and after RL, on samples of the policy at that time. The second, for every step,
is the mismatch per nat of entropy, KL / H. It is rough: ``(1 - sum p^2) / H`` is 0.72 for two equal
tokens, 0.39 for ten, and 0.35 for two tokens of probabilities 0.99 and 0.01. So the first figure
decides. A regression on entropy is not used: if mismatch and entropy both follow the step, it would
explain any trend.

The unit is the seed. A trend is Kendall's tau of each seed's curve with Student's interval over
seeds, and the p-value of Mann-Kendall's test of the mean curve. Not done: mismatch in later updates
of a rollout, when the policy has changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.quant import get_recipe
from studies import writing
from studies.cells import Cell, described
from studies.frame import GROUP, Found, Numbers, Plan, Result, Size, Study, Verdict
from studies.hypotheses import ANY, Hypothesis, Zone
from studies.measures import PROBABILITIES, Pair
from studies.runs import TIS, UNCORRECTED, After, Fields, accuracies, arm_cells, part, series
from studies.scoring import View
from studies.statistics import kendall_tau, mann_kendall
from studies.step0 import Scoring
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 8  # least steps: two for each quarter
_BLOCKS = 16  # blocks into which the bootstrap divides a run's steps
ARMS: dict[str, Fields] = {
    name: {"precision.rollout": "fp8_blockwise", "precision.learner": "bf16", **correction}
    for name, correction in (("uncorrected", UNCORRECTED), ("tis", TIS))
}
MEASURES = {
    "mismatch_kl": "mismatch KL",
    "train_rollout_logprob_abs_diff": "mean abs D",
    "entropy": "entropy",
    "per_nat": "mismatch KL per nat of entropy",
}

_SIDES = ("fp8_blockwise", "bf16")  # rollout and learner
_PAIR = "learner / rollout"
_VIEWS = {name: View(get_recipe(name)) for name in _SIDES}


def _trend(name: str, text: str, curve: str, zone: Zone) -> Hypothesis:
    """Makes a hypothesis about the trend of a curve, by its Kendall's tau."""
    test = "Mann-Kendall's test of the mean curve, bootstrap of blocks of steps"
    return Hypothesis(
        name, f"Uncorrected, {text}", f"Kendall's tau of {curve} and step", zone, test
    )


_RISES, _FALLS = Zone(low=0.0), Zone(high=0.0)
RISES = _trend("rises", "the mismatch KL rises over the steps of RL", "mismatch KL", _RISES)
SIZE_RISES = _trend("size_rises", "mean |D| rises over the steps of RL", "mean |D|", _RISES)
ENTROPY_FALLS = _trend(
    "entropy_falls", "the learner's entropy, the confounder, falls", "entropy", _FALLS
)
PER_NAT_RISES = _trend(
    "per_nat_rises",
    "the mismatch KL rises per nat of entropy",
    "mismatch KL per nat of entropy",
    _RISES,
)
ERROR_GROWS = Hypothesis(
    "error_grows",
    "Uncorrected, the error of the logits, which entropy does not confound, grows",
    "RMS of the logits' difference over that of the logits, after RL over before",
    Zone(low=1.0 + ANY),
)
TIS_STABLE = Hypothesis(
    "tis_stable",
    "With TIS training is stable: the reward rises",
    "mean reward of the last quarter of the steps less that of the first",
    Zone(low=ANY),
)
TIS_NOT_ABOVE = Hypothesis(
    "tis_not_above",
    "With TIS the mismatch KL ends no more than a tenth above that without",
    "mean mismatch KL of the last quarter of the steps, with TIS over without",
    Zone(high=1.1),
)


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    """Returns the scores 'before RL', and each arm with the scores after it."""
    steps, questions = plan.size.steps, plan.size.questions
    if steps < _LEAST:
        raise UserError(f"study training: --steps={steps} shows no trend: write {_LEAST} or more")
    scoring = Scoring(_VIEWS, {_PAIR: _SIDES}, _SIDES[0], questions)
    key = {
        "questions": questions,
        "group": GROUP,
        "rollout": _SIDES[0],
        "views": {name: described(view.recipe) for name, view in _VIEWS.items()},
    }

    def measure(weights: list) -> Numbers:
        return scoring.numbers(subject.runtime, weights[-1], note=plan.note)

    after = After(key, measure)
    before = {"before RL": scoring.cell("training", subject, plan.note)}
    return before | arm_cells("training", subject, plan, ARMS, after)


def _result(found: Found) -> Result:
    return {
        "experts": found.subjects[0].model.num_experts,
        "block": _block(found.size.steps),
        "before": [_summary(numbers) for numbers in found.each("before RL")],
        "runs": {arm: [_with_ratio(run) for run in found.each(arm)] for arm in ARMS},
    }


def _pair(numbers: Numbers) -> Pair:
    return Pair(numbers["pairs"][_PAIR])


def _block(steps: int) -> int:
    """Returns the number of steps of a block of the bootstrap."""
    return max(steps // _BLOCKS, 1)


def _per_nat(divergence: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Returns mismatch KL over entropy; 0 where the entropy is 0."""
    return np.divide(divergence, entropy, out=np.zeros_like(divergence), where=entropy > 0)


def _with_ratio(numbers: Numbers) -> Numbers:
    """Returns a run's numbers with the curve of KL / entropy, and a summary of the last scores."""
    curves = numbers["series"]
    ratio = _per_nat(np.array(curves["mismatch_kl"]), np.array(curves["entropy"]))
    after = _summary(numbers["after"])
    return {**numbers, "series": {**curves, "per_nat": ratio.tolist()}, "after": after}


def _summary(numbers: Numbers) -> dict[str, Any]:
    pair = _pair(numbers)
    return {**pair.summary(), "relative_rms": pair.relative_rms()}


def _judge(found: Found) -> list[Verdict]:
    plain, tis = found.each("uncorrected"), found.each("tis")
    divergence, size, entropy = (
        series(plain, name) for name in ("mismatch_kl", "train_rollout_logprob_abs_diff", "entropy")
    )

    def trend(hypothesis: Hypothesis, curves: np.ndarray) -> Verdict:
        p = mann_kendall(curves.mean(axis=0), _block(curves.shape[1])).p
        return hypothesis.judge_seeds(kendall_tau(curves), p, within=(-1.0, 1.0))

    before, after = (
        np.array([_pair(numbers).relative_rms() for numbers in scores])
        for scores in (found.each("before RL"), [run["after"] for run in plain])
    )
    ends = part(series(tis, "mismatch_kl"), 3) / part(divergence, 3)
    rewards = series(tis, "reward_mean")
    return [
        trend(RISES, divergence),
        trend(SIZE_RISES, size),
        trend(ENTROPY_FALLS, entropy),
        ERROR_GROWS.judge_seeds(after / before),
        trend(PER_NAT_RISES, _per_nat(divergence, entropy)),
        TIS_STABLE.judge_seeds(part(rewards, 3) - part(rewards, 0)),
        TIS_NOT_ABOVE.judge_seeds(ends),
    ]


def _tables(result: Result) -> str:
    """Returns tables of every measure's first and last quarter and trend, of the ends of the runs,
    and of the scores."""
    curves = [
        (arm, (text, series(runs, name)))
        for arm, runs in result["runs"].items()
        for name, text in MEASURES.items()
    ]
    trends = {
        "measure": lambda row: row[0],
        "first quarter of the steps": lambda row: writing.each(part(row[1], 0)),
        "last quarter": lambda row: writing.each(part(row[1], 3)),
        "Kendall's tau": lambda row: writing.each(kendall_tau(row[1])),
    }
    ends = {
        "reward, last quarter": lambda runs: writing.each(part(series(runs, "reward_mean"), 3)),
        "right in bf16, sampled": lambda runs: writing.each(accuracies(runs, "bf16")),
        "right under FP8": lambda runs: writing.each(accuracies(runs, "own")),
    }
    policies = {"before RL": result["before"]}
    policies |= {f"after, {arm}": [x["after"] for x in xs] for arm, xs in result["runs"].items()}

    def column(read: Callable[[dict[str, Any]], float | None]) -> Callable[[list], str]:
        return lambda seeds: writing.each([read(pair) for pair in seeds])

    def mean(place: int) -> Callable[[list], str]:
        return column(lambda pair: pair["by"]["probability"][place])

    scores = {
        "RMS of logits": column(lambda pair: pair["rms_logits"][0]),
        "over the logits'": column(lambda pair: pair["relative_rms"]),
        "mean abs D": column(lambda pair: pair["mean_abs"][0]),
        "exact KL": column(lambda pair: pair["kl"][0]),
        "entropy": column(lambda pair: pair["entropy"][0]),
    }
    for place, (low, high) in enumerate(itertools.pairwise(PROBABILITIES)):
        scores[f"abs D, p {low:g} to {high:g}"] = mean(place)
    kind = f"{result['experts']} experts" if result["experts"] else "dense"
    return (
        f"{result['name']} ({kind}), rollout in FP8, learner in bf16, {result['steps']} steps of "
        f"RL, a figure for each seed. p-values are of blocks of "
        f"{result['block']} steps.\n\n{writing.table('arm', curves, trends)}\n"
        f"{writing.table('arm', result['runs'].items(), ends)}\nBefore and after RL, "
        f"{result['questions']} held-out questions of {result['group']} samples; abs D also among "
        "tokens to which the sampler gives a probability p.\n\n"
        f"{writing.table('policy', policies.items(), scores)}"
    )


def _figure(result: Result) -> Figure:
    """Draws the measures over the steps."""
    figure, panels = writing.panels(len(MEASURES), 14, 3.6)
    for axes, (name, text) in zip(panels, MEASURES.items(), strict=True):
        for colour, (arm, runs) in zip(writing.COLOURS, result["runs"].items(), strict=False):
            writing.curves(axes, runs, name, colour, arm)
        writing.plain(axes, "RL step", text)
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(
    "training",
    full=Size(questions=64, steps=160),
    quick=Size(questions=32, steps=8),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
