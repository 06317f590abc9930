"""`fp8rl study cases`: an FP8 rollout against learners in bf16, in imitated FP8, and in FP8.

The article "Unified FP8: Moving Beyond Mixed Precision for Stable and Accelerated MoE RL" (InfiXAI,
Ant, SGLang and Miles teams, 25 November 2025) trains four cases beside an FP8 rollout: the learner
in bf16 (1), with FP8 imitated in the forward pass (2) or in both passes (3), and in FP8 (4). Step 0
scores one set of samples under all of them; then each trains from one start.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.study import writing
from fp8rl_jax.study.cells import Cells
from fp8rl_jax.study.hypotheses import ANY, Hypothesis
from fp8rl_jax.study.measures import CAPS, Pair, judge_pairs, pooled, read_pairs
from fp8rl_jax.study.progress import Note, Progress, silent
from fp8rl_jax.study.runs import Arms, series
from fp8rl_jax.study.scoring import View
from fp8rl_jax.study.statistics import Estimate, ratio_of_means, seed_mean, span
from fp8rl_jax.study.step0 import score_cell
from fp8rl_jax.study.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = {"case1": "bf16", "case2": "fake_forward", "case3": "fake", "case4": "fp8"}
QUESTIONS, GROUP, STEPS = 128, 8, 40
QUICK_QUESTIONS, QUICK_STEPS = 32, 4
_CAP = 2.0  # of TIS
_POW2, _ENDS = "fp8_blockwise_pow2", "fp8, first and last layer bf16"  # names of ablations
_KL = 1e-3  # of the KL term, so that the divergence from the reference is measured

REFERENCE = Hypothesis(
    "reference",
    "At step 0 the bf16 learner is its own bf16 reference",
    "mean exact KL to the reference",
    0.0,
    0.0,
)
SAME_FORWARD = Hypothesis(
    "same_forward",
    "At step 0 cases 2 and 3 have equal bits: only their backward passes differ",
    "share of tokens whose log-probabilities differ",
    0.0,
    0.0,
)
KL_EQUAL = Hypothesis(
    "kl_equal",
    "At step 0 the learner in FP8 is as far from the bf16 reference as imitated FP8 is",
    "mean exact KL of case 4 over that of case 2",
    0.95,
    1.05,
)
ZERO = Hypothesis(
    "zero",
    "Rollout and learner in FP8 differ in no bit (case 4)",
    "share of tokens whose log-probability differs from what the sampler recorded",
    0.0,
    0.0,
)
ZERO_BF16 = Hypothesis(
    "zero_bf16",
    "Rollout and learner in bf16 differ in no bit: token_mult_prob_error is 1",
    "share of tokens whose log-probability differs from what the sampler recorded",
    0.0,
    0.0,
)
IMITATION = Hypothesis(
    "imitation",
    "Imitating FP8 removes most of the mismatch: that of case 1 is at least twice that of case 2",
    "mean |D| of case 1 over that of case 2",
    2.0,
)
ACCEPTED = Hypothesis(
    "accepted",
    "The mismatch of an FP8 rollout and a bf16 learner is above that of bf16 and bf16, "
    "and within NeMo RL's bound",
    "token_mult_prob_error of case 1",
    1.0 + 1e-6,
    1.05,
)
CLIPPED = Hypothesis(
    "clipped",
    "More tokens have a ratio above 2 or below 1/2 in case 1 than in case 2",
    "share of such tokens in case 1 less that in case 2",
    ANY,
)
POW2 = Hypothesis(
    "pow2",
    "An FP8 rollout with scales that are powers of two, its KV cache's too, mismatches "
    "more than one with float32 scales",
    "mean |D| of a bf16 learner, powers of two over float32",
    1.0 + ANY,
)
ENDS = Hypothesis(
    "ends",
    "An FP8 rollout with bf16 in its first and last layer mismatches less than one without",
    "mean |D| of a bf16 learner, bf16 ends over FP8 in all layers",
    high=1.0 - ANY,
)
CURVE_CLIPPED = Hypothesis(
    "curve_clipped",
    "Over RL TIS clips more tokens in case 1 than in any other case",
    "tis_clipfrac of case 1, mean over steps, less the largest of the other cases",
    ANY,
)
CURVE_ZERO = Hypothesis(
    "curve_zero",
    "Case 4 has no mismatch at any step of RL",
    "mean over steps of mean |D|",
    0.0,
    0.0,
)
CURVE_ORDER = Hypothesis(
    "curve_order",
    "Over RL case 1 has more mismatch than case 3",
    "mean over steps of |D|, case 1 over case 3",
    1.0,
)


def ablations(layers: int) -> dict[str, Recipe]:
    """Rollout recipes that are set beside fp8 against a bf16 learner: the options of NeMo RL's FP8
    (scales that are powers of two, first and last layers in bf16) and other granularities.

    Delayed scales are left out: before the first step they have no history.
    """
    fp8 = get_recipe("fp8")
    found = {
        "fp8, bf16 KV": dataclasses.replace(fp8, kv="none"),
        _POW2: get_recipe(_POW2),
        "mxfp8": get_recipe("mxfp8"),
        "fp8_tensorwise": get_recipe("fp8_tensorwise"),
    }
    if layers > 2:
        ends = dataclasses.replace(fp8, first_layers=1, last_layers=1)
        found[_ENDS] = ends
    return found


def study(
    subjects: Sequence[Subject],
    out: pathlib.Path,
    cells: Cells,
    note: Note = silent,
    questions: int = QUESTIONS,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Measures what is missing of the cells, and judges the hypotheses.

    Args:
      subjects: one for each seed.
      out: where runs are.
      cells: finished ones.
      note: called with a line about what is done.
      questions: of step 0, with GROUP samples each.
      steps: of RL; 0 leaves the runs out.

    Returns:
      What study.json holds.
    """
    others = ablations(subjects[0].model.num_hidden_layers)
    views = {name: View(get_recipe(recipe)) for name, recipe in CASES.items()}
    views |= {name: View(recipe) for name, recipe in others.items()}
    pairs = {f"{c} / rollout": ("case4", c) for c in CASES}
    pairs |= {f"{c} / reference": (c, "case1") for c in CASES}
    pairs |= {"case3 / case2": ("case2", "case3")}
    pairs |= {f"bf16 / {name}": (name, "case1") for name in others}
    found, runs = [], {case: [] for case in CASES}
    progress = Progress(len(subjects) * (2 + len(CASES) * bool(steps)), note)
    for subject in subjects:
        fp8 = score_cell(
            "cases",
            subject,
            cells,
            views,
            pairs,
            rollout="case4",
            questions=questions,
            group=GROUP,
            note=note,
        )
        progress.add(f"step 0 of {subject.name}, FP8 rollout")
        plain = score_cell(
            "cases-bf16",
            subject,
            cells,
            {"bf16": View(get_recipe("bf16"))},
            {},
            rollout="bf16",
            questions=questions,
            group=GROUP,
            note=note,
        )
        progress.add(f"step 0 of {subject.name}, bf16 rollout")
        found.append((fp8, plain))
        arms = Arms(
            subject,
            {"run.steps": steps, "precision.reference": "bf16", "algo.kl_coef": _KL},
            out,
            cells,
            note,
        )
        for case in CASES if steps else ():
            fields = {"precision.rollout": "fp8", "precision.learner": CASES[case]}
            runs[case].append(arms.run("cases", case, fields))
            progress.add(f"RL of {subject.name}, {case}")
    scores = read_pairs([fp8 for fp8, _ in found], pairs)
    every = [cell for both in found for cell in both] + [c for rows in runs.values() for c in rows]
    return {
        "study": "cases",
        "name": subjects[0].name,
        "subjects": [subject.identity for subject in subjects],
        "questions": questions,
        "group": GROUP,
        "steps": steps,
        "pairs": {name: [pair.summary() for pair in each] for name, each in scores.items()},
        "pooled": {name: pooled(each).summary() for name, each in scores.items()},
        "runs": {case: [cell["numbers"] for cell in rows] for case, rows in runs.items() if rows},
        "hypotheses": _judge(found, runs),
        "origins": writing.origins(every),
    }


