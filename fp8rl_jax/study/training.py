"""`fp8rl study training`: the mismatch of an FP8 rollout and a bf16 learner over RL training.

"FP8-RL", as its digest tells it, finds that the mismatch KL of a mixture of experts rises over
training, and that truncated importance sampling (TIS) keeps training stable. Here a model is
trained with an FP8 rollout and a bf16 learner from one start, with TIS and without any correction.
A mixture of experts is compared with a dense model by running the study on a config of each.

Entropy is the confounder. Let quantisation move each logit by an independent error of variance v.
Then, to the second order, KL(rollout || learner) is ``v / 2 (1 - sum p^2)`` in expectation. That
factor falls with the policy's entropy H, so the mismatch may fall in RL while the error v grows.
Hence two more figures. The RMS of the logits' difference is the root of v and has no such factor,
but an error in proportion to the logits grows with them, and logits grow where RL sharpens the
policy; so it is divided by the RMS of the logits. It needs the whole vocabulary, so it is taken
before and after RL, of samples of the policy at that time. Over the steps there is the mismatch per
nat of entropy, KL / H, which is a rough match: ``(1 - sum p^2) / H`` is 0.72 for two equal tokens,
0.39 for ten, and 0.35 for two of 0.99 and 0.01. So the former decides. A regression on entropy is
not used: where mismatch and entropy both follow the step, it would explain any trend away.

The unit is the seed. A trend is Kendall's tau of each seed's curve with Student's interval over
seeds, and the p-value of Mann-Kendall's test of the mean curve. Not done: mismatch in later updates
of a rollout, which is a change of the policy.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.study import writing
from fp8rl_jax.study.cells import Cells, described
from fp8rl_jax.study.hypotheses import ANY, Hypothesis
from fp8rl_jax.study.measures import PROBABILITIES, Pair
from fp8rl_jax.study.progress import Note, Progress, silent
from fp8rl_jax.study.runs import TIS, UNCORRECTED, After, Arms, Fields, part, series
from fp8rl_jax.study.scoring import View
from fp8rl_jax.study.statistics import kendall_tau, mann_kendall, seed_mean
from fp8rl_jax.study.step0 import score_cell, scored
from fp8rl_jax.study.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, QUICK_STEPS = 160, 8
QUESTIONS, QUICK_QUESTIONS, GROUP = 64, 32, 8  # scored before and after RL, and samples of each
_LEAST = 8  # steps: two of each quarter
_BLOCKS = 16  # of the bootstrap, in a run's steps
ARMS: dict[str, Fields] = {
    name: {"precision.rollout": "fp8", "precision.learner": "bf16", **correction}
    for name, correction in (("uncorrected", UNCORRECTED), ("tis", TIS))
}
MEASURES = {
    "mismatch_kl": "mismatch KL",
    "train_rollout_logprob_abs_diff": "mean abs D",
    "entropy": "entropy",
    "per_nat": "mismatch KL per nat of entropy",
}

_SIDES = ("fp8", "bf16")  # rollout and learner
_PAIR = "learner / rollout"
_VIEWS = {name: View(get_recipe(name)) for name in _SIDES}

_TEST = "Mann-Kendall's test of the mean curve, bootstrap of blocks of steps"
RISES = Hypothesis(
    "rises",
    "Uncorrected, the mismatch KL rises over the steps of RL",
    "Kendall's tau of mismatch KL and step",
    low=0.0,
    test=_TEST,
)
SIZE_RISES = Hypothesis(
    "size_rises",
    "Uncorrected, mean |D| rises over the steps of RL",
    "Kendall's tau of mean |D| and step",
    low=0.0,
    test=_TEST,
)
ENTROPY_FALLS = Hypothesis(
    "entropy_falls",
    "Uncorrected, the learner's entropy, the confounder, falls",
    "Kendall's tau of entropy and step",
    high=0.0,
    test=_TEST,
)
ERROR_GROWS = Hypothesis(
    "error_grows",
    "Uncorrected, the error of the logits, which entropy does not confound, grows",
    "RMS of the logits' difference over that of the logits, after RL over before",
    low=1.0 + ANY,
)
PER_NAT_RISES = Hypothesis(
    "per_nat_rises",
    "Uncorrected, the mismatch KL rises per nat of entropy",
    "Kendall's tau of mismatch KL per nat of entropy and step",
    low=0.0,
    test=_TEST,
)
TIS_STABLE = Hypothesis(
    "tis_stable",
    "With TIS training is stable: the reward rises",
    "mean reward of the last quarter of the steps less that of the first",
    low=ANY,
)
TIS_NOT_ABOVE = Hypothesis(
    "tis_not_above",
    "With TIS the mismatch KL ends no more than a tenth above that without",
    "mean mismatch KL of the last quarter of the steps, with TIS over without",
    high=1.1,
)


def study(
    subjects: Sequence[Subject],
    out: pathlib.Path,
    cells: Cells,
    note: Note = silent,
    questions: int = QUESTIONS,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Trains what is missing of the cells, and judges the hypotheses.

    Args:
      subjects: one for each seed.
      out: where runs are.
      cells: finished ones.
      note: called with a line about what is done.
      questions: scored before and after RL, with GROUP samples each.
      steps: of RL.

    Returns:
      What study.json holds.

    Raises:
      UserError: there are too few steps for a trend; or of `score_cell`.
    """
    if steps < _LEAST:
        raise UserError(f"study training: --steps={steps} shows no trend: write {_LEAST} or more")
    runs: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    before: list[dict] = []
    progress = Progress(len(subjects) * (1 + len(ARMS)), note)
    for subject in subjects:
        before.append(
            score_cell(
                "training",
                subject,
                cells,
                _VIEWS,
                {_PAIR: _SIDES},
                rollout=_SIDES[0],
                questions=questions,
                group=GROUP,
                note=note,
            )
        )
        progress.add(f"scores of {subject.name}, seed {subject.seed}, before RL")
        arms = Arms(subject, {"run.steps": steps}, out, cells, note)
        key = {
            "questions": questions,
            "group": GROUP,
            "rollout": _SIDES[0],
            "views": {name: described(view.recipe) for name, view in _VIEWS.items()},
        }
        after = After(key, functools.partial(_score, subject, questions, note))
        for arm, fields in ARMS.items():
            runs[arm].append(arms.run("training", arm, fields, after))
            progress.add(f"RL of {subject.name}, seed {subject.seed}, {arm}")
    return {
        "study": "training",
        "name": subjects[0].name,
        "experts": subjects[0].model.num_experts,
        "subjects": [subject.identity for subject in subjects],
        "steps": steps,
        "block": _block(steps),
        "questions": questions,
        "group": GROUP,
        "before": [_summary(cell["numbers"]) for cell in before],
        "runs": {
            arm: [_with_ratio(cell["numbers"]) for cell in found] for arm, found in runs.items()
        },
        "hypotheses": _judge(before, runs),
        "origins": writing.origins(before + [cell for found in runs.values() for cell in found]),
    }


