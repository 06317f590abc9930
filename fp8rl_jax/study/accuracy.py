"""`fp8rl study accuracy`: what precision and correction cost in accuracy after RL.

"FP8-RL", as its digest tells it, trains an 8B model with an FP8 rollout and a bf16 learner: with
truncated importance sampling (TIS) it tracks BF16, and without it degrades. NVIDIA's report on FP8
for RL gives Llama 3.1 8B 0.616 in BF16, 0.586 with FP8 generation only and 0.613 in FP8 end to end
after 4,000 steps. Here all arms of a seed have one start, one order of questions and the same
sampling keys, so the figures are differences within seeds.

Every arm is evaluated under bf16, which is one engine for all, and under its own rollout's recipe.
The hypotheses take the former: they are about what was learned.

Differences of 0.03 may be below the noise of a small model, so there are two *stress* arms in
which the mismatch is large: an FP8 rollout whose activations have a fixed scale that clips what is
above CLIP, as a scale that was calibrated once and is out of date does, with a learner in bf16. How
much is above CLIP depends on the model, so whether the mismatch is large is a hypothesis too.

The unit is the seed. Hypotheses that allow for a margin look at the mean over seeds alone; those of
a direction want every seed to agree. One seed resolves nothing. Two seeds may have nearly the same
difference by chance, so the standard deviation of a difference is taken as at least the noise of
its two evaluations: the root of the sum of their squared standard errors, clustered by question.
The arms answer the same questions, so the noise of a difference is smaller than that; this errs
on the side of "not resolved".
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.study import writing
from fp8rl_jax.study.cells import Cells
from fp8rl_jax.study.hypotheses import ANY, SUPPORTED, Hypothesis
from fp8rl_jax.study.progress import Note, Progress, silent
from fp8rl_jax.study.runs import TIS, UNCORRECTED, Arms, Fields, part, series
from fp8rl_jax.study.statistics import equivalence, seed_mean, seeds_needed
from fp8rl_jax.study.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, QUICK_STEPS = 160, 3
MARGIN = 0.03  # of sampled accuracy; about NVIDIA's difference between BF16 and FP8 generation only
CLIP = 32.0  # of the activations in the rollout of the stress arms

_BF16: Fields = {
    "precision.rollout": "bf16",
    "precision.learner": "bf16",
    "algo.correction": "none",
}
_FP8: Fields = {"precision.rollout": "fp8", "precision.learner": "fp8", "algo.correction": "none"}
_MIXED: Fields = {"precision.rollout": "fp8", "precision.learner": "bf16"}
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
    -MARGIN,
    MARGIN,
    _TOST,
)
TRACKS = Hypothesis(
    "tracks",
    "With TIS an FP8 rollout with a bf16 learner learns as much as bf16",
    "mean of sampled accuracy less that of bf16",
    -MARGIN,
    MARGIN,
    _TOST,
)
DEGRADES = Hypothesis(
    "degrades",
    "Without correction an FP8 rollout with a bf16 learner learns less than bf16",
    "mean of sampled accuracy less that of bf16",
    high=-ANY,
)
NARROWS = Hypothesis(
    "narrows",
    "With TIS an FP8 rollout with a bf16 learner learns more than without",
    "mean of sampled accuracy less that without correction",
    low=ANY,
)
STRESSED = Hypothesis(
    "stressed",
    "The stress is one: its mismatch is at least twice that of the FP8 rollout (if "
    "not, the hypotheses under stress say little)",
    "mean |D| over the steps, uncorrected, under stress over without",
    low=2.0,
)
STRESS_DEGRADES = Hypothesis(
    "stress_degrades",
    "Under stress the arm without correction learns less than bf16",
    "mean of sampled accuracy less that of bf16",
    high=-ANY,
)
STRESS_TIS = Hypothesis(
    "stress_tis",
    "Under stress TIS learns more than no correction",
    "mean of sampled accuracy less that without correction",
    low=ANY,
)
STRESS_RECOVERS = Hypothesis(
    "stress_recovers",
    "Under stress TIS recovers what bf16 learns, up to the margin",
    "mean of sampled accuracy less that of bf16",
    low=-MARGIN,
)
# Each with the arm and the other arm of its difference.
HYPOTHESES = (
    (UNIFIED, "unified", BASELINE),
    (TRACKS, "rollout_tis", BASELINE),
    (DEGRADES, "rollout", BASELINE),
    (NARROWS, "rollout_tis", "rollout"),
    (STRESS_DEGRADES, "stress_rollout", BASELINE),
    (STRESS_TIS, "stress_rollout_tis", "stress_rollout"),
    (STRESS_RECOVERS, "stress_rollout_tis", BASELINE),
)


def study(
    subjects: Sequence[Subject],
    out: pathlib.Path,
    cells: Cells,
    note: Note = silent,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Trains what is missing of the cells, and judges the hypotheses.

    Args:
      subjects: one for each seed.
      out: where runs are.
      cells: finished ones.
      note: called with a line about what is done.
      steps: of RL.

    Returns:
      What study.json holds.

    Raises:
      UserError: there is no step.
    """
    if steps < 1:
        raise UserError(f"study accuracy: --steps={steps} trains nothing: write 1 or more")
    runs: dict[str, list[dict]] = {name: [] for name in ARMS}
    progress = Progress(len(subjects) * len(runs), note)
    for subject in subjects:
        arms = Arms(subject, {"run.steps": steps}, out, cells, note)
        for name, fields in ARMS.items():
            runs[name].append(arms.run("accuracy", name, fields))
            progress.add(f"RL of {subject.name}, seed {subject.seed}, {name}")
    config = subjects[0].runtime.config
    return {
        "study": "accuracy",
        "name": subjects[0].name,
        "subjects": [subject.identity for subject in subjects],
        "steps": steps,
        "questions": config.eval.questions,
        "samples": config.eval.samples,
        "margin": MARGIN,
        "runs": {name: [cell["numbers"] for cell in found] for name, found in runs.items()},
        "differences": {name: _differences(runs, name) for name in runs if name != BASELINE},
        "hypotheses": _judge(runs),
        "origins": writing.origins([cell for found in runs.values() for cell in found]),
    }