def _judge(found: list[tuple[dict, dict]], runs: dict[str, list[dict]]) -> list[dict[str, Any]]:
    """The verdicts of cells (step 0 of an FP8 and of a bf16 rollout) and of RL runs by case."""

    pairs = read_pairs([fp8 for fp8, _ in found], found[0][0]["numbers"]["pairs"])

    def mean(hypothesis: Hypothesis, name: str, value: str) -> dict[str, Any]:
        return judge_pairs(hypothesis, lambda pair: pair.mean(value), pairs[name])

    def ratio(hypothesis: Hypothesis, one: str, other: str, value: str) -> dict[str, Any]:
        figure = functools.partial(_ratio, value=value)
        return judge_pairs(hypothesis, figure, pairs[one], pairs[other])

    fp8, bf16 = ([cells[i]["numbers"]["decode"]["unequal"] for cells in found] for i in (0, 1))
    case1, case2 = pairs["case1 / rollout"], pairs["case2 / rollout"]
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
            unresolved="" if _is_clipped(case1 + case2) else "no token has such a ratio",
        ),
    ]
    for hypothesis, name in ((POW2, f"bf16 / {_POW2}"), (ENDS, f"bf16 / {_ENDS}")):
        if name in pairs:  # two layers have no middle, so no such recipe
            verdicts.append(ratio(hypothesis, name, "case1 / rollout", "abs"))
    if not runs["case1"]:
        return verdicts
    size = {case: series(cells, "train_rollout_logprob_abs_diff") for case, cells in runs.items()}
    whole = size["case4"].mean(axis=1).tolist()
    verdicts.append(CURVE_ZERO.judge(span(whole), seeds=whole))
    each = size["case1"].mean(axis=1) / size["case3"].mean(axis=1)
    verdicts.append(CURVE_ORDER.judge(seed_mean(each), seeds=each.tolist()))
    clipped = np.array([series(runs[case], "tis_clipfrac").mean(axis=1) for case in CASES])
    if not np.isnan(clipped).any():  # the configuration names no other correction
        less = clipped[0] - clipped[1:].max(axis=0)
        nothing = "" if clipped.any() else "no token was clipped"
        verdicts.append(CURVE_CLIPPED.judge(seed_mean(less), None, less.tolist(), nothing))
    return verdicts


