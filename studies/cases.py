"""Study `cases`: an FP8 rollout against learners in bf16, in imitated FP8, and in FP8.

The article "Unified FP8: Moving Beyond Mixed Precision for Stable and Accelerated MoE RL" (InfiXAI,
Ant, SGLang and Miles teams, 25 November 2025) trains four cases with an FP8 rollout: the learner in
bf16 (1), with FP8 imitated in the forward pass (2) or in both passes (3), and in FP8 (4). Step 0
scores one set of samples under all of them; then each case trains from the same start.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from fp8rl_jax.quant import Recipe, get_recipe
from studies import writing
from studies.cells import Cell
from studies.frame import Found, Plan, Result, Size, Study, Verdict
from studies.hypotheses import ANY, Hypothesis, Zone
from studies.measures import CAPS, Pair, judge_pairs, read_pairs, summaries
from studies.runs import accuracies, arm_cells, series
from studies.scoring import View
from studies.statistics import Estimate, ratio_of_means, span
from studies.step0 import Scoring
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = {"case1": "bf16", "case2": "fake_forward", "case3": "fake", "case4": "fp8_blockwise"}
_CAP = 2.0  # largest weight of TIS
_POW2, _ENDS = "fp8_blockwise_pow2", "fp8, first and last layer bf16"  # names of ablations
_KL = 1e-3  # algo.kl_coef, so that runs record the divergence from the reference

REFERENCE = Hypothesis(
    "reference",
    "At step 0 the bf16 learner is its own bf16 reference",
    "mean exact KL to the reference",
    Zone(0.0, 0.0),
)
SAME_FORWARD = Hypothesis(
    "same_forward",
    "At step 0 cases 2 and 3 have equal bits: only their backward passes differ",
    "share of tokens whose log-probabilities differ",
    Zone(0.0, 0.0),
)
KL_EQUAL = Hypothesis(
    "kl_equal",
    "At step 0 the learner in FP8 is as far from the bf16 reference as imitated FP8 is",
    "mean exact KL of case 4 over that of case 2",
    Zone(0.95, 1.05),
)
ZERO = Hypothesis(
    "zero",
    "Rollout and learner in FP8 differ in no bit (case 4)",
    "share of tokens whose log-probability differs from what the sampler recorded",
    Zone(0.0, 0.0),
)
ZERO_BF16 = Hypothesis(
    "zero_bf16",
    "Rollout and learner in bf16 differ in no bit: token_mult_prob_error is 1",
    "share of tokens whose log-probability differs from what the sampler recorded",
    Zone(0.0, 0.0),
)
IMITATION = Hypothesis(
    "imitation",
    "Imitating FP8 removes most of the mismatch: that of case 1 is at least twice that of case 2",
    "mean |D| of case 1 over that of case 2",
    Zone(low=2.0),
)
ACCEPTED = Hypothesis(
    "accepted",
    "The mismatch of an FP8 rollout and a bf16 learner is above that of bf16 and bf16, "
    "and within NeMo RL's bound",
    "token_mult_prob_error of case 1",
    Zone(1.0 + 1e-6, 1.05),
)
CLIPPED = Hypothesis(
    "clipped",
    "More tokens have a ratio above 2 or below 1/2 in case 1 than in case 2",
    "share of such tokens in case 1 less that in case 2",
    Zone(low=ANY),
)
POW2 = Hypothesis(
    "pow2",
    "An FP8 rollout with scales that are powers of two, its KV cache's too, mismatches "
    "more than one with float32 scales",
    "mean |D| of a bf16 learner, powers of two over float32",
    Zone(low=1.0 + ANY),
)
ENDS = Hypothesis(
    "ends",
    "An FP8 rollout with bf16 in its first and last layer mismatches less than one without",
    "mean |D| of a bf16 learner, bf16 ends over FP8 in all layers",
    Zone(high=1.0 - ANY),
)
CURVE_CLIPPED = Hypothesis(
    "curve_clipped",
    "Over RL TIS clips more tokens in case 1 than in any other case",
    "tis_clipfrac of case 1, mean over steps, less the largest of the other cases",
    Zone(low=ANY),
)
CURVE_ZERO = Hypothesis(
    "curve_zero",
    "Case 4 has no mismatch at any step of RL",
    "mean over steps of mean |D|",
    Zone(0.0, 0.0),
)
CURVE_ORDER = Hypothesis(
    "curve_order",
    "Over RL case 1 has more mismatch than case 3",
    "mean over steps of |D|, case 1 over case 3",
    Zone(low=1.0),
)


def ablations(layers: int) -> dict[str, Recipe]:
    """Returns the rollout recipes that are compared with fp8_blockwise, each with a bf16 learner.

    They are the options of NeMo RL's FP8 (scales that are powers of two, first and last layers in
    bf16) and other granularities. Not done: delayed scales, which have no history before the first
    step.
    """
    fp8 = get_recipe("fp8_blockwise")
    found = {
        "fp8, bf16 KV": dataclasses.replace(fp8, kv="none"),
        _POW2: get_recipe(_POW2),
        "mxfp8": get_recipe("mxfp8"),
        "fp8_tensorwise": get_recipe("fp8_tensorwise"),
    }
    if layers > 2:
        found[_ENDS] = dataclasses.replace(fp8, first_layers=1, last_layers=1)
    return found


def _pairs(layers: int) -> dict[str, tuple[str, str]]:
    """Returns {name: two views to compare} for a model with `layers` layers."""
    pairs = {f"{c} / rollout": ("case4", c) for c in CASES}
    pairs |= {f"{c} / reference": (c, "case1") for c in CASES}
    pairs |= {"case3 / case2": ("case2", "case3")}
    return pairs | {f"bf16 / {name}": (name, "case1") for name in ablations(layers)}


def _read(found: Found) -> dict[str, list[Pair]]:
    return read_pairs(found.each("fp8"), _pairs(found.subjects[0].model.num_hidden_layers))


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    """Returns 'fp8' and 'bf16', step 0 of a rollout under that recipe; and each case's RL run."""
    layers = subject.model.num_hidden_layers
    views = {name: View(get_recipe(recipe)) for name, recipe in CASES.items()}
    views |= {name: View(recipe) for name, recipe in ablations(layers).items()}
    fp8 = Scoring(views, _pairs(layers), "case4", plan.size.questions)
    bf16 = Scoring({"bf16": View(get_recipe("bf16"))}, {}, "bf16", plan.size.questions)
    common = {
        "precision.reference": "bf16",
        "algo.kl_coef": _KL,
        "precision.rollout": "fp8_blockwise",
    }
    arms = {case: {**common, "precision.learner": recipe} for case, recipe in CASES.items()}
    return {
        "fp8": fp8.cell("cases", subject, plan.note),
        "bf16": bf16.cell("cases-bf16", subject, plan.note),
        **arm_cells("cases", subject, plan, arms),
    }


