"""Study `layers`: error of every GEMM of a forward and backward pass, in execution order.

The article "Unified FP8: Moving Beyond Mixed Precision for Stable and Accelerated MoE RL"
(InfiXAI, Ant, SGLang and Miles teams, 25 November 2025) shows two clouds of points over the GEMMs
of Qwen3-4B: bf16 against fake quantisation, and, about two orders of magnitude lower, fake against
real FP8. This study measures the same pairs with our recipes (gemm_flow.py), one cell per sequence.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.quant import Recipe, get_recipe
from studies import writing
from studies.cells import Cell, described, rounded
from studies.frame import Found, Plan, Result, Size, Study, Verdict
from studies.gemm_flow import GEMMS, MEASURES, MODULES, PAIRS, RECIPES, GemmFlow, execution_order
from studies.hypotheses import Hypothesis, Zone
from studies.passages import TEXT
from studies.statistics import (
    cluster_bootstrap,
    clustered_mean,
    kendall_tau,
    mann_kendall,
    rank_correlation,
    ratio_of_means,
    spearman,
)
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = 128  # tokens of a sequence: one block along tokens
_COLOURS = {"fprop": "#0072b2", "dgrad": "#d55e00", "wgrad": "#009e73"}
_FP8, _FAKE, _KERNEL = range(len(PAIRS))
_RMS, _DIFF = 0, 1

_ONE, _BOTH, _MARGIN = 2.6, 3.7, 1.2  # percent, percent, and a factor
_BETWEEN = math.sqrt(_ONE * _BOTH)  # so that no figure supports both
ONE_OPERAND = Hypothesis(
    "one_operand",
    "From equal inputs a GEMM in FP8 errs by about 2.6% RMS, the rounding of one E4M3 operand",
    "mean relative RMS error over all GEMMs, in percent",
    Zone(_ONE / _MARGIN, _BETWEEN),
)
TWO_OPERANDS = Hypothesis(
    "two_operands",
    "From equal inputs a GEMM in FP8 errs by about 3.7% RMS, as on normal numbers "
    "(docs/gemm_error.md): sqrt(2) times the rounding of one operand",
    "mean relative RMS error over all GEMMs, in percent",
    Zone(_BETWEEN, _BOTH * _MARGIN),
)
FLAT = Hypothesis(
    "flat",
    "From equal inputs the error is flat over depth",
    "mean RMS error of the upper half of the layers over that of the lower half",
    Zone(0.8, 1.25),
)
ORDERS = Hypothesis(
    "two_orders",
    "From equal inputs the squared error of real against fake FP8 is about two "
    "orders of magnitude below that of FP8 against bf16",
    "log10 of the ratio of the mean calc_diff",
    Zone(1.5, 2.5),
)
FLOWING_ORDERS = Hypothesis(
    "two_orders_flowing",
    "When inputs flow, as in a training step, it is two orders below too",
    "log10 of the ratio of the mean calc_diff over all GEMMs",
    Zone(1.5, 2.5),
)
GROWS_FORWARD = Hypothesis(
    "grows_forward",
    "When inputs flow, the error of fprop grows over depth",
    "Spearman's rho of the layers' mean RMS error and the layer",
    Zone(0.0, 1.0),
    "permutations",
)
GROWS_BACKWARD = Hypothesis(
    "grows_backward",
    "When inputs flow, the error of dgrad grows along the backward pass",
    "Mann-Kendall's tau of the RMS errors in execution order",
    Zone(0.0, 1.0),
    "bootstrap of blocks of one layer",
)


def recipes() -> dict[str, Recipe]:
    """Returns the three recipes that are compared."""
    return {name: get_recipe(name) for name in RECIPES}


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    """Returns a cell for each sequence; fewer than the plan asks for if the text is short."""
    ids = subject.runtime.tokenizer.encode(" ".join(TEXT.split()))
    sequences = min(plan.size.sequences, len(ids) // TOKENS)
    if sequences < 2:
        raise UserError(
            f"the tokenizer makes {len(ids)} tokens of the study's text, and two sequences of "
            f"{TOKENS} are needed: name a model with a smaller vocabulary"
        )
    flow = GemmFlow(subject.model, recipes())
    cells = {}
    for index in range(sequences):
        tokens = np.asarray(ids[index * TOKENS : (index + 1) * TOKENS], np.int32)
        cells[f"sequence {index + 1}"] = Cell(
            f"layers-{subject.tag}-{index}",
            {**_config(subject), "tokens": tokens.tolist()},
            functools.partial(flow.errors, subject.params, tokens),
        )
    return cells


def _config(subject: Subject) -> dict[str, Any]:
    compared = {name: described(recipe) for name, recipe in recipes().items()}
    return {"study": "layers", **subject.identity, "recipes": compared}


def _errors(found: Found, kind: str) -> np.ndarray:
    """Returns the errors of a kind ('equal' or 'flow'): (S, PAIRS, MEASURES, L, MODULES, GEMMS)."""
    return np.array([numbers[kind] for numbers in found.numbers[0].values()])


def _result(found: Found) -> Result:
    """Returns the study's entries of study.json; `errors` are means over sequences: {kind: (PAIRS,
    MEASURES, layer, MODULES, GEMMS)}."""
    return {
        "config": _config(found.subjects[0]),
        "sequences": len(found.numbers[0]),
        "tokens": TOKENS,
        "modules": list(MODULES),
        "gemms": list(GEMMS),
        "pairs": [f"{a} against {b}" for a, b in PAIRS],
        "measures": list(MEASURES),
        "errors": {k: rounded(_errors(found, k).mean(axis=0)) for k in ("equal", "flow")},
    }


def _judge(found: Found) -> list[Verdict]:
    equal, flow = (_errors(found, kind) for kind in ("equal", "flow"))
    rms = 100 * equal[:, _FP8, _RMS]  # (S, L, MODULES, GEMMS)
    each = rms.mean(axis=(1, 2, 3))
    mean = clustered_mean(each, np.ones_like(each))
    verdicts = [hypothesis.judge(mean) for hypothesis in (ONE_OPERAND, TWO_OPERANDS)]
    layers = rms.shape[1]
    lower, upper = rms[:, : layers // 2], rms[:, -(layers // 2) :]
    sums = [half.sum(axis=(1, 2, 3)) for half in (upper, lower)]
    count = np.full(len(rms), upper[0].size)
    verdicts.append(FLAT.judge(ratio_of_means(sums[0], count, sums[1], count)))
    for hypothesis, errors in ((ORDERS, equal), (FLOWING_ORDERS, flow)):
        squared = errors[:, [_FP8, _KERNEL], _DIFF].mean(axis=(2, 3, 4))  # (S, 2)
        orders = cluster_bootstrap(squared, lambda m: np.log10(m[:, 0] / m[:, 1]))
        verdicts.append(hypothesis.judge(orders))
    forward = flow[:, _FP8, _RMS, :, :, 0].mean(axis=2)  # (S, L)
    depth = np.arange(layers)
    estimate = cluster_bootstrap(forward, lambda m: rank_correlation(m, depth))
    verdicts.append(GROWS_FORWARD.judge(estimate, spearman(forward.mean(axis=0), depth).p))
    order = [(layer, place) for layer, place, gemm in execution_order(layers) if gemm == 1]
    series = np.stack([flow[:, _FP8, _RMS, i, m, 1] for i, m in order], axis=1)
    trend = mann_kendall(series.mean(axis=0), len(MODULES))
    verdicts.append(GROWS_BACKWARD.judge(cluster_bootstrap(series, kendall_tau), trend.p))
    return verdicts


def _tables(result: Result) -> str:
    """Returns a table of the RMS errors of every module and GEMM, in percent."""
    equal, flow = (100 * np.array(result["errors"][kind])[:, _RMS] for kind in ("equal", "flow"))
    places = [
        (module.rpartition("/")[2], (place, gemm))
        for place, module in enumerate(MODULES)
        for gemm in range(len(GEMMS))
    ]
    columns = {
        "GEMM": lambda at: GEMMS[at[1]],
        "FP8 / bf16": lambda at: f"{equal[_FP8, :, *at].mean():.2f}",
        "fake / bf16": lambda at: f"{equal[_FAKE, :, *at].mean():.2f}",
        "FP8 / fake": lambda at: f"{equal[_KERNEL, :, *at].mean():.2f}",
        "FP8 / bf16, flowing: first layer": lambda at: f"{flow[_FP8, 0, *at]:.2f}",
        "last layer": lambda at: f"{flow[_FP8, -1, *at]:.2f}",
    }
    return (
        f"Relative RMS error in percent; {result['name']}, {result['sequences']} sequences of "
        f"{result['tokens']} tokens. Equal inputs, mean over layers, but for the last two "
        f"columns.\n\n{writing.table('module', places, columns)}"
    )


def _figure(result: Result) -> Figure:
    """Draws the errors in the order of execution: from equal inputs, and when inputs flow."""
    figure, panels = writing.panels(2, 12, 4.8, sharey=True)
    titles = {"equal": "Equal inputs", "flow": "Inputs flow"}
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        errors = np.array(result["errors"][kind])[:, _RMS]
        order = execution_order(errors.shape[1])
        for pair, marker in ((_FAKE, "x"), (_FP8, "."), (_KERNEL, "+")):
            for gemm, name in enumerate(GEMMS):
                points = [
                    (i, 100 * errors[pair, layer, place, g])
                    for i, (layer, place, g) in enumerate(order)
                    if g == gemm
                ]
                label = f"{result['pairs'][pair]}, {name}"
                axes.plot(
                    *zip(*points, strict=True), marker, color=_COLOURS[name], ms=4, label=label
                )
        axes.set_yscale("log")
        axes.set_title(title, fontsize=11)
    writing.plain(panels[0], "GEMM in execution order", "relative RMS error, percent")
    writing.plain(panels[1], "GEMM in execution order", "")
    panels[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


STUDY = Study(
    "layers",
    full=Size(sequences=8),
    quick=Size(sequences=3),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
    questions=False,
)