def _less(runs: dict[str, list[dict]], arm: str, other: str) -> tuple[np.ndarray, float]:
    """Sampled accuracy under bf16 of an arm less that of another, of each seed (S,), and the least
    standard deviation that it is taken to have."""

    def values(name: str) -> np.ndarray:  # (2, S)
        metrics = ("accuracy_sampled", "accuracy_sampled_se")
        return np.array([[cell["numbers"]["bf16"][m] for cell in runs[name]] for m in metrics])

    (one, one_error), (two, two_error) = values(arm), values(other)
    return one - two, float(np.sqrt((one_error**2 + two_error**2).mean()))


def _differences(runs: dict[str, list[dict]], arm: str) -> dict[str, Any]:
    """An arm less bf16: each seed, their standard deviation, and how many seeds find a
    difference of the margin; None for the last two with one seed."""
    each, least = _less(runs, arm, BASELINE)
    several = len(each) > 1
    return {
        "each": each.tolist(),
        "sd": max(float(each.std(ddof=1)), least) if several else None,
        "seeds_needed": seeds_needed(each, MARGIN, least) if several else None,
    }


def _judge(runs: dict[str, list[dict]]) -> list[dict[str, Any]]:
    """The verdicts of the cells of each arm, one a seed."""
    verdicts, found = [], {}
    for hypothesis, arm, other in HYPOTHESES:
        (each, least), p, unresolved = _less(runs, arm, other), None, ""
        if hypothesis.test:
            p = equivalence(each, MARGIN, least) if len(each) > 1 else math.nan
        directed = ANY in (hypothesis.low, -hypothesis.high)
        seeds = each.tolist() if directed else ()
        if hypothesis is STRESS_RECOVERS and found[STRESS_DEGRADES.name] != SUPPORTED:
            unresolved = "without correction nothing was seen to be lost"
        verdict = hypothesis.judge(seed_mean(each, least), p, seeds, unresolved)
        found[hypothesis.name] = verdict["verdict"]
        verdicts.append(verdict)
    sizes = (
        series(runs[arm], "train_rollout_logprob_abs_diff").mean(axis=1)
        for arm in ("stress_rollout", "rollout")
    )
    ratios = np.divide(*sizes)
    return [*verdicts, STRESSED.judge(seed_mean(ratios), seeds=ratios.tolist())]


def format_table(result: dict[str, Any]) -> str:
    """Markdown: all arms, and how many seeds would resolve the margin."""
    rows = [
        (
            "arm",
            "right in bf16, sampled",
            "less bf16",
            "right under its own recipe",
            "mean abs D",
            "reward, last quarter",
        )
    ]
    for arm, found in result["runs"].items():
        curves = [run["series"] for run in found]
        sizes = [np.mean(c["train_rollout_logprob_abs_diff"]) for c in curves]
        less = result["differences"].get(arm)
        rows.append(
            (
                _TEXTS[arm],
                writing.each([run["bf16"]["accuracy_sampled"] for run in found]),
                writing.each(less["each"]) if less else "",
                writing.each([run["own"]["accuracy_sampled"] for run in found]),
                writing.each(sizes),
                writing.each(part(np.array([c["reward_mean"] for c in curves]), 3)),
            )
        )
    return (
        f"{result['name']}, {result['steps']} steps of RL, a figure for each seed; "
        f"{result['questions']} held-out questions of {result['samples']} samples. Under "
        f"stress the rollout clips activations at {CLIP:g}.\n\n{writing.markdown_table(*rows)}\n"
        f"{format_power(result)}\n"
    )


def format_power(result: dict[str, Any]) -> str:
    """A sentence: what the paired differences' deviation says of the number of seeds."""
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


def draw(result: dict[str, Any]) -> Figure:
    """Accuracies with a line for each seed, and curves of the reward."""
    from matplotlib.figure import Figure  # here alone: the other commands start without it

    figure = Figure(figsize=(14, 4), layout="constrained", dpi=110)
    paired, rewards = figure.subplots(1, 2)
    names = list(result["runs"])
    every = np.array(
        [[run["bf16"]["accuracy_sampled"] for run in result["runs"][name]] for name in names]
    )  # (arms, seeds)
    paired.plot(range(len(names)), every, "o-", color="#999999", ms=3, lw=0.8)
    paired.plot(range(len(names)), every.mean(axis=1), "ko", ms=7)
    labels = [name.replace("_", "\n") for name in names]
    paired.set_xticks(range(len(names)), labels, fontsize=8)
    for colour, name in zip(writing.COLOURS, names, strict=False):
        writing.curves(rewards, result["runs"][name], "reward_mean", colour, _TEXTS[name])
    writing.plain(paired, "", "sampled accuracy in bf16")
    writing.plain(rewards, "RL step", "reward")
    rewards.legend(frameon=False, fontsize=8)
    return figure