def _score(subject: Subject, questions: int, note: Note, params: Any) -> dict[str, Any]:
    """The numbers of `score_cell` for other weights of a subject's model."""
    return scored(
        subject.runtime,
        params,
        _VIEWS,
        {_PAIR: _SIDES},
        rollout=_SIDES[0],
        questions=subject.runtime.questions["eval"][:questions],
        group=GROUP,
        note=note,
    )


def _pair(numbers: dict[str, Any]) -> Pair:
    return Pair(numbers["pairs"][_PAIR])


def _block(steps: int) -> int:
    """Steps of a block of the bootstrap."""
    return max(steps // _BLOCKS, 1)


def _per_nat(divergence: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Mismatch KL over entropy; 0 where the policy has none."""
    return np.divide(divergence, entropy, out=np.zeros_like(divergence), where=entropy > 0)


def _with_ratio(numbers: dict[str, Any]) -> dict[str, Any]:
    """A run's numbers with the curve of KL / entropy, and a summary of the scores after it."""
    curves = numbers["series"]
    ratio = _per_nat(np.array(curves["mismatch_kl"]), np.array(curves["entropy"]))
    after = _summary(numbers["after"])
    return {**numbers, "series": {**curves, "per_nat": ratio.tolist()}, "after": after}


def _summary(numbers: dict[str, Any]) -> dict[str, Any]:
    pair = _pair(numbers)
    return {**pair.summary(), "relative_rms": pair.relative_rms()}


def _judge(before: list[dict], runs: dict[str, list[dict]]) -> list[dict[str, Any]]:
    """The verdicts of the scores before RL, and of the cells of each arm, one a seed."""
    plain = runs["uncorrected"]
    divergence, size, entropy = (
        series(plain, name) for name in ("mismatch_kl", "train_rollout_logprob_abs_diff", "entropy")
    )

    def trend(hypothesis: Hypothesis, curves: np.ndarray) -> dict[str, Any]:
        each = kendall_tau(curves)
        p = mann_kendall(curves.mean(axis=0), _block(curves.shape[1])).p
        return hypothesis.judge(seed_mean(each, within=(-1.0, 1.0)), p, each.tolist())

    growth = np.array(
        [
            _pair(cell["numbers"]["after"]).relative_rms() / _pair(start["numbers"]).relative_rms()
            for start, cell in zip(before, plain, strict=True)
        ]
    )
    ends = part(series(runs["tis"], "mismatch_kl"), 3) / part(divergence, 3)
    rewards = series(runs["tis"], "reward_mean")
    gains = part(rewards, 3) - part(rewards, 0)
    return [
        trend(RISES, divergence),
        trend(SIZE_RISES, size),
        trend(ENTROPY_FALLS, entropy),
        ERROR_GROWS.judge(seed_mean(growth), seeds=growth.tolist()),
        trend(PER_NAT_RISES, _per_nat(divergence, entropy)),
        TIS_STABLE.judge(seed_mean(gains), seeds=gains.tolist()),
        TIS_NOT_ABOVE.judge(seed_mean(ends), seeds=ends.tolist()),
    ]


def format_table(result: dict[str, Any]) -> str:
    """Markdown: first and last quarter of every measure, and its trend."""
    rows = [("arm", "measure", "first quarter of the steps", "last quarter", "Kendall's tau")]
    ends = [("arm", "reward, last quarter", "right in bf16, sampled", "right under FP8")]
    for arm, found in result["runs"].items():
        for name, text in MEASURES.items():
            curves = np.array([run["series"][name] for run in found])
            quarters = (writing.each(part(curves, quarter)) for quarter in (0, 3))
            rows.append((arm, text, *quarters, writing.each(kendall_tau(curves))))
        rewards = np.array([run["series"]["reward_mean"] for run in found])
        accuracies = (
            writing.each([run[how]["accuracy_sampled"] for run in found]) for how in ("bf16", "own")
        )
        ends.append((arm, writing.each(part(rewards, 3)), *accuracies))
    scores = [
        (
            "policy",
            "RMS of logits",
            "over the logits'",
            "mean abs D",
            "exact KL",
            "entropy",
            *(f"abs D, p {a:g} to {b:g}" for a, b in itertools.pairwise(PROBABILITIES)),
        )
    ]
    policies = {"before RL": result["before"]}
    policies |= {f"after, {arm}": [x["after"] for x in xs] for arm, xs in result["runs"].items()}
    for policy, found in policies.items():
        rms, *means = (
            writing.each([x[name][0] for x in found])
            for name in ("rms_logits", "mean_abs", "kl", "entropy")
        )
        relative = writing.each([x["relative_rms"] for x in found])
        bins = zip(*(x["by"]["probability"] for x in found), strict=True)
        scores.append((policy, rms, relative, *means, *(_known(values) for values in bins)))
    kind = f"{result['experts']} experts" if result["experts"] else "dense"
    return (
        f"{result['name']} ({kind}), rollout in FP8, learner in bf16, {result['steps']} steps of "
        f"RL, a figure for each seed. p-values are of blocks of "
        f"{result['block']} steps.\n\n{writing.markdown_table(*rows)}\n"
        f"{writing.markdown_table(*ends)}\nBefore and after RL, {result['questions']} held-out "
        f"questions of {result['group']} samples; abs D also among tokens to which the sampler "
        f"gives a probability p.\n\n{writing.markdown_table(*scores)}"
    )


def _known(values: Sequence[float | None]) -> str:
    """Figures of seeds, of which some have none."""
    return ", ".join("-" if value is None else f"{value:.3g}" for value in values)


def draw(result: dict[str, Any]) -> Figure:
    """The measures over the steps."""
    from matplotlib.figure import Figure  # here alone: the other commands start without it

    figure = Figure(figsize=(14, 3.6), layout="constrained", dpi=110)
    panels = figure.subplots(1, len(MEASURES))
    for axes, (name, text) in zip(panels, MEASURES.items(), strict=True):
        for colour, (arm, found) in zip(writing.COLOURS, result["runs"].items(), strict=False):
            writing.curves(axes, found, name, colour, arm)
        writing.plain(axes, "RL step", text)
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8)
    return figure
