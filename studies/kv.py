"""Study `kv`: what an FP8 KV cache adds to the mismatch, compared with FP8 linear layers.

"FP8-RL", according to a summary of the paper (not read itself), and NVIDIA's report on FP8 for RL
combine a bf16 learner with rollouts with FP8 linear layers, an FP8 KV cache, and both. "FP8-RL"
finds the cache's mismatch slightly above that of the linear layers on Qwen3-8B, and that
calibration of static scales takes 2 to 3% of a step. Here all these recipes score one set of
samples.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from fp8rl_jax.quant import Recipe, get_recipe
from studies import writing
from studies.cells import Cell
from studies.frame import Found, Plan, Result, Size, Study, Verdict
from studies.hypotheses import Hypothesis, Zone
from studies.measures import POSITIONS, Pair, judge_pairs, read_pairs, rms_ratio, summaries
from studies.runs import arm_cells, series
from studies.scoring import View
from studies.statistics import Estimate, cluster_bootstrap, ratio_of_means
from studies.step0 import Scoring
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST = 2  # first steps of a run, which compile: calibration's share is taken after them
LONG = 16  # most tokens of an answer from which on hypotheses along an answer are judged
_SHORTEST = 2  # log2 of the shortest prefix that counts for the growth of a sequence's D

BOTH_LINEARS = Hypothesis(
    "both_linears",
    "FP8 linear layers and an FP8 KV cache together mismatch more than the linear layers alone",
    "RMS of the logits' difference, both over linear layers",
    Zone(low=1.0),
)
BOTH_KV = Hypothesis(
    "both_kv",
    "FP8 linear layers and an FP8 KV cache together mismatch more than the KV cache alone",
    "RMS of the logits' difference, both over KV cache",
    Zone(low=1.0),
)
ORDER = Hypothesis(
    "order",
    "The KV cache alone mismatches at least as much as the linear layers alone",
    "RMS of the logits' difference, KV cache over linear layers",
    Zone(low=1.0),
)
INDEPENDENT = Hypothesis(
    "independent",
    "The two errors add up as independent ones do, within a fifth",
    "RMS of the logits' difference, both over the root of the sum of squares",
    Zone(0.8, 1.25),
)
QUERIES = Hypothesis(
    "queries",
    "FP8 queries add to the mismatch of both",
    "RMS of the logits' difference, both and FP8 queries over both",
    Zone(low=1.0),
)
CALIBRATED = Hypothesis(
    "calibrated",
    "A calibrated scale for each layer mismatches at least as much as a scale for "
    "each token and head",
    "RMS of the logits' difference, calibrated over dynamic KV cache",
    Zone(low=1.0),
)
POSITION = Hypothesis(
    "position",
    "The KV cache's mismatch does not grow along an answer",
    "mean |D| in the second half of the slots over that in the first",
    Zone(high=1.1),
)
GROWTH = Hypothesis(
    "growth",
    "Along an answer D adds up like independent errors, with the root of its length",
    "exponent of the RMS of the sum of D over the number of tokens",
    Zone(0.35, 0.65),
)
SHARE = Hypothesis(
    "share",
    "Calibration takes 2 to 3% of a step",
    "share of a step's time, mean over a run's steps",
    Zone(0.02, 0.03),
)


def recipes() -> dict[str, Recipe]:
    """Returns the rollouts' recipes, and the learner's, 'bf16'."""
    fp8, bf16 = get_recipe("fp8_blockwise"), get_recipe("bf16")
    return {
        "both": fp8,
        "bf16": bf16,
        "linears": dataclasses.replace(fp8, kv="none"),
        "kv": dataclasses.replace(bf16, kv="dynamic"),
        "kv calibrated": dataclasses.replace(bf16, kv="calibrated"),
        "both calibrated": dataclasses.replace(fp8, kv="calibrated"),
        "both and q": dataclasses.replace(fp8, fp8_attention=True),
    }


_PAIRS = {name: (name, "bf16") for name in recipes() if name != "bf16"}


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    """Returns 'scores', and a short RL run with 'calibrated' scales, which times calibration."""
    views = {name: View(recipe) for name, recipe in recipes().items()}
    scoring = Scoring(views, _PAIRS, "both", plan.size.questions)
    arms = {"calibrated": {"precision.kv_cache": "fp8_calibrated"}}
    scores = {"scores": scoring.cell("kv", subject, plan.note)}
    return scores | arm_cells("kv", subject, plan, arms)


def _slots(found: Found) -> int:
    """Returns the most tokens of an answer."""
    return found.subjects[0].runtime.config.rollout.max_new_tokens


def _judge(found: Found) -> list[Verdict]:
    """Judges the hypotheses; those along an answer only if answers may have LONG tokens."""
    pairs, timed = read_pairs(found.each("scores"), _PAIRS), found.each("calibrated")

    def ratio(hypothesis: Hypothesis, one: str, *others: str) -> Verdict:
        return judge_pairs(hypothesis, rms_ratio, *(pairs[name] for name in (one, *others)))

    verdicts = [
        ratio(BOTH_LINEARS, "both", "linears"),
        ratio(BOTH_KV, "both", "kv"),
        ratio(ORDER, "kv", "linears"),
        ratio(INDEPENDENT, "both", "linears", "kv"),
        ratio(QUERIES, "both and q", "both"),
        ratio(CALIBRATED, "kv calibrated", "kv"),
    ]
    if _slots(found) >= LONG:
        verdicts.append(judge_pairs(POSITION, _halves, pairs["kv"]))
        verdicts.append(judge_pairs(GROWTH, growth, pairs["both"]))
    if timed:
        shares = series(timed, "calibrate_frac")[:, _FIRST:].mean(axis=1)
        verdicts.append(SHARE.judge_seeds(shares))
    return verdicts


def _halves(pair: Pair) -> Estimate:
    """Returns mean |D| of the second half of the slots over that of the first."""
    tokens, total = pair.binned["position"].transpose(1, 0, 2)  # (Q, bins) each
    first, second = slice(0, POSITIONS // 2), slice(POSITIONS // 2, None)
    return ratio_of_means(
        total[:, second].sum(axis=1),
        tokens[:, second].sum(axis=1),
        total[:, first].sum(axis=1),
        tokens[:, first].sum(axis=1),
    )


def growth(pair: Pair) -> Estimate:
    """Fits the exponent a of ``RMS(sum of D over n tokens) ~ n^a`` by least squares of logarithms,
    over prefixes of 4, 8, 16, ... tokens that at least a quarter of the samples have."""
    samples = pair.prefix[:, 0].sum(axis=0)
    enough = np.flatnonzero(samples >= samples[0] / 4)
    places = enough[enough >= _SHORTEST] if (enough >= _SHORTEST).sum() > 1 else enough
    if len(places) < 2:
        return Estimate(float("nan"), -np.inf, np.inf)
    x = places * np.log(2.0)
    x = (x - x.mean()) / ((x - x.mean()) ** 2).sum()

    def slope(means: np.ndarray) -> np.ndarray:
        return np.log(means[:, 1, places] / means[:, 0, places]) @ x / 2

    return cluster_bootstrap(pair.prefix, slope)


def _result(found: Found) -> Result:
    return {"slots": _slots(found), **summaries(read_pairs(found.each("scores"), _PAIRS))}


def _tables(result: Result) -> str:
    """Returns a table of every rollout against the bf16 learner."""
    columns = {
        **writing.PAIR_COLUMNS,
        "mean of a sample's D": lambda pair: f"{pair['sequence_mean']:.3g}",
        "RMS": lambda pair: f"{pair['sequence_rms']:.3g}",
    }
    short = (
        f"\nAnswers of fewer than {LONG} tokens are too short for the hypotheses about what "
        "happens along an answer; they are left out.\n"
    )
    return (
        f"{result['name']}: {result['questions']} questions of {result['group']} samples of up to "
        f"{result['slots']} tokens for each of {len(result['subjects'])} seeds, sampled under "
        "fp8_blockwise; the mean and its 95% interval against a bf16 learner.\n\n"
        f"{writing.table('rollout', result['pooled'].items(), columns)}"
        f"{'' if result['slots'] >= LONG else short}"
    )


def _figure(result: Result) -> Figure:
    """Draws |D| over the slots of an answer, and the sum of D over its tokens."""
    figure, (slots, sums) = writing.panels(2, 10, 3.8)
    middle = (np.arange(POSITIONS) + 0.5) * result["slots"] / POSITIONS
    for index, (name, found) in enumerate(result["pooled"].items()):
        style = {"color": writing.COLOURS[index], "label": name, "ms": 4}
        values = [np.nan if x is None else x for x in found["by"]["position"]]
        slots.plot(middle, values, "o-", **style)
        lengths, rms = np.array(found["prefix_rms"]).T
        sums.plot(lengths, rms, "o-", **style)
    writing.plain(slots, "slot of the answer", "mean |D|")
    writing.plain(sums, "tokens", "RMS of the sum of D")
    sums.set_xscale("log", base=2)
    sums.set_yscale("log")
    slots.set_ylim(bottom=0)
    sums.legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(
    "kv",
    full=Size(questions=64, steps=12),
    quick=Size(questions=32, steps=6),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
