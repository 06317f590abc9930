"""Study `gradients`: how near backward passes come to the exact gradient, and which part of
the forward pass moves the probabilities of right answers.

Both at given weights, so that the noise of training does not enter.

*Backward.* Batches of RL are sampled under `fp8_blockwise`, rewarded, and their gradients computed
with one forward pass and several backward passes. Reference is `backward='dequantized'`, the
gradient of what the forward pass computed, straight through its rounding. For scale, the gradient
of another function on the same tokens: bf16 forward and backward. A batch is a sample; what batches
share is the bias ``(g - r) . r / |r|^2``.

*Forward.* The probability of each held-out question's demonstration, by one forward pass (no
sampling noise), under recipes that quantise parts: its error against bf16, as RMS over questions,
of the probability and of its logarithm. Where answers are not one string, only the logarithm says
much.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import ml_collections
import numpy as np

from fp8rl_jax import learner
from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.config import default_config
from fp8rl_jax.data import Stream
from fp8rl_jax.quant import Operand, Recipe, get_recipe
from fp8rl_jax.quant.qarray import E4M3, E5M2, INT8
from fp8rl_jax.training.learn import weighed
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import Runtime, make_runtime
from fp8rl_jax.training.sample_step import Version, sample_step
from studies import writing
from studies.cells import Cell, described, rounded
from studies.frame import Found, Numbers, Plan, Result, Size, Study, Verdict
from studies.hypotheses import Hypothesis, Zone
from studies.progress import Note, Part
from studies.scoring import answer_logprobs
from studies.statistics import cluster_bootstrap, seed_mean
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FP8, _BF16, _LINEAR = (get_recipe(name) for name in ("fp8_blockwise", "bf16", "fp8_linear"))
_EXACT = "exact"
_TRIES = 16  # batches sampled, at most, for each one that has a gradient
# The reference, backward passes at its forward pass, and another function.
BACKWARDS: dict[str, Recipe] = {
    _EXACT: dataclasses.replace(_FP8, name=_EXACT, backward="dequantized"),
    "fp8": _FP8,
    "fp8, gradients in E5M2": dataclasses.replace(_FP8, gradient=Operand(E5M2)),
    "bf16, of unquantised operands": dataclasses.replace(_FP8, backward="bf16"),
    "bf16 forward and backward": _BF16,
}


def _stored(k: Any, v: Any) -> Recipe:
    return dataclasses.replace(_FP8, name="parts", k_dtype=k, v_dtype=v)


_LINEARS, _E4M3, _INT8 = "FP8 linear layers", "and K and V in E4M3", "and K and V in INT8"
FORWARDS: dict[str, Recipe] = {
    _LINEARS: _LINEAR,
    _E4M3: _FP8,
    "and K in E4M3": _stored(E4M3, None),
    "and V in E4M3": _stored(None, E4M3),
    _INT8: _stored(INT8, INT8),
    "and K in INT8, V in E4M3": _stored(INT8, E4M3),
    "K and V in E4M3 alone": dataclasses.replace(_BF16, kv="dynamic"),
    "K and V in INT8 alone": dataclasses.replace(_BF16, kv="dynamic", k_dtype=INT8, v_dtype=INT8),
}

UNBIASED = Hypothesis(
    "unbiased",
    "The FP8 backward pass has no bias above 1%",
    "(g - r) . r / |r|^2 of the FP8 backward pass, mean over batches",
    Zone(-0.01, 0.01),
)
SMALL = Hypothesis(
    "small",
    "The FP8 backward pass errs by less than a tenth of a batch's sampling noise",
    "|g - r| over a batch's standard deviation",
    Zone(high=0.1),
)
INT8_HALVES = Hypothesis(
    "int8_halves",
    "Keys and values in INT8 add at most half of the variance that those in E4M3 add",
    "variance of log P that INT8 adds to linear layers', over that of E4M3",
    Zone(high=0.5),
)


def _cells(subject: Subject, plan: Plan) -> dict[str, Cell]:
    key = {"study": "gradients", **subject.identity, **subject.settings}
    names = f"gradients-{subject.tag}-seed{subject.seed}"

    def recipes(table: dict[str, Recipe]) -> dict[str, Any]:
        return {name: described(recipe) for name, recipe in table.items()}

    batches, note = plan.size.sequences, plan.note
    backward = functools.partial(_backward, subject, batches, note)
    forward = functools.partial(_forward, subject, note)
    own = {"backward": recipes(BACKWARDS), "batches": batches}
    return {
        "backward": Cell(f"{names}-backward", {**key, **own}, backward),
        "forward": Cell(f"{names}-forward", {**key, "forward": recipes(FORWARDS)}, forward),
    }


def _runtime(subject: Subject) -> Runtime:
    """Returns the subject's runtime with `fp8_blockwise` on both sides."""
    config = ml_collections.ConfigDict(subject.runtime.config.to_dict())
    config.precision = default_config().precision
    config.precision.rollout = config.precision.learner = _FP8.name
    config.precision.health = config.precision.self_check = False
    config.algo.correction = "none"
    config.algo.kl_coef = 0.0  # the reference policy would be the policy itself
    return make_runtime(config)