def _is_clipped(pairs: list[Pair]) -> bool:
    """Whether there are tokens beyond the cap."""
    return any(pair.tail[:, CAPS.index(_CAP)].any() for pair in pairs)


def _ratio(one: Pair, other: Pair, value: str) -> Estimate:
    return ratio_of_means(one.sums[value], one.tokens, other.sums[value], other.tokens)


def format_table(result: dict[str, Any]) -> str:
    """Markdown: step 0, and the ends of the RL runs."""
    rows = [
        (
            "learner / rollout",
            "mean abs D",
            "max",
            "token_mult_prob_error",
            "exact KL",
            "RMS of logits",
            "clipped at C = 2",
            "at 1.1",
        )
    ]
    for name, found in result["pooled"].items():
        clipped = found["clip_fraction"]
        rows.append(
            (
                name,
                writing.figure(found["mean_abs"]),
                f"{found['max_abs']:.3g}",
                writing.figure(found["token_mult_prob_error"], 6),
                writing.figure(found["kl"]),
                writing.figure(found["rms_logits"]),
                writing.figure(clipped["2.0"]),
                writing.figure(clipped["1.1"]),
            )
        )
    text = (
        f"Step 0 of {result['name']}: {result['questions']} questions of {result['group']} samples "
        f"for each of {len(result['subjects'])} seeds, sampled under fp8, the mean and its 95% "
        f"interval.\n\n{writing.markdown_table(*rows)}"
    )
    if not result["runs"]:
        return text
    rows = [
        (
            "case",
            "mean abs D over RL",
            "KL to the reference, last 10 steps",
            "reward, last 10",
            "right in bf16, sampled",
        )
    ]
    for case, cells in result["runs"].items():
        curves = [cell["series"] for cell in cells]
        rows.append(
            (
                case,
                writing.each([np.mean(c["train_rollout_logprob_abs_diff"]) for c in curves]),
                writing.each([np.mean(c["kl_ref"][-10:]) for c in curves]),
                writing.each([np.mean(c["reward_mean"][-10:]) for c in curves]),
                writing.each([cell["bf16"]["accuracy_sampled"] for cell in cells]),
            )
        )
    return f"{text}\nRL, {result['steps']} steps, each seed.\n\n{writing.markdown_table(*rows)}"


def draw(result: dict[str, Any]) -> Figure:
    """The tail of the importance ratio at step 0, and mismatch and KL over RL."""
    from matplotlib.figure import Figure  # here alone: the other commands start without it

    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=110)
    tail, mismatch, divergence = figure.subplots(1, 3)
    for index, case in enumerate(CASES):
        shares = result["pooled"][f"{case} / rollout"]["clip_fraction"]
        values = [shares[str(cap)][0] for cap in CAPS]
        style = {"color": writing.COLOURS[index], "label": f"{case} ({CASES[case]})"}
        tail.plot([value or np.nan for value in values], "o-", ms=4, **style)
        runs = result["runs"].get(case, ())
        writing.curves(mismatch, runs, "train_rollout_logprob_abs_diff", **style)
        writing.curves(divergence, runs, "kl_ref", **style)
    for axes, x, y in (
        (tail, "C", "share of tokens with ratio above C or below 1/C"),
        (mismatch, "RL step", "mean |D|"),
        (divergence, "RL step", "KL to the bf16 reference (k3)"),
    ):
        writing.plain(axes, x, y)
    tail.set_xticks(range(len(CAPS)), [f"{cap:g}" for cap in CAPS])
    if tail.lines and np.isfinite(np.concatenate([x.get_ydata() for x in tail.lines])).any():
        tail.set_yscale("log")
    tail.legend(frameon=False, fontsize=8)
    return figure
