"""`fp8rl study scale`: how the mismatch grows with experts and depth, and what makes it grow.

The article "Unified FP8: Moving Beyond Mixed Precision for Stable and Accelerated MoE RL" (InfiXAI,
Ant, SGLang and Miles teams, 25 November 2025) finds a mismatch that grows from dense models over
30B to 1T parameters of mixtures of experts. Here a ladder of small models differs in one thing at a
time, all trained alike; each is sampled under FP8 and scored by a bf16 learner (case 1). Routing
replay (arXiv:2510.11370) takes the routers' part away: what is left is that of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.study import writing
from fp8rl_jax.study.cells import Cells, rounded
from fp8rl_jax.study.hypotheses import Hypothesis
from fp8rl_jax.study.measures import Pair, judge_pairs, pooled, read_pairs, rms_ratio
from fp8rl_jax.study.outliers import POWERS, RECIPES, measure_outliers
from fp8rl_jax.study.progress import Note, Progress, silent
from fp8rl_jax.study.scoring import View, sample
from fp8rl_jax.study.statistics import Estimate, cluster_bootstrap, ratio_of_means, span
from fp8rl_jax.study.step0 import score_cell
from fp8rl_jax.study.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUESTIONS, GROUP = 64, 8
QUICK_QUESTIONS = 32
_PLAIN, _EXPERTS, _WEIGHTS = "bf16", "bf16, experts replayed", "bf16, weights replayed"

_SEEDS = 3  # of hypotheses that compare models, which differ by their training too
ZERO = Hypothesis(
    "zero",
    "An FP8 learner has no mismatch on any rung (case 4)",
    "largest share of tokens whose log-probability differs from the sampler's",
    0.0,
    0.0,
)
MIXTURE = Hypothesis(
    "mixture",
    "A bf16 learner mismatches more on a mixture of experts than on a dense model",
    "RMS of the logits' difference, {} over {}",
    1.0,
    least_seeds=_SEEDS,
)
EXPERTS = Hypothesis(
    "experts",
    "The mismatch grows with the number of experts",
    "RMS of the logits' difference, {} over {}",
    1.0,
    least_seeds=_SEEDS,
)
DEPTH = Hypothesis(
    "depth",
    "The mismatch grows with depth",
    "RMS of the logits' difference, {} over {}",
    1.0,
    least_seeds=_SEEDS,
)
FLIPS = Hypothesis(
    "flips",
    "More experts flip more often",
    "share of tokens with another set of experts in a layer, {} over {}",
    1.0,
    least_seeds=_SEEDS,
)
REPLAY = Hypothesis(
    "replay",
    "Replaying the rollout's experts brings a mixture's mismatch to a dense model's",
    "RMS of the logits' difference, {} with experts replayed over {}",
    0.9,
    1.1,
    least_seeds=_SEEDS,
)
CAUSE = Hypothesis(
    "cause",
    "Flips are a cause: replaying the rollout's experts lowers the mismatch",
    "RMS of the logits' difference on {}, with experts replayed over without",
    high=0.95,
)
EXACT = Hypothesis(
    "exact",
    "An outlier that leaves the function unchanged changes no bit without FP8",
    "tokens whose log-probability changes, bf16 and f32",
    0.0,
    0.0,
)
HARMLESS = Hypothesis(
    "harmless",
    "Blocks of 1x128 bear an outlier of 2^12: E4M3's normal numbers span 2^14.8",
    "exact KL of fp8 to bf16 with the outlier over that without",
    0.8,
    1.25,
)
BREAKS = Hypothesis(
    "breaks",
    "Blocks of 1x128 do not bear one of 2^20",
    "exact KL of fp8 to bf16 with the outlier over that without",
    2.0,
)
GRANULARITY = Hypothesis(
    "granularity",
    "An outlier of 2^18 costs a scale per tensor more than blocks of 1x128",
    "exact KL to bf16, fp8_tensorwise over fp8, with the outlier over without",
    1.0,
)
FINEST = Hypothesis(
    "finest",
    "An outlier of 2^18 costs blocks of 1x128 more than blocks of 1x32",
    "exact KL to bf16, fp8 over mxfp8, with the outlier over without",
    1.0,
)


def study(
    ladder: dict[str, Sequence[Subject]],
    cells: Cells,
    note: Note = silent,
    questions: int = QUESTIONS,
) -> dict[str, Any]:
    """Measures what is missing of the cells, and judges the hypotheses.

    Args:
      ladder: {rung: a subject for each seed}, in an order that puts dense rungs first.
      cells: finished ones.
      note: called with a line about what is done.
      questions: with GROUP samples each.

    Returns:
      What study.json holds.
    """
    found: dict[str, list[dict]] = {rung: [] for rung in ladder}
    outliers: list[dict] = []
    dense = [rung for rung, subjects in ladder.items() if _is_plain(subjects[0].model)]
    total = sum(map(len, ladder.values())) + len(ladder[dense[-1]]) * bool(dense)
    progress = Progress(total, note)
    for rung, subjects in ladder.items():
        views = _views(bool(subjects[0].model.num_experts))
        pairs = {name: ("rollout", name) for name in views if name != "rollout"}
        for subject in subjects:
            found[rung].append(
                score_cell(
                    "scale",
                    subject,
                    cells,
                    views,
                    pairs,
                    rollout="rollout",
                    questions=questions,
                    group=GROUP,
                    note=note,
                )
            )
            progress.add(f"{rung}, seed {subject.seed}")
            if rung == _outlier_rung(dense):
                outliers.append(_outlier_cell(subject, cells, questions, note))
                progress.add(f"outliers on {rung}, seed {subject.seed}")
    each = {rung: read_pairs(rows, rows[0]["numbers"]["pairs"]) for rung, rows in found.items()}
    models = {rung: subjects[0].model for rung, subjects in ladder.items()}
    return {
        "study": "scale",
        "rungs": {
            rung: {
                "layers": models[rung].num_hidden_layers,
                "experts": models[rung].num_experts,
                "router": models[rung].scoring_func if models[rung].num_experts else "",
                "warmup": [cell["numbers"]["warmup"] for cell in rows],
                "margins": [cell["numbers"]["margins"] for cell in rows],
            }
            for rung, rows in found.items()
        },
        "seeds": [subject.seed for subject in next(iter(ladder.values()))],
        "questions": questions,
        "group": GROUP,
        "pairs": {
            rung: {name: [pair.summary() for pair in pairs] for name, pairs in views.items()}
            for rung, views in each.items()
        },
        "pooled": {
            rung: {name: pooled(pairs).summary() for name, pairs in views.items()}
            for rung, views in each.items()
        },
        "outliers": _outlier_means(outliers),
        "hypotheses": _judge(each, found, outliers),
        "origins": writing.origins([*(c for rows in found.values() for c in rows), *outliers]),
    }


def _is_plain(model: ModelConfig) -> bool:
    """Whether outliers can be planted in a model: without experts and latents."""
    return not model.num_experts and not model.latent


def _outlier_rung(dense: Sequence[str]) -> str:
    """Where outliers are planted: d8 if it is there."""
    return "d8" if "d8" in dense else dense[-1] if dense else ""


def _views(experts: bool) -> dict[str, View]:
    bf16 = get_recipe("bf16")
    views = {"rollout": View(get_recipe("fp8")), _PLAIN: View(bf16)}
    if experts:
        views[_EXPERTS] = View(bf16, "experts", "rollout")
        views[_WEIGHTS] = View(bf16, "weights", "rollout")
    return views


def _outlier_cell(subject: Subject, cells: Cells, questions: int, note: Note) -> dict[str, Any]:
    key = {
        "study": "scale-outliers",
        **subject.identity,
        **subject.settings,
        "powers": list(POWERS),
        "recipes": list(RECIPES),
        "questions": questions,
        "group": GROUP,
    }

    def numbers() -> dict[str, Any]:
        held_out = subject.runtime.questions["eval"][:questions]
        batch = sample(subject.runtime, subject.params, get_recipe("bf16"), held_out, GROUP, note)
        return measure_outliers(subject, batch, GROUP, note)

    return cells.get(f"scale-outliers-{subject.tag}-seed{subject.seed}", key, numbers)


def _judge(
    each: dict[str, dict[str, list[Pair]]], found: dict[str, list[dict]], outliers: list[dict]
) -> list[dict[str, Any]]:
    """Verdicts of what the ladder has; rungs are compared where both are there."""
    unequal = [c["numbers"]["decode"]["unequal"] for rows in found.values() for c in rows]
    verdicts = [ZERO.judge(span(unequal))]

    def compare(
        hypothesis: Hypothesis,
        one: tuple[str, str],
        other: tuple[str, str],
        ratio: Callable[[Pair, Pair], Estimate],
    ) -> None:
        if one[0] not in each or other[0] not in each:
            return
        a, b = (each[rung][view] for rung, view in (one, other))
        named = hypothesis.filled(*dict.fromkeys((one[0], other[0])))
        verdicts.append(judge_pairs(named, ratio, a, b))

    mixtures = [rung for rung, views in each.items() if _EXPERTS in views]
    dense = [rung for rung in each if rung not in mixtures]
    base = _outlier_rung(dense)
    for rung in mixtures:
        compare(MIXTURE, (rung, _PLAIN), (base, _PLAIN), rms_ratio)
    if len(mixtures) > 1:
        compare(EXPERTS, ("m32", _PLAIN), ("m8", _PLAIN), rms_ratio)
        compare(FLIPS, ("m32", _PLAIN), ("m8", _PLAIN), _flip_ratio)
    compare(DEPTH, ("d16", _PLAIN), ("d8", _PLAIN), rms_ratio)
    compare(DEPTH, ("m32x16", _PLAIN), ("m32", _PLAIN), rms_ratio)
    for rung in mixtures:
        compare(CAUSE, (rung, _EXPERTS), (rung, _PLAIN), rms_ratio)
        compare(REPLAY, (rung, _EXPERTS), (base, _PLAIN), rms_ratio)
    if outliers:
        verdicts += _judge_outliers([cell["numbers"] for cell in outliers])
    return verdicts


def _judge_outliers(outliers: list[dict]) -> list[dict[str, Any]]:
    changed = [n[str(k)][canary] for n in outliers for k in POWERS for canary in ("bf16", "f32")]

    def compare(hypothesis: Hypothesis, power: int, recipe: str, other: str = ""):
        seeds = [_kl_growth([n], power, recipe, other).value for n in outliers]
        return hypothesis.judge(_kl_growth(outliers, power, recipe, other), seeds=seeds)

    return [
        EXACT.judge(span(changed)),
        compare(HARMLESS, 12, "fp8"),
        compare(BREAKS, 20, "fp8"),
        compare(GRANULARITY, 18, "fp8_tensorwise", "fp8"),
        compare(FINEST, 18, "fp8", "mxfp8"),
    ]


def _kl_growth(outliers: list[dict], power: int, recipe: str, other: str) -> Estimate:
    """Exact KL of a recipe with the outlier over that without; over the same of another recipe, if
    one is named. Every recipe and power scores the same tokens, so sums have the means' ratios."""
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