def _backward(subject: Subject, batches: int, note: Note) -> Numbers:
    """Samples batches, and returns what `_Sums.numbers` has of each backward pass. A batch whose
    questions have equal rewards each has no gradient, and is replaced by the next."""
    runtime = _runtime(subject)
    config = runtime.config
    engine, optimizer = runtime.engine, optimizer_of_phase(config, "rl")
    state = engine.new_state(jax.device_put(subject.params), optimizer)
    served = engine.refit(state)
    version = Version(served.weights, int(served.version), np.asarray(state.rng))
    stream = Stream(runtime.questions["train"], config.rollout.prompts_per_step, config.run.seed)
    parts = config.learner.gradient_accumulation_steps
    forward_passes = {
        name: engine.forward_pass(recipe, config.learner.remat)
        for name, recipe in BACKWARDS.items()
    }
    programs = {
        name: exact_jit(learner.GradientProgram(forward_pass, engine.loss, parts))
        for name, forward_pass in forward_passes.items()
    }
    sums = {name: _Sums() for name in BACKWARDS}
    progress = Part("batches", batches, note)
    used = 0
    for number in range(_TRIES * batches):
        sampled = sample_step(runtime, version, stream, number, lambda progress: None)
        batch = engine.batch(sampled.samples.rollout, sampled.samples.prompts)
        batch, _ = weighed(runtime.resolved.algorithm, sampled.samples, batch)
        if not np.any(batch.advantages):
            continue
        given = processes.place(batch, runtime.layout.rows)
        reference = None
        for name, program in programs.items():
            gradients, _, metrics = program(state, given, engine.rope)
            assert metrics["good"], f"batch {number + 1}: the gradient is not finite"
            leaves = jax.device_get(jax.tree.leaves(gradients.params))
            reference = leaves if reference is None else reference
            sums[name].add(leaves, reference)
        used += 1
        progress.reach(used)
        if used == batches:
            break
    else:
        raise UserError(
            f"study gradients: {used} of {number + 1} batches have a gradient, and --batches asks "
            f"for {batches}: the other batches' rewards are equal for each question. Raise "
            "rollout.group_size or prompts_per_step, or give a policy that is right more often"
        )
    return {name: own.numbers(sums[_EXACT]) for name, own in sums.items()}


