"""Study `recipes`: which FP8 recipe learns as much as bf16.

NVIDIA's report on FP8 for RL gives Llama 3.1 8B 0.616 in BF16 and 0.613 in FP8 end to end, with FP8
in linear layers alone: K and V stay in bf16. The recipe `fp8_blockwise` stores them in E4M3, too.
The arms are bf16, `fp8_blockwise`, `fp8_linear` (the claim's recipe), as a control `fp8_linear`
whose backward pass multiplies in bf16 the bytes of its forward pass, and `fp8` with K and V in
INT8, which has the bytes of `fp8_blockwise` and adds less than half of its variance (`study
gradients`). Sampler and learner have one recipe, so none of the arms drifts.

Fixed before the first run:

* *Primary endpoint*: the probability of the right answer under bf16, computed by one forward pass
  (no sampling noise), mean of LAST snapshots of the weights: those after every sixteenth of the
  steps, from three quarters of the steps on. One snapshot is not enough: a policy moves by several
  points within ten steps. Equivalence to bf16: two one-sided t-tests with MARGIN, and the whole
  95% interval within it.
* *Secondary*: the training reward of the last quarter of the steps. *Third*: accuracy at the end.
* Whether FP8 keys and values cost: the paired t-test of `fp8_linear` less `fp8_blockwise`.
* Seeds 0 to 11, all arms of a seed on one machine from one start. Verdicts are drawn when all are
  there. The last arm was added when the others of seeds 0 to 3 had been run.

The mean of the snapshots' weights is measured in every arm as well (`eval.average_last`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fp8rl_jax.config import default_config
from fp8rl_jax.config.precision import side_recipe
from fp8rl_jax.quant import Recipe, get_recipe
from studies import writing
from studies.cells import Cell
from studies.frame import Found, Numbers, Plan, Result, Size, Study, Verdict
from studies.hypotheses import ANY, Hypothesis, Zone
from studies.runs import After, Fields, accuracies, arm_cells, part, series
from studies.scoring import answer_logprobs
from studies.statistics import equivalence, seed_mean
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = 0.015  # in probability of the right answer
LAST = 5  # snapshots of the primary endpoint
BASELINE = "bf16"


def _arm(recipe: str, **more: Any) -> Fields:
    sides = dict.fromkeys(("precision.rollout", "precision.learner"), recipe)
    return {**sides, "algo.correction": "none", **{f"precision.{k}": v for k, v in more.items()}}


ARMS: dict[str, Fields] = {
    BASELINE: _arm("bf16"),
    "fp8_blockwise": _arm("fp8_blockwise"),
    "fp8_linear": _arm("fp8_linear"),
    "fp8_linear_dequantized": _arm("fp8_linear", backward="dequantized"),
    "fp8": _arm("fp8"),
}
_TEXTS = {
    "fp8_blockwise": "FP8 with keys and values in E4M3",
    "fp8_linear": "FP8 in linear layers, the claim's recipe,",
    "fp8_linear_dequantized": "FP8 in linear layers with a bf16 backward pass of its bytes",
    "fp8": "FP8 with keys and values in INT8",
}

_FIGURE = "probability of the right answer in bf16, mean of the last snapshots, less that of {}"
EQUALS = {
    arm: Hypothesis(
        f"{arm}_equals",
        f"{text} learns as much as bf16",
        _FIGURE.format(BASELINE),
        Zone(-MARGIN, MARGIN),
        "two one-sided t-tests",
    )
    for arm, text in _TEXTS.items()
}
KV_COSTS = Hypothesis(
    "kv_costs",
    "FP8 learns more with keys and values in bf16 than in E4M3",
    _FIGURE.format("fp8_blockwise"),
    Zone(low=ANY),
)
AVERAGE_GAINS = {
    arm: Hypothesis(
        f"average_gains_{arm}",
        f"The mean of the last snapshots' weights is better than they are ({arm})",
        "probability of the right answer in bf16 of the mean weights less the mean of theirs",
        Zone(low=ANY),
    )
    for arm in ARMS
}


def _measure(subject: Subject, recipe: Recipe, weights: Sequence[Any]) -> Numbers:
    """Returns the probabilities of the right answer of snapshots and of their mean weights."""
    total = jax.tree.map(lambda x: np.asarray(x, np.float64), weights[0])
    for params in weights[1:]:
        total = jax.tree.map(np.add, total, params)
    mean = jax.tree.map(lambda x: (x / len(weights)).astype(np.float32), total)
    recipes = {"bf16": get_recipe("bf16"), "own": recipe}
    every = [answer_logprobs(subject.runtime, recipes, params) for params in (*weights, mean)]
    found = {}
    for name in recipes:
        *snapshots, average = (float(np.exp(logps[name]).mean()) for logps in every)
        found[name] = {"snapshots": snapshots, "average": average}
    return found


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    """Returns a cell for each arm, whose 'after' are the numbers of `_measure`."""
    every = {"run.checkpoint_every": max(plan.size.steps // 16, 1), "run.keep_checkpoints": LAST}
    cells: dict[str, Cell] = {}
    for name, fields in ARMS.items():
        precision = default_config().precision
        for path, value in fields.items():
            section, field = path.split(".")
            if section == "precision":
                precision[field] = value
        own = side_recipe(precision, "rollout", subject.model.num_hidden_layers)
        after = After({"last": LAST}, functools.partial(_measure, subject, own), LAST)
        cells |= arm_cells("recipes", subject, plan, {name: {**fields, **every}}, after)
    return cells


def _right(runs: Sequence[Numbers], recipe: str = "bf16") -> np.ndarray:
    """Returns the primary endpoint of each run, (S,)."""
    return np.array([np.mean(run["after"][recipe]["snapshots"]) for run in runs])


def _averaged(runs: Sequence[Numbers], recipe: str = "bf16") -> np.ndarray:
    return np.array([run["after"][recipe]["average"] for run in runs])


def _result(found: Found) -> Result:
    return {
        "questions": found.subjects[0].runtime.config.eval.questions,
        "margin": MARGIN,
        "runs": {arm: found.each(arm) for arm in ARMS},
    }


def _judge(found: Found) -> list[Verdict]:
    runs = {arm: found.each(arm) for arm in ARMS}
    right = {arm: _right(numbers) for arm, numbers in runs.items()}
    verdicts = []
    for arm, hypothesis in EQUALS.items():
        each = right[arm] - right[BASELINE]
        p = equivalence(each, MARGIN) if len(each) > 1 else math.nan
        verdicts.append(hypothesis.judge(seed_mean(each), p))
    verdicts.append(KV_COSTS.judge(seed_mean(right["fp8_linear"] - right["fp8_blockwise"])))
    for arm, hypothesis in AVERAGE_GAINS.items():
        verdicts.append(hypothesis.judge(seed_mean(_averaged(runs[arm]) - right[arm])))
    return verdicts


def _tables(result: Result) -> str:
    """Returns two tables of all arms: the endpoints, and their differences to bf16."""
    runs = result["runs"]
    endpoints = {
        "right in bf16": _right,
        "right under its own recipe": functools.partial(_right, recipe="own"),
        "reward, last quarter": lambda found: part(series(found, "reward_mean"), 3),
        "accuracy at the end, in bf16": lambda found: np.array(accuracies(found, "bf16")),
        "right in bf16, mean weights": _averaged,
    }
    drift = {
        "largest mean abs D": lambda found: series(found, "train_rollout_logprob_abs_diff").max()
    }

    def less(endpoint, arm: str) -> str:
        return writing.figure(seed_mean(endpoint(runs[arm]) - endpoint(runs[BASELINE])))

    seeds = writing.table(
        "arm",
        runs.items(),
        {name: lambda found, get=get: writing.each(get(found)) for name, get in endpoints.items()}
        | {name: lambda found, get=get: f"{get(found):.2g}" for name, get in drift.items()},
    )
    differences = writing.table(
        "less bf16: mean [95% interval]",
        [(arm, arm) for arm in ARMS if arm != BASELINE],
        {name: functools.partial(less, get) for name, get in endpoints.items()},
    )
    return (
        f"{result['name']}, {result['steps']} steps of RL, a figure for each seed; probabilities "
        f"of the right answers to {result['questions']} held-out questions.\n\n{seeds}\n"
        f"{differences}"
    )


def _figure(result: Result) -> Figure:
    """Draws each arm's differences to bf16, a dot for each seed with the mean, and the rewards."""
    figure, (differences, rewards) = writing.panels(2, 13, 4)
    base = _right(result["runs"][BASELINE])
    names = [arm for arm in result["runs"] if arm != BASELINE]
    for place, arm in enumerate(names):
        each = _right(result["runs"][arm]) - base
        mean = seed_mean(each)
        differences.plot([place] * len(each), each, "o", color="#999999", ms=4)
        differences.plot([place], [mean.value], "ko", ms=7)
        if len(each) > 1:
            differences.plot([place, place], [mean.low, mean.high], "k-", lw=1.5)
    differences.axhspan(-MARGIN, MARGIN, color="#e8f0e8", zorder=0)
    differences.set_xticks(range(len(names)), [n.replace("_", "\n") for n in names], fontsize=8)
    differences.set_xlim(-0.5, len(names) - 0.5)
    writing.plain(differences, "", "P(right answer), less bf16's")
    writing.rewards(rewards, result["runs"])
    return figure


STUDY = Study(
    "recipes",
    full=Size(steps=160),
    quick=Size(steps=3),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