def _outlier_means(outliers: list[dict]) -> dict[str, Any]:
    """{recipe: mean exact KL to bf16 at each of POWERS, of all seeds}; {} without outliers."""
    found = [cell["numbers"] for cell in outliers]
    return {
        recipe: rounded(
            np.array(
                [
                    sum(sum(n[str(k)][recipe]["kl"]) for n in found)
                    / sum(sum(n[str(k)][recipe]["tokens"]) for n in found)
                    for k in POWERS
                ]
            )
        )
        for recipe in RECIPES
        if found
    }


def format_table(result: dict[str, Any]) -> str:
    """Markdown: the ladder, and the outliers."""
    rows = [
        (
            "rung",
            "layers, experts",
            "loss of the warm-up",
            "entropy",
            "mean abs D",
            "RMS of logits",
            "with experts replayed",
            "flips",
            "abs D, p 0.5 to 0.9",
        )
    ]
    for rung, views in result["pooled"].items():
        about, plain = result["rungs"][rung], views[_PLAIN]
        replayed = views.get(_EXPERTS)
        middle = plain["by"]["probability"][2]
        rows.append(
            (
                rung,
                f"{about['layers']}, {about['experts'] or '-'} {about['router']}".strip(),
                ", ".join(f"{w['loss']:.3f}" for w in about["warmup"] if w) or "-",
                writing.figure(plain["entropy"]),
                writing.figure(plain["mean_abs"]),
                writing.figure(plain["rms_logits"]),
                writing.figure(replayed["rms_logits"]) if replayed else "-",
                writing.figure(plain["flips"]) if "flips" in plain else "-",
                f"{middle:.3g}" if middle is not None else "-",
            )
        )
    text = (
        f"Sampled under fp8, scored by a bf16 learner: {result['questions']} questions of "
        f"{result['group']} samples, seeds {', '.join(map(str, result['seeds']))}.\n\n"
        f"{writing.markdown_table(*rows)}"
    )
    if not result["outliers"]:
        return text
    rows = [("recipe", *(f"2^{k}" for k in POWERS))]
    for recipe, means in result["outliers"].items():
        rows.append((recipe, *(f"{x:.3g}" for x in means)))
    return f"{text}\nExact KL to bf16 with an outlier.\n\n{writing.markdown_table(*rows)}"