def _dot(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    pairs = zip(one, other, strict=True)
    return sum(float(np.vdot(a.astype(np.float64), b.astype(np.float64))) for a, b in pairs)


def _cosine(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return _dot(one, other) / np.sqrt(_dot(one, one) * _dot(other, other))


class _Sums:
    """Sums over batches: of each batch's scalar products with the reference, and of gradients and
    their squares, element by element."""

    def __init__(self) -> None:
        self._products: list[list[float]] = []
        self._total: list[np.ndarray] = []
        self._squares: list[np.ndarray] = []

    def add(self, gradient: list[np.ndarray], reference: list[np.ndarray]) -> None:
        away = [a - b for a, b in zip(gradient, reference, strict=True)]
        pairs = (gradient, reference), (gradient, gradient), (away, away), (away, reference)
        self._products.append([_dot(*pair) for pair in pairs])
        if not self._total:
            self._total = [np.zeros_like(x) for x in gradient]
            self._squares = [np.zeros_like(x) for x in gradient]
        for total, squares, x in zip(self._total, self._squares, gradient, strict=True):
            total += x
            squares += x * x

    def numbers(self, reference: _Sums) -> Numbers:
        """Returns for each batch 'cosine', 'error' (relative) and 'bias'; 'noise', the standard
        deviation of a batch's gradient over the size of the expected one (None where that is not
        known from zero); and the cosines of the mean gradient and of
        Adam's direction, mean over root of mean square, with the reference's."""
        gr, gg, dd, dr = np.array(self._products).T
        rr = np.array(reference._products)[:, 1]
        count = len(rr)

        mean = _dot(self._total, self._total) / count**2
        variance = (gg.mean() - mean) * count / max(count - 1, 1)
        expected = mean - variance / count  # of the mean's square the variance is a part
        noise = None
        if min(variance, expected) > 0:
            noise = float(f"{np.sqrt(variance / expected):.5g}")
        directions = [
            [t / (np.sqrt(s) + 1e-12) for t, s in zip(own._total, own._squares, strict=True)]
            for own in (self, reference)
        ]
        return {
            "cosine": rounded(gr / np.sqrt(gg * rr)),
            "error": rounded(np.sqrt(dd / rr)),
            "bias": rounded(dr / rr),
            "noise": noise,
            "cosine_of_mean": float(f"{_cosine(self._total, reference._total):.8g}"),
            "cosine_of_adam": float(f"{_cosine(*directions):.8g}"),
        }


def _forward(subject: Subject, note: Note) -> Numbers:
    """Returns {part: log-probability of every demonstration, (Q,)}, and those in bf16."""
    recipes = {"bf16": _BF16, **FORWARDS}
    found = answer_logprobs(subject.runtime, recipes, subject.params, note)
    return {name: rounded(values) for name, values in found.items()}


def _errors(numbers: Numbers, part: str) -> np.ndarray:
    """Returns the squared errors of P and log P, and P less bf16's, of each question (Q, 3)."""
    own, plain = (np.array(numbers[name], np.float64) for name in (part, "bf16"))
    p = np.exp(own) - np.exp(plain)
    return np.stack([p**2, (own - plain) ** 2, p], axis=1)


def _result(found: Found) -> Result:
    return {
        "batches": found.size.sequences,
        "backward": {name: [n[name] for n in found.each("backward")] for name in BACKWARDS},
        "forward": {
            part: [_errors(n, part).mean(axis=0).tolist() for n in found.each("forward")]
            for part in FORWARDS
        },
        "questions": len(found.each("forward")[0]["bf16"]),
    }


def _judge(found: Found) -> list[Verdict]:
    backward = found.each("backward")
    bias = [np.mean(numbers["fp8"]["bias"]) for numbers in backward]
    if len(bias) == 1:  # one subject: its batches are the sample
        bias = backward[0]["fp8"]["bias"]
    share = [np.mean(n["fp8"]["error"]) * _size_over_noise(n[_EXACT]) for n in backward]
    parts = (_LINEARS, _E4M3, _INT8)
    errors = np.concatenate(
        [np.stack([_errors(n, part)[:, 1] for part in parts], 1) for n in found.each("forward")]
    )
    added = cluster_bootstrap(errors, lambda m: (m[:, 2] - m[:, 0]) / (m[:, 1] - m[:, 0]))
    return [
        UNBIASED.judge(seed_mean(np.array(bias))),
        SMALL.judge(seed_mean(np.array(share))),
        INT8_HALVES.judge(added),
    ]


def _size_over_noise(exact: Numbers) -> float:
    """Returns the size of a batch's gradient over its standard deviation; NaN if unknown."""
    noise = exact["noise"] or np.nan
    return float(np.sqrt(1 + noise**2) / noise)


def _tables(result: Result) -> str:
    """Returns the table of backward passes and that of the forward pass's parts."""

    def mean(name: str):
        return lambda runs: writing.each([np.mean(run[name]) for run in runs])

    def fine(name: str):
        return lambda runs: ", ".join(f"{np.mean(run[name]):.5f}" for run in runs)

    backward = writing.table(
        "backward pass",
        result["backward"].items(),
        {
            "cosine": fine("cosine"),
            "relative error": mean("error"),
            "bias": mean("bias"),
            "cosine of the mean": fine("cosine_of_mean"),
            "cosine of Adam's direction": fine("cosine_of_adam"),
            "a batch's noise": lambda runs: writing.each([run["noise"] for run in runs]),
        },
    )
    linear = np.array(result["forward"][_LINEARS])

    def added(part: str, column: int) -> str:
        own = np.array(result["forward"][part])
        return writing.each((own[:, column] - linear[:, column]) / linear[:, column])

    forward = writing.table(
        "quantised",
        [(part, part) for part in FORWARDS],
        {
            "RMS of P less bf16's": lambda part: writing.each(
                np.sqrt(np.array(result["forward"][part])[:, 0])
            ),
            "mean of it": lambda part: writing.each(np.array(result["forward"][part])[:, 2]),
            "RMS of log P less bf16's": lambda part: writing.each(
                np.sqrt(np.array(result["forward"][part])[:, 1])
            ),
            "variance of log P beside the linear layers', over it": lambda part: (
                added(part, 1) if part.startswith("and") else "-"
            ),
        },
    )
    return (
        f"{result['name']}, a figure for each seed. Gradients of {result['batches']} batches, "
        f"against the exact one of the FP8 forward pass:\n\n{backward}\nDemonstrations of "
        f"{result['questions']} held-out questions:\n\n{forward}"
    )


def _figure(result: Result) -> Figure:
    """Draws the errors of backward passes, and of the forward pass's parts."""
    figure, (backward, forward) = writing.panels(2, 13, 4)
    names = [name for name in result["backward"] if name != _EXACT]
    errors = [[np.mean(run["error"]) for run in result["backward"][name]] for name in names]
    backward.barh(names, [np.mean(found) for found in errors], color=writing.COLOURS[1])
    parts = [np.sqrt(np.array(result["forward"][part])[:, 1]).mean() for part in FORWARDS]
    forward.barh(list(FORWARDS), parts, color=writing.COLOURS[0])
    writing.plain(backward, "relative error of a batch's gradient", "")
    writing.plain(forward, "RMS of log P of the demonstration, less bf16's", "")
    for axes in (backward, forward):
        axes.invert_yaxis()  # the order of the tables
    return figure


STUDY = Study(
    "gradients",
    full=Size(sequences=20),
    quick=Size(sequences=2),
    cells=_cells,
    judge=_judge,
    result=_result,
    tables=_tables,
    figure=_figure,
)
