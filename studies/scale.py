"""Study `scale`: how the mismatch grows with experts and depth, and why.

The article "Unified FP8: Moving Beyond Mixed Precision for Stable and Accelerated MoE RL" (InfiXAI,
Ant, SGLang and Miles teams, 25 November 2025) finds a mismatch that grows from dense models over
30B to 1T parameters of mixtures of experts. Here small models, the rungs of a ladder, differ in one
property at a time and are trained alike; each is sampled under FP8 and scored by a bf16 learner
(case 1). Routing replay (arXiv:2510.11370) removes the part of the mismatch that routers cause;
what is left comes from the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import get_recipe
from studies import writing
from studies.cells import Cell, rounded
from studies.frame import GROUP, Found, Numbers, Plan, Result, Size, Study, Verdict
from studies.hypotheses import Hypothesis, Zone
from studies.measures import Pair, judge_pairs, read_pairs, rms_ratio, summaries
from studies.outliers import POWERS, RECIPES, measure_outliers
from studies.scoring import View, sample
from studies.statistics import Estimate, cluster_bootstrap, ratio_of_means, span
from studies.step0 import Scoring
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PLAIN, _EXPERTS, _WEIGHTS = "bf16", "bf16, experts replayed", "bf16, weights replayed"

ZERO = Hypothesis(
    "zero",
    "An FP8 learner has no mismatch on any rung (case 4)",
    "largest share of tokens whose log-probability differs from the sampler's",
    Zone(0.0, 0.0),
)
_RMS, _MORE = "RMS of the logits' difference, {} over {}", Zone(low=1.0)


def _of_models(name: str, text: str, figure: str = _RMS, zone: Zone = _MORE) -> Hypothesis:
    """Makes a hypothesis that compares models: it needs seeds, since models differ by training."""
    return Hypothesis(name, text, figure, zone, least_seeds=3)


MIXTURE = _of_models(
    "mixture", "A bf16 learner mismatches more on a mixture of experts than on a dense model"
)
EXPERTS = _of_models("experts", "The mismatch grows with the number of experts")
DEPTH = _of_models("depth", "The mismatch grows with depth")
FLIPS = _of_models(
    "flips",
    "More experts flip more often",
    "share of tokens with another set of experts in a layer, {} over {}",
)
REPLAY = _of_models(
    "replay",
    "Replaying the rollout's experts brings a mixture's mismatch to a dense model's",
    "RMS of the logits' difference, {} with experts replayed over {}",
    Zone(0.9, 1.1),
)
CAUSE = Hypothesis(
    "cause",
    "Flips are a cause: replaying the rollout's experts lowers the mismatch",
    "RMS of the logits' difference on {}, with experts replayed over without",
    Zone(high=0.95),
)
EXACT = Hypothesis(
    "exact",
    "An outlier that leaves the function unchanged changes no bit without FP8",
    "tokens whose log-probability changes, bf16 and f32",
    Zone(0.0, 0.0),
)
HARMLESS = Hypothesis(
    "harmless",
    "Blocks of 1x128 bear an outlier of 2^12: E4M3's normal numbers span 2^14.8",
    "exact KL of fp8_blockwise to bf16 with the outlier over that without",
    Zone(0.8, 1.25),
)
BREAKS = Hypothesis(
    "breaks",
    "Blocks of 1x128 do not bear one of 2^20",
    "exact KL of fp8_blockwise to bf16 with the outlier over that without",
    Zone(low=2.0),
)
GRANULARITY = Hypothesis(
    "granularity",
    "An outlier of 2^18 costs a scale per tensor more than blocks of 1x128",
    "exact KL to bf16, fp8_tensorwise over fp8_blockwise, with the outlier over without",
    Zone(low=1.0),
)
FINEST = Hypothesis(
    "finest",
    "An outlier of 2^18 costs blocks of 1x128 more than blocks of 1x32",
    "exact KL to bf16, fp8_blockwise over mxfp8, with the outlier over without",
    Zone(low=1.0),
)


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    """Returns 'scores', and 'outliers' on one dense rung of the ladder."""
    bf16 = View(get_recipe("bf16"))
    views = {"rollout": View(get_recipe("fp8_blockwise")), _PLAIN: bf16}
    if subject.model.num_experts:
        views[_EXPERTS] = View(bf16.recipe, "experts", "rollout")
        views[_WEIGHTS] = View(bf16.recipe, "weights", "rollout")
    pairs = {name: ("rollout", name) for name in views if name != "rollout"}
    scoring = Scoring(views, pairs, "rollout", plan.size.questions)
    cells = {"scores": scoring.cell("scale", subject, plan.note)}
    models = {other.name: other.model for other in plan.subjects}
    plain = [rung for rung, model in models.items() if not (model.num_experts or model.latent)]
    if subject.name == _base(plain):
        cells["outliers"] = _outlier_cell(subject, plan)
    return cells


def _base(dense: Sequence[str]) -> str:
    """Returns the dense rung with which others are compared: d8, else the last one."""
    return "d8" if "d8" in dense else dense[-1] if dense else ""


def _outlier_cell(subject: Subject, plan: Plan) -> Cell:
    key = {
        "study": "scale-outliers",
        **subject.identity,
        **subject.settings,
        "powers": list(POWERS),
        "recipes": list(RECIPES),
        "questions": plan.size.questions,
        "group": GROUP,
    }

    def measure() -> Numbers:
        runtime, params, note = subject.runtime, subject.params, plan.note
        held_out = runtime.questions["eval"][: plan.size.questions]
        batch = sample(runtime, params, get_recipe("bf16"), held_out, GROUP, note)
        return measure_outliers(subject, batch, GROUP, note)

    return Cell(f"scale-outliers-{subject.tag}-seed{subject.seed}", key, measure)


def _rungs(found: Found) -> dict[str, list[Numbers]]:
    """Returns {rung: the scores of each seed}."""
    rungs: dict[str, list[Numbers]] = {}
    for subject, scores in zip(found.subjects, found.each("scores"), strict=True):
        rungs.setdefault(subject.name, []).append(scores)
    return rungs


def _judge(found: Found) -> list[Verdict]:
    """Judges the hypotheses about the rungs that the ladder has."""
    unequal = [scores["decode"]["unequal"] for scores in found.each("scores")]
    rungs = {rung: read_pairs(scores, scores[0]["pairs"]) for rung, scores in _rungs(found).items()}
    verdicts = [ZERO.judge(span(unequal)), *_judge_rungs(rungs)]
    if outliers := found.each("outliers"):
        verdicts += _judge_outliers(outliers)
    return verdicts


def _judge_rungs(rungs: dict[str, dict[str, list[Pair]]]) -> list[Verdict]:
    """Judges {rung: {view: a pair for each seed}}."""
    verdicts = []

    def compare(
        hypothesis: Hypothesis,
        one: tuple[str, str],
        other: tuple[str, str],
        ratio: Callable[[Pair, Pair], Estimate] = rms_ratio,
    ) -> None:
        if one[0] in rungs and other[0] in rungs:
            a, b = (rungs[rung][view] for rung, view in (one, other))
            named = hypothesis.filled(*dict.fromkeys((one[0], other[0])))
            verdicts.append(judge_pairs(named, ratio, a, b))

    mixtures = [rung for rung, views in rungs.items() if _EXPERTS in views]
    base = _base([rung for rung in rungs if rung not in mixtures])
    for rung in mixtures:
        compare(MIXTURE, (rung, _PLAIN), (base, _PLAIN))
    compare(EXPERTS, ("m32", _PLAIN), ("m8", _PLAIN))
    compare(FLIPS, ("m32", _PLAIN), ("m8", _PLAIN), _flip_ratio)
    compare(DEPTH, ("d16", _PLAIN), ("d8", _PLAIN))
    compare(DEPTH, ("m32x16", _PLAIN), ("m32", _PLAIN))
    for rung in mixtures:
        compare(CAUSE, (rung, _EXPERTS), (rung, _PLAIN))
        compare(REPLAY, (rung, _EXPERTS), (base, _PLAIN))
    return verdicts


def _judge_outliers(outliers: list[Numbers]) -> list[Verdict]:
    changed = [n[str(k)][canary] for n in outliers for k in POWERS for canary in ("bf16", "f32")]

    def compare(hypothesis: Hypothesis, power: int, recipe: str, other: str = ""):
        seeds = [_kl_growth([n], power, recipe, other).value for n in outliers]
        return hypothesis.judge(_kl_growth(outliers, power, recipe, other), seeds=seeds)

    return [
        EXACT.judge(span(changed)),
        compare(HARMLESS, 12, "fp8_blockwise"),
        compare(BREAKS, 20, "fp8_blockwise"),
        compare(GRANULARITY, 18, "fp8_tensorwise", "fp8_blockwise"),
        compare(FINEST, 18, "fp8_blockwise", "mxfp8"),
    ]


def _kl_growth(outliers: list[Numbers], power: int, recipe: str, other: str) -> Estimate:
    """Returns a recipe's exact KL with the outlier divided by that without, and, if `other` is not
    '', divides this by the same ratio of the recipe `other`. All score the same tokens, so ratios
    of sums are ratios of means."""
    places = [(power, recipe), (0, recipe)]
    places += [(0, other), (power, other)] if other else []
    sums = np.stack(
        [np.concatenate([n[str(k)][name]["kl"] for n in outliers]) for k, name in places], axis=1
    )

    def statistic(means: np.ndarray) -> np.ndarray:
        return (means[:, ::2] / means[:, 1::2]).prod(axis=1)

    return cluster_bootstrap(sums, statistic)


def _flip_ratio(one: Pair, other: Pair) -> Estimate:
    return ratio_of_means(
        one.flips.mean(axis=1), one.inputs, other.flips.mean(axis=1), other.inputs
    )


def _outlier_means(outliers: list[Numbers]) -> dict[str, Any]:
    """Returns {recipe: mean exact KL to bf16 at each of POWERS}; {} without measured outliers."""

    def mean(power: int, recipe: str) -> float:
        found = [numbers[str(power)][recipe] for numbers in outliers]
        return sum(sum(x["kl"]) for x in found) / sum(sum(x["tokens"]) for x in found)

    return {
        recipe: rounded(np.array([mean(power, recipe) for power in POWERS]))
        for recipe in RECIPES
        if outliers
    }


def _result(found: Found) -> Result:
    rungs = _rungs(found)
    models = {subject.name: subject.model for subject in found.subjects}
    pairs = {rung: read_pairs(each, each[0]["pairs"]) for rung, each in rungs.items()}
    scores = {rung: summaries(each) for rung, each in pairs.items()}
    return {
        "rungs": {rung: _about(models[rung], each) for rung, each in rungs.items()},
        "seeds": list(dict.fromkeys(subject.seed for subject in found.subjects)),
        **{part: {rung: x[part] for rung, x in scores.items()} for part in ("pairs", "pooled")},
        "outliers": _outlier_means(found.each("outliers")),
    }


def _about(model: ModelConfig, scores: list[Numbers]) -> dict[str, Any]:
    return {
        "layers": model.num_hidden_layers,
        "experts": model.num_experts,
        "router": model.scoring_func if model.num_experts else "",
        "warmup": [each["warmup"] for each in scores],
        "margins": [each["margins"] for each in scores],
    }


def _tables(result: Result) -> str:
    """Returns tables of the ladder and of the outliers."""
    rows = [
        (rung, (result["rungs"][rung], views[_PLAIN], views.get(_EXPERTS)))
        for rung, views in result["pooled"].items()
    ]
    text = (
        f"Sampled under fp8_blockwise, scored by a bf16 learner: {result['questions']} questions "
        f"of {result['group']} samples, seeds {', '.join(map(str, result['seeds']))}.\n\n"
        f"{writing.table('rung', rows, _COLUMNS)}"
    )
    if not result["outliers"]:
        return text
    powers = {
        f"2^{power}": lambda means, place=place: f"{means[place]:.3g}"
        for place, power in enumerate(POWERS)
    }
    table = writing.table("recipe", result["outliers"].items(), powers)
    return f"{text}\nExact KL to bf16 with an outlier.\n\n{table}"


# A row: `_about` of a rung, and summaries of a bf16 learner without and with experts replayed.
_COLUMNS: Mapping[str, Callable[[tuple[Any, Any, Any]], str]] = {
    "layers, experts": lambda row: (
        f"{row[0]['layers']}, {row[0]['experts'] or '-'} {row[0]['router']}".strip()
    ),
    "loss of the warm-up": lambda row: (
        ", ".join(f"{w['loss']:.3f}" for w in row[0]["warmup"] if w) or "-"
    ),
    "entropy": lambda row: writing.figure(row[1]["entropy"]),
    "mean abs D": lambda row: writing.figure(row[1]["mean_abs"]),
    "RMS of logits": lambda row: writing.figure(row[1]["rms_logits"]),
    "with experts replayed": lambda row: writing.figure(row[2]["rms_logits"]) if row[2] else "-",
    "flips": lambda row: writing.figure(row[1]["flips"]) if "flips" in row[1] else "-",
    "abs D, p 0.5 to 0.9": lambda row: writing.each([row[1]["by"]["probability"][2]]),
}


def _figure(result: Result) -> Figure:
    """Draws the ladder with and without replay, flips by layer, and outliers, if measured."""
    pooled = result["pooled"]
    mixtures = any("flips_by_layer" in views[_PLAIN] for views in pooled.values())
    draws = [_draw_ladder] * (mixtures or len(pooled) > 1 or not result["outliers"])
    draws += [_draw_flips] * mixtures + [_draw_outliers] * bool(result["outliers"])
    figure, panels = writing.panels(len(draws), 1 + 4 * len(draws), 3.8)
    for draw, axes in zip(draws, panels, strict=True):
        draw(axes, result)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(frameon=False, fontsize=8)
    return figure


def _draw_ladder(axes: Axes, result: Result) -> None:
    rungs = list(result["pooled"])
    for index, view in enumerate((_PLAIN, _EXPERTS, _WEIGHTS)):
        at = [i for i, rung in enumerate(rungs) if view in result["pooled"][rung]]
        if not at:
            continue
        found = [result["pooled"][rungs[i]][view]["rms_logits"] for i in at]
        values, low, high = (np.array([f[j] for f in found]) for j in range(3))
        axes.errorbar(
            at,
            values,
            [values - low, high - values],
            fmt="o",
            ms=4,
            capsize=2,
            color=writing.COLOURS[index],
            label=view,
        )
    axes.set_xticks(range(len(rungs)), rungs)
    axes.set_ylim(bottom=0)
    writing.plain(axes, "rung", "RMS of the logits' difference")


def _draw_flips(axes: Axes, result: Result) -> None:
    for index, (rung, views) in enumerate(result["pooled"].items()):
        shares = views[_PLAIN].get("flips_by_layer")
        if shares:
            style = {"color": writing.COLOURS[index % len(writing.COLOURS)], "label": rung}
            axes.plot(1 + np.arange(len(shares)), shares, "o-", ms=4, **style)
    writing.plain(axes, "layer", "share of tokens with another set of experts")


def _draw_outliers(axes: Axes, result: Result) -> None:
    for index, (recipe, means) in enumerate(result["outliers"].items()):
        axes.plot(POWERS, means, "o-", ms=4, color=writing.COLOURS[index], label=recipe)
    writing.plain(axes, "outlier, power of two", "exact KL to bf16")
    axes.set_yscale("log")
    axes.set_xticks(POWERS)


STUDY = Study(
    "scale",
    full=Size(questions=64),
    quick=Size(questions=32),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
