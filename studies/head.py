"""Study `head`: what the number format of the output head adds to the mismatch.

FP8 recipes leave the head in bf16 "to protect the logits", and a summary of NVIDIA's report on FP8
for RL asks whether a part of it can be quantised. Others went the other way, to a float32 head
(MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786). Here one set of samples is scored with
the head in bf16, in E4M3, and with its weights alone in E4M3, against a head in float32; the rest
of the model stays in bf16. For scale, FP8 linear layers under a float32 head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.quant import Recipe, get_recipe, matmul, quantize_weight
from studies import writing
from studies.cells import Cell
from studies.frame import Found, Plan, Result, Size, Study, Verdict
from studies.hypotheses import Hypothesis, Zone
from studies.measures import PROBABILITIES, judge_pairs, read_pairs, rms_ratio, summaries
from studies.scoring import View
from studies.step0 import Scoring
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FP8 = get_recipe("fp8_linear")

BF16_SMALL = Hypothesis(
    "bf16_small",
    "A bf16 head mismatches less than a tenth as much as FP8 linear layers",
    "RMS of the logits' difference, bf16 head over linear layers",
    Zone(high=0.1),
)
FP8_SMALL = Hypothesis(
    "fp8_small",
    "An FP8 head mismatches less than FP8 linear layers",
    "RMS of the logits' difference, FP8 head over linear layers",
    Zone(high=1.0),
)
FP8_ADDS = Hypothesis(
    "fp8_adds",
    "An FP8 head adds at most a tenth to the mismatch of FP8 linear layers",
    "RMS of the logits' difference, linear layers and FP8 head over linear layers",
    Zone(high=1.1),
)
HALF = Hypothesis(
    "half",
    "Quantising the head's weights alone takes at least a fifth from the FP8 head's mismatch",
    "RMS of the logits' difference, FP8 weights over FP8 head",
    Zone(high=0.8),
)


def fp8_head(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Returns logits (M, V) of hidden states (M, D) and a float32 head (D, V), both in E4M3 with
    the blocks of linear layers."""
    return matmul(_FP8, hidden, head)


def fp8_weights(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Returns logits like `fp8_head`, of hidden states that are not quantised."""
    q, _ = quantize_weight(head, _FP8)
    return matmul(get_recipe("f32"), hidden, q.dequantize())


def views() -> dict[str, View]:
    """Returns the ways of scoring; 'float32 head' is the one that others are compared with."""

    def wide(name: str) -> Recipe:
        return dataclasses.replace(get_recipe(name), head=jnp.dtype(jnp.float32))

    return {
        "float32 head": View(wide("bf16")),
        "bf16 head": View(get_recipe("bf16")),
        "FP8 weights of the head": View(wide("bf16"), head=fp8_weights),
        "FP8 head": View(wide("bf16"), head=fp8_head),
        "FP8 linear layers": View(wide("fp8_linear")),
        "FP8 linear layers and head": View(wide("fp8_linear"), head=fp8_head),
    }


_REFERENCE = "float32 head"
_PAIRS = {name: (name, _REFERENCE) for name in views() if name != _REFERENCE}


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    scoring = Scoring(views(), _PAIRS, _REFERENCE, plan.size.questions)
    return {"scores": scoring.cell("head", subject, plan.note)}


def _judge(found: Found) -> list[Verdict]:
    pairs = read_pairs(found.each("scores"), _PAIRS)
    linears, head = pairs["FP8 linear layers"], pairs["FP8 head"]
    return [
        judge_pairs(BF16_SMALL, rms_ratio, pairs["bf16 head"], linears),
        judge_pairs(FP8_SMALL, rms_ratio, head, linears),
        judge_pairs(FP8_ADDS, rms_ratio, pairs["FP8 linear layers and head"], linears),
        judge_pairs(HALF, rms_ratio, pairs["FP8 weights of the head"], head),
    ]


def _result(found: Found) -> Result:
    return dict(summaries(read_pairs(found.each("scores"), _PAIRS)))


def _tables(result: Result) -> str:
    return (
        f"{result['name']}: {result['questions']} questions of {result['group']} samples for each "
        f"of {len(result['subjects'])} seeds, sampled in bf16 with a float32 head; the mean and "
        "its 95% interval against that head.\n\n"
        + writing.table("scored with", result["pooled"].items(), writing.PAIR_COLUMNS)
    )


def _figure(result: Result) -> Figure:
    """Draws the RMS of the logits' difference, and |D| by the token's probability."""
    figure, (bars, lines) = writing.panels(2, 11, 3.8)
    pooled = result["pooled"]
    middle = (np.array(PROBABILITIES[1:]) + PROBABILITIES[:-1]) / 2
    for index, (name, found) in enumerate(pooled.items()):
        value, low, high = found["rms_logits"]
        colour = writing.COLOURS[index]
        bars.barh(name, value, xerr=[[value - low], [high - value]], color=colour)
        values = [np.nan if x is None else x for x in found["by"]["probability"]]
        lines.plot(middle, values, "o-", color=colour, label=name, ms=4)
    writing.plain(bars, "RMS of the logits' difference", "")
    writing.plain(lines, "probability of the token", "mean |D|")
    bars.set_xscale("log")
    bars.invert_yaxis()
    lines.set_yscale("log")
    lines.legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(
    "head",
    full=Size(questions=64),
    quick=Size(questions=32),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
