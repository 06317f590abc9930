"""The teacher of on-policy distillation: a second model that reads the policy's responses.

It gives the learner its hidden states and its output head (`batch.Teacher`), from which the learner
computes the exact divergence over the full vocabulary, chunk by chunk: no probabilities of the
teacher are ever stored. Its forward pass is the library's own, so a teacher that is the policy
itself gives a divergence of exactly 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from fp8rl_jax import batch as batches
from fp8rl_jax import learner
from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.batch import Batch
from fp8rl_jax.config.precision import without_calibration
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.models import (
    init_scaling,
    output_head,
    param_shardings,
    quantize_params,
    rope_tables,
)
from fp8rl_jax.quant import Recipe
from fp8rl_jax.training.layout import Layout


def teacher_recipe(resolved: Resolved) -> Recipe:
    """Returns the teacher's numerics: `precision.reference`, without scales of a rollout."""
    return without_calibration(resolved.reference_recipe)


class Teacher:
    """A teacher on a mesh."""

    def __init__(self, resolved: Resolved, layout: Layout, slots: int):
        """Loads `algo.teacher` in its recipe; `slots`: most tokens of a sequence.

        Raises:
          UserError: the weights cannot be read.
        """
        from fp8rl_jax.models import hf

        model, recipe = resolved.teacher, teacher_recipe(resolved)
        assert model is not None
        single = jnp.float32 in (recipe.compute_dtype, recipe.for_head().compute_dtype)
        params = hf.load(
            resolved.config.algo.teacher,
            dtype="float32" if single else "bfloat16",  # weights are rounded to bf16 before FP8
            shardings=functools.partial(param_shardings, layout.mesh),
        )[1]

        def quantized(params):
            return quantize_params(params, recipe, init_scaling(params, recipe))

        shapes = jax.eval_shape(quantized, params)
        places = param_shardings(layout.mesh, shapes)
        self._weights = exact_jit(quantized, out_shardings=places)(params)
        self._rope = processes.place(rope_tables(model, slots), layout.replicated)
        parts = resolved.config.learner.gradient_accumulation_steps
        self._hidden = learner.make_hidden(model, recipe, layout.parallel, parts)
        vocabulary = resolved.model.vocab_size

        @exact_jit
        def head(weights):
            table = output_head(weights, model, layout.parallel)
            assert isinstance(table, jax.Array)
            return table[:, :vocabulary]

        self._head = head(self._weights)

    def read(self, batch: Batch) -> Batch:
        """Returns a batch that is on the devices with what the teacher says of its responses."""
        plain = dataclasses.replace(batch, routing={})
        hidden = self._hidden(self._weights, plain, self._rope)
        return dataclasses.replace(batch, teacher=batches.Teacher(hidden, self._head))


def check_vocabulary(resolved: Resolved) -> None:
    """Raises UserError if policy and teacher do not give their tokens the same numbers."""
    config, teacher = resolved.config, resolved.teacher
    if teacher is None:
        return
    where = config.algo.teacher
    if teacher.vocab_size < resolved.model.vocab_size:
        raise UserError(
            f"algo.teacher: {where} has a vocabulary of {teacher.vocab_size} tokens, the policy of "
            f"{resolved.model.vocab_size}: take a teacher with the policy's tokenizer"
        )
    own = config.data.tokenizer
    own = config.model.checkpoint if own == "checkpoint" else own
    one, other = _numbers(own), _numbers(where)
    if one != other:
        differ = "has no tokenizer.json" if other is None else f"numbers its tokens unlike {own}"
        raise UserError(
            f"algo.teacher: {where} {differ}: take a teacher with the policy's tokenizer "
            f"(data.tokenizer is {config.data.tokenizer!r})"
        )


def _numbers(directory: str) -> Any:
    """Returns the tokens of a tokenizer.json with their numbers; None without such a file."""
    file = pathlib.Path(directory) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        found = read_json(file)
        vocabulary = found["model"]["vocab"]
        added = {token["content"]: token["id"] for token in found.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}): put the file back") from None
    if isinstance(vocabulary, dict):
        return vocabulary | added
    return json.dumps(vocabulary), added