def draw(result: dict[str, Any]) -> Figure:
    """The ladder with and without replay, flips by layer, and the outliers, as far as there are
    any."""
    from matplotlib.figure import Figure  # here alone: the other commands start without it

    pooled = result["pooled"]
    mixtures = any("flips_by_layer" in views[_PLAIN] for views in pooled.values())
    panels = [_draw_ladder] * (mixtures or len(pooled) > 1 or not result["outliers"])
    panels += [_draw_flips] * mixtures + [_draw_outliers] * bool(result["outliers"])
    figure = Figure(figsize=(1 + 4 * len(panels), 3.8), layout="constrained", dpi=110)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, result)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(frameon=False, fontsize=8)
    return figure


def _draw_ladder(axes: Axes, result: dict[str, Any]) -> None:
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


def _draw_flips(axes: Axes, result: dict[str, Any]) -> None:
    for index, (rung, views) in enumerate(result["pooled"].items()):
        shares = views[_PLAIN].get("flips_by_layer")
        if shares:
            style = {"color": writing.COLOURS[index % len(writing.COLOURS)], "label": rung}
            axes.plot(1 + np.arange(len(shares)), shares, "o-", ms=4, **style)
    writing.plain(axes, "layer", "share of tokens with another set of experts")


def _draw_outliers(axes: Axes, result: dict[str, Any]) -> None:
    for index, (recipe, means) in enumerate(result["outliers"].items()):
        axes.plot(POWERS, means, "o-", ms=4, color=writing.COLOURS[index], label=recipe)
    writing.plain(axes, "outlier, power of two", "exact KL to bf16")
    axes.set_yscale("log")
    axes.set_xticks(POWERS)
