"""Samples once, and scores the samples under many recipes.

Decoding and scoring under one recipe give the same bits, so a mismatch between two recipes needs no
second engine: a recipe's score of given tokens is what a sampler under that recipe would have
recorded. Two scores differ only by quantisation; published figures contain the differences of two
engines too. All tokens are sampled under one recipe, so figures of other recipes are means over
that recipe's samples, not over samples of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import traverse_util

from fp8rl_jax.base import processes
from fp8rl_jax.base.exact_jit import exact_jit, exact_when_called
from fp8rl_jax.batch import Batch, of_sequences
from fp8rl_jax.envs import Question
from fp8rl_jax.learner import response_logprobs
from fp8rl_jax.models import ModelConfig, init_scaling, quantize_params
from fp8rl_jax.models.logprobs import inverse_temperature
from fp8rl_jax.models.router import selection_scores
from fp8rl_jax.models.taps import LOGITS, ROUTING, Observe
from fp8rl_jax.quant import Recipe
from fp8rl_jax.quant.kv import with_scales
from fp8rl_jax.rollout import make_calibrate, make_refit
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.runtime import Runtime
from studies.progress import Note, Part, silent

_ROUTER_LOGITS = "router_logits"
_MOST_LOGITS = 1 << 26  # most float32 logits of a score in memory at once
_ROWS = 128  # most sequences that are scored at once


class View(NamedTuple):
    """How tokens are scored: a recipe, with or without routing replay.

    Attributes:
      recipe: numerics.
      replay: what replaces the routers' choices: 'none', or 'experts' or 'weights' of another view
        (`algo.routing_replay`).
      of: name of that other view.
    """

    recipe: Recipe
    replay: str = "none"
    of: str = ""


class Comparison(NamedTuple):
    """Two scores a and b of the same tokens. Arrays are (B, R), and 0 outside the response.

    Attributes:
      difference: D, the log-probability of b minus that of a, float64.
      divergence: KL(a || b) over the full vocabulary, in nats.
      square: variance over the vocabulary of the logits' difference (its mean changes no
        probability).
      size: variance over the vocabulary of a's logits.
      flips: (S, B, T) bool, whether the routers chose different sets of experts, in the S layers
        with experts and at every token of the sequence, even if other experts were replayed; None
        for a dense model.
    """

    difference: np.ndarray
    divergence: np.ndarray
    square: np.ndarray
    size: np.ndarray
    flips: np.ndarray | None


class Scores(NamedTuple):
    """Scores of a batch of sequences under all views.

    Attributes:
      rows: slice of the samples that are in the batch.
      logprobs: {view: (B, R) float32}.
      entropy: {view: (B, R) float32}, in nats.
      margins: {view: (S, B, T) float32}: score (`selection_scores`) of the last expert that a
        router chose minus that of the next expert; {} if every expert is chosen.
      compare: ``compare(a, b) -> Comparison`` of two views.
    """

    rows: slice
    logprobs: dict[str, np.ndarray]
    entropy: dict[str, np.ndarray]
    margins: dict[str, np.ndarray]
    compare: Callable[[str, str], Comparison]


def sample(
    runtime: Runtime,
    params: Any,
    recipe: Recipe,
    questions: Sequence[Question],
    group: int,
    note: Note = silent,
) -> Batch:
    """Samples answers under a recipe, and returns them as a batch on the host.

    Args:
      runtime: model, task and `rollout` settings of the samples.
      params: float32 parameters.
      recipe: the sampler's recipe; calibrated KV scales are calibrated on all prompts.
      questions: P questions, a multiple of `rollout.prompts_per_step`.
      group: number of samples of each question, G.
      note: called with the progress.

    Returns:
      B = P * G rows, prompt-major; `old_logprobs` are those that the sampler recorded.
    """
    config = ml_collections.ConfigDict(runtime.config.to_dict())
    config.algo.routing_replay = "none"  # views say what is replayed
    frozen = ml_collections.FrozenConfigDict(config)
    resolved = dataclasses.replace(runtime.resolved, config=frozen, rollout_recipe=recipe)
    runtime = dataclasses.replace(runtime, resolved=resolved)
    settings = config.rollout
    engine = runtime.engine
    sampler = engine.make_sampler(group, settings.top_k, settings.top_p, records_kept=True)
    size, key = settings.prompts_per_step, engine.keys["rollout"]
    parts, progress = [], Part("questions answered", len(questions), note)
    scaling = scaling_of(runtime, params, recipe, *runtime.prompts(list(questions)))
    weights = make_refit(recipe)(params, scaling)[0]
    for first in range(0, len(questions), size):
        part = list(questions[first : first + size])
        temperature = np.full(len(part) * group, settings.temperature, np.float32)
        prompts = Prompts.numbered(*runtime.prompts(part), key, temperature, first=first * group)
        rollout = engine.sample(weights, prompts, sampler=sampler)
        parts.append(engine.batch(rollout, prompts))
        progress.reach(first + size)
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def scaling_of(runtime: Runtime, params, recipe: Recipe, tokens, lengths) -> dict:
    """Returns a scaling state of parameters; KV scales, if the recipe has any, are calibrated on
    tokens (B, T) of lengths (B,).

    Rows are calibrated in parts; the result is the largest scale of the parts.
    """
    scaling = init_scaling(params, recipe)
    if recipe.kv != "calibrated":
        return scaling
    calibrate = make_calibrate(runtime.resolved.model, recipe, runtime.layout.parallel)
    size = _part_size(len(tokens), _ROWS)
    step, rope = np.int32(0), runtime.engine.rope
    parts = [slice(first, first + size) for first in range(0, len(tokens), size)]
    batches = (of_sequences(tokens[p], lengths[p]) for p in parts)
    found = [calibrate(params, scaling, batch, step, rope) for batch in batches]
    largest = jax.tree.map(lambda *x: functools.reduce(jnp.maximum, x), *found)
    return with_scales(scaling, largest)


def _part_size(count: int, most: int) -> int:
    """Returns the largest divisor of `count` that is at most `most`."""
    return max(n for n in range(1, count + 1) if n <= most and count % n == 0)


class Scorer:
    """Programs that score samples of one model under several views."""

    def __init__(self, runtime: Runtime, views: dict[str, View], note: Note = silent):
        """Prepares a program for each recipe of `views`, in which a view that replays comes after
        the view whose routing it takes. `note` is called with the progress of a score."""
        self._runtime, self._views, self._note = runtime, views, note
        taps = (LOGITS, *(_ROUTER_LOGITS, *ROUTING) * bool(runtime.resolved.model.num_experts))
        recipes = {view.recipe for view in views.values()}
        self._score = {recipe: _make_score(runtime, recipe, taps) for recipe in recipes}
        self._quantize = {
            recipe: exact_jit(functools.partial(quantize_params, recipe=recipe))
            for recipe in recipes
        }

    def score(self, params: Any, samples: Batch) -> Iterator[Scores]:
        """Yields the scores of some rows at a time.

        Args:
          params: float32 parameters.
          samples: result of `sample`; calibrated KV scales are calibrated on it, as after a step.
        """
        runtime = self._runtime
        total, slots = samples.targets.shape
        most = max(_MOST_LOGITS // (slots * runtime.resolved.model.vocab_size), 1)
        size = _part_size(total, min(most, _ROWS))
        progress = Part("sequences scored", total, self._note)
        weights = {
            recipe: quantize(
                params, scaling=scaling_of(runtime, params, recipe, samples.tokens, samples.lengths)
            )
            for recipe, quantize in self._quantize.items()
        }
        for first in range(0, total, size):
            rows = slice(first, first + size)
            batch = jax.tree.map(lambda x, rows=rows: x[rows], samples)
            yield self._batch(weights, _correction(params), batch, rows)
            progress.reach(rows.stop)

    def _batch(
        self, weights: dict, correction: jax.Array | None, batch: Batch, rows: slice
    ) -> Scores:
        found: dict[str, tuple] = {}
        for name, view in self._views.items():
            routing = {}
            if view.replay != "none":
                count = ("experts", "weights").index(view.replay) + 1
                taps = found[view.of][2]
                routing = {n: jnp.moveaxis(taps[n], 0, 1) for n in ROUTING[:count]}
            given = processes.place(
                dataclasses.replace(batch, routing=routing), self._runtime.layout.rows
            )
            found[name] = self._score[view.recipe](
                weights[view.recipe], given, self._runtime.engine.rope
            )
        mask, model = batch.mask, self._runtime.resolved.model
        dense = model.dense_layers  # the first layers, whose taps are zeros

        def compare(a: str, b: str) -> Comparison:
            one, other = found[a], found[b]
            logits = _compare(one[2][LOGITS], other[2][LOGITS], batch.temperature)
            divergence, square, size = (np.where(mask, x, 0.0) for x in processes.fetch(logits))
            flips = None
            if ROUTING[0] in one[2]:
                chosen = (x[2][ROUTING[0]][dense:] for x in (one, other))
                flips = processes.fetch(_flips(*chosen))
            d = np.asarray(other[0], np.float64) - np.asarray(one[0], np.float64)
            return Comparison(np.where(mask, d, 0.0), divergence, square, size, flips)

        margins = {
            name: np.asarray(_margin(model, taps[_ROUTER_LOGITS][dense:], correction))
            for name, (_, _, taps) in found.items()
            if model.num_experts // model.n_group * model.topk_group > model.num_experts_per_tok
        }
        logprobs = {n: np.where(mask, x[0], 0.0).astype(np.float32) for n, x in found.items()}
        entropy = {n: np.where(mask, x[1], 0.0) for n, x in found.items()}
        return Scores(rows, logprobs, entropy, margins, compare)


def answer_logprobs(
    runtime: Runtime, recipes: dict[str, Recipe], params: Any, note: Note = silent
) -> dict[str, np.ndarray]:
    """Returns {name of a recipe: log-probability of each held-out question's demonstration, (Q,)
    float64}, at temperature 1.

    Args:
      runtime: model and task.
      recipes: {name: recipe}.
      params: float32 parameters.
      note: called with the progress.
    """
    scorer = Scorer(runtime, {name: View(recipe) for name, recipe in recipes.items()}, note)
    samples = runtime.demonstrations(list(runtime.questions["eval"]))
    parts = [scores.logprobs for scores in scorer.score(params, samples)]
    return {
        name: np.concatenate([part[name] for part in parts]).astype(np.float64).sum(axis=1)
        for name in recipes
    }


def _make_score(runtime: Runtime, recipe: Recipe, taps: tuple[str, ...]) -> Callable:
    """Returns (weights, batch, rope) -> (logp (B, R), entropy (B, R), taps)."""
    forward_pass = runtime.engine.forward_pass(recipe)

    @exact_jit
    def score(weights, batch: Batch, rope):
        logp, entropy, aux = response_logprobs(forward_pass, weights, batch, rope, Observe(taps))
        return logp, entropy, aux["taps"]

    return score


@exact_when_called
def _compare(one: jax.Array, other: jax.Array, temperature: jax.Array):
    """Returns KL, variance of the logits' difference, and variance of `one`, each (B, R) float32,
    of logits (B, R, V).

    ``KL = sum_v p_v (e^d - 1 - d)`` with d the difference of the log-probabilities: the sum of
    p e^d is 1, so this is the sum of -p d, in terms that are never negative.
    """
    scale = inverse_temperature(temperature)[:, None, None]
    a, b = (jax.nn.log_softmax(x * scale, axis=-1) for x in (one, other))
    d = b - a
    divergence = (jnp.exp(a) * (jnp.expm1(d) - d)).sum(-1)
    return divergence, jnp.var(other - one, axis=-1), jnp.var(one, axis=-1)


@exact_when_called
def _flips(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns whether two choices of experts (L, B, T, k) differ as sets, (L, B, T) bool."""
    return (jnp.sort(one, axis=-1) != jnp.sort(other, axis=-1)).any(-1)


def _correction(params: Any) -> jax.Array | None:
    """Returns the correction biases of all routers, (L, E) float32; None if they have none."""
    leaves = traverse_util.flatten_dict(params)
    found = [x for path, x in leaves.items() if path[-1] == "e_score_correction_bias"]
    return found[0] if found else None


@functools.partial(exact_when_called, static_argnums=0)
def _margin(config: ModelConfig, logits: jax.Array, correction: jax.Array | None) -> jax.Array:
    """Returns the k-th largest score of the experts minus the next, (L, B, T), of logits
    (L, B, T, E) and `correction` (L, E)."""
    bias = None if correction is None else correction[:, None, None]
    best = jax.lax.top_k(selection_scores(config, logits, bias), config.num_experts_per_tok + 1)[0]
    return best[..., -2] - best[..., -1]