def _judge(found: Found) -> list[Verdict]:
    """Judges step 0, and the RL runs if there are any."""
    pairs = _read(found)

    def mean(hypothesis: Hypothesis, name: str, value: str) -> Verdict:
        return judge_pairs(hypothesis, lambda pair: pair.mean(value), pairs[name])

    def ratio(hypothesis: Hypothesis, one: str, other: str, value: str) -> Verdict:
        figure = functools.partial(_ratio, value=value)
        return judge_pairs(hypothesis, figure, pairs[one], pairs[other])

    fp8, bf16 = ([x["decode"]["unequal"] for x in found.each(name)] for name in ("fp8", "bf16"))
    case1, case2 = pairs["case1 / rollout"], pairs["case2 / rollout"]
    clipped = any(pair.tail[:, CAPS.index(_CAP)].any() for pair in case1 + case2)
    verdicts = [
        mean(REFERENCE, "case1 / reference", "kl"),
        mean(SAME_FORWARD, "case3 / case2", "unequal"),
        ratio(KL_EQUAL, "case4 / reference", "case2 / reference", "kl"),
        ZERO.judge(span(fp8), seeds=fp8),
        ZERO_BF16.judge(span(bf16), seeds=bf16),
        ratio(IMITATION, "case1 / rollout", "case2 / rollout", "abs"),
        judge_pairs(ACCEPTED, Pair.token_mult_prob_error, case1),
        judge_pairs(
            CLIPPED,
            lambda one, two: one.clip_less(two, _CAP),
            case1,
            case2,
            unresolved="" if clipped else "no token has such a ratio",
        ),
    ]
    for hypothesis, name in ((POW2, f"bf16 / {_POW2}"), (ENDS, f"bf16 / {_ENDS}")):
        if name in pairs:  # two layers have no middle layer, so no recipe with bf16 ends
            verdicts.append(ratio(hypothesis, name, "case1 / rollout", "abs"))
    if found.each("case1"):
        verdicts += _judge_runs(found)
    return verdicts


def _judge_runs(found: Found) -> list[Verdict]:
    size, clipped = (
        np.array([series(found.each(case), metric).mean(axis=1) for case in CASES])
        for metric in ("train_rollout_logprob_abs_diff", "tis_clipfrac")
    )  # (cases, seeds)
    verdicts = [
        CURVE_ZERO.judge(span(size[3].tolist()), seeds=size[3].tolist()),
        CURVE_ORDER.judge_seeds(size[0] / size[2]),
    ]
    if not np.isnan(clipped).any():  # NaN if the configuration names a correction other than TIS
        nothing = "" if clipped.any() else "no token was clipped"
        less = clipped[0] - clipped[1:].max(axis=0)
        verdicts.append(CURVE_CLIPPED.judge_seeds(less, unresolved=nothing))
    return verdicts


def _ratio(one: Pair, other: Pair, value: str) -> Estimate:
    return ratio_of_means(one.sums[value], one.tokens, other.sums[value], other.tokens)


def _result(found: Found) -> Result:
    runs = {case: found.each(case) for case in CASES}
    scores = summaries(_read(found))
    return {**scores, "runs": {case: each for case, each in runs.items() if each}}


def _tables(result: Result) -> str:
    """Returns tables of step 0 and of the ends of the RL runs."""
    columns = {
        **writing.PAIR_COLUMNS,
        "clipped at C = 2": lambda pair: writing.figure(pair["clip_fraction"]["2.0"]),
        "at 1.1": lambda pair: writing.figure(pair["clip_fraction"]["1.1"]),
    }
    text = (
        f"Step 0 of {result['name']}: {result['questions']} questions of {result['group']} samples "
        f"for each of {len(result['subjects'])} seeds, sampled under fp8_blockwise, the mean and "
        f"its 95% interval.\n\n"
        f"{writing.table('learner / rollout', result['pooled'].items(), columns)}"
    )
    if not result["runs"]:
        return text
    columns = {
        "mean abs D over RL": lambda runs: writing.each(
            series(runs, "train_rollout_logprob_abs_diff").mean(axis=1)
        ),
        "KL to the reference, last 10 steps": lambda runs: writing.each(
            series(runs, "kl_ref")[:, -10:].mean(axis=1)
        ),
        "reward, last 10": lambda runs: writing.each(
            series(runs, "reward_mean")[:, -10:].mean(axis=1)
        ),
        "right in bf16, sampled": lambda runs: writing.each(accuracies(runs, "bf16")),
    }
    table = writing.table("case", result["runs"].items(), columns)
    return f"{text}\nRL, {result['steps']} steps, each seed.\n\n{table}"


def _figure(result: Result) -> Figure:
    """Draws the tail of the importance ratio at step 0, and mismatch and KL over RL."""
    figure, (tail, mismatch, divergence) = writing.panels(3, 12, 3.8)
    for index, case in enumerate(CASES):
        shares = result["pooled"][f"{case} / rollout"]["clip_fraction"]
        values = [shares[str(cap)][0] for cap in CAPS]
        colour, label = writing.COLOURS[index], f"{case} ({CASES[case]})"
        tail.plot([value or np.nan for value in values], "o-", ms=4, color=colour, label=label)
        runs = result["runs"].get(case, ())
        writing.curves(mismatch, runs, "train_rollout_logprob_abs_diff", colour, label)
        writing.curves(divergence, runs, "kl_ref", colour, label)
    writing.plain(tail, "C", "share of tokens with ratio above C or below 1/C")
    writing.plain(mismatch, "RL step", "mean |D|")
    writing.plain(divergence, "RL step", "KL to the bf16 reference (k3)")
    tail.set_xticks(range(len(CAPS)), [f"{cap:g}" for cap in CAPS])
    if tail.lines and np.isfinite(np.concatenate([x.get_ydata() for x in tail.lines])).any():
        tail.set_yscale("log")
    tail.legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(
    "cases",
    full=Size(questions=128, steps=40),
    quick=Size(questions=32, steps=4),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
