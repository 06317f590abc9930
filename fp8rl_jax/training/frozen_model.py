"""A frozen model beside the policy, which reads its responses: the teacher of distillation.

It gives the learner its hidden states and its output head (`Batch.frozen_hidden`), from which the
learner computes the exact divergence over the full vocabulary, chunk by chunk: no probabilities of
the model are ever stored. Its forward pass is the library's own, so a model that is the policy
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

from fp8rl_jax import learner
from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.batch import Batch
from fp8rl_jax.config.model_source import pretrained_config
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data.load import tokenizer_path
from fp8rl_jax.models import (
    init_scaling,
    output_head,
    param_shardings,
    quantize_params,
    rope_tables,
)
from fp8rl_jax.training.layout import Layout

_FILE = "tokenizer.json"


def _place_of_head(layout: Layout, shape: jax.ShapeDtypeStruct) -> Any:
    """Returns the sharding of the model's output head (D, V) while no program reads it."""
    return param_shardings(layout.mesh, {"lm_head": shape})["lm_head"]


def with_frozen_shapes(batch: Batch, resolved: Resolved, layout: Layout) -> Batch:
    """Returns the shapes of `FrozenModel.read`'s result for those of a batch."""
    model = resolved.frozen_model
    if model is None:
        return batch
    recipe = resolved.frozen_recipe
    width = model.hidden_size
    shape = jax.ShapeDtypeStruct
    head = shape((width, resolved.model.vocab_size), recipe.for_head().compute_dtype)
    head = shape(head.shape, head.dtype, sharding=_place_of_head(layout, head))
    hidden = shape((*batch.targets.shape, width), recipe.compute_dtype, sharding=layout.rows)
    return dataclasses.replace(batch, frozen_hidden=hidden, frozen_head=head)


class FrozenModel:
    """`Resolved.frozen_model` on a mesh.

    Attributes:
      note: a line that says where its weights are.
    """

    def __init__(self, resolved: Resolved, layout: Layout):
        """Loads the model in its recipe.

        Raises:
          UserError: the weights cannot be read.
        """
        from fp8rl_jax.models import hf

        directory = resolved.config.algo.teacher
        self.note = f"teacher: {directory}"
        model = resolved.frozen_model
        recipe = resolved.frozen_recipe
        assert model is not None
        single = jnp.float32 in (recipe.compute_dtype, recipe.for_head().compute_dtype)
        params = hf.load(
            directory,
            dtype="float32" if single else "bfloat16",  # weights are rounded to bf16 before FP8
            shardings=functools.partial(param_shardings, layout.mesh),
        )[1]

        def quantized(params):
            return quantize_params(params, recipe, init_scaling(params, recipe))

        shapes = jax.eval_shape(quantized, params)
        places = param_shardings(layout.mesh, shapes)
        self._weights = exact_jit(quantized, out_shardings=places)(params)
        self._rope = processes.place(
            rope_tables(model, resolved.sequence_tokens), layout.replicated
        )
        self._hidden = learner.make_hidden(
            learner.ForwardPass(model, recipe, layout.parallel),
            resolved.config.learner.gradient_accumulation_steps,
        )

        def head(weights):
            table = output_head(weights, model, layout.parallel)
            assert isinstance(table, jax.Array)
            return table[:, : resolved.model.vocab_size]

        place = _place_of_head(layout, jax.eval_shape(head, shapes))
        self._head = exact_jit(head, out_shardings=place)(self._weights)

    def read(self, batch: Batch) -> Batch:
        """Returns a batch that is on the devices with what the loss reads of the model."""
        hidden = self._hidden(self._weights, dataclasses.replace(batch, routing={}), self._rope)
        return dataclasses.replace(batch, frozen_hidden=hidden, frozen_head=self._head)


def check_frozen_model(resolved: Resolved) -> None:
    """Raises UserError if the frozen model's shapes do not suit its recipe or the sequences, or if
    policy and frozen model do not give their tokens the same numbers."""
    model = resolved.frozen_model
    if model is None:
        return
    where = resolved.config.algo.teacher
    recipe = resolved.frozen_recipe
    if recipe.activation is not None and recipe.activation.policy.stateful:
        raise UserError(
            f"algo.teacher: recipe {recipe.name!r} scales activations by what it observed in "
            "training, and a teacher has observed nothing: set precision.reference='fp8' or 'bf16'"
        )
    try:
        recipe.layer_segments(model.num_hidden_layers)
    except UserError as error:
        raise UserError(f"algo.teacher: {where}: {error}") from None
    positions = (pretrained_config(where) or {}).get("max_position_embeddings")
    if isinstance(positions, int) and positions < resolved.sequence_tokens:
        raise UserError(
            f"algo.teacher: {where} has {positions} positions, and sequences have up to "
            f"{resolved.sequence_tokens} tokens: lower rollout.max_prompt_tokens or max_new_tokens"
        )
    if model.vocab_size < resolved.model.vocab_size:
        raise UserError(
            f"algo.teacher: {where} has a vocabulary of {model.vocab_size} tokens, the policy of "
            f"{resolved.model.vocab_size}: take a teacher with the policy's tokenizer"
        )
    own = pathlib.Path(
        tokenizer_path(resolved.config.data.tokenizer, resolved.config.model.checkpoint)
    )
    one = _numbers(own if own.is_file() else own / _FILE)
    other = _numbers(pathlib.Path(where) / _FILE)
    if one != other:
        differ = f"has no {_FILE}" if other is None else f"numbers its tokens unlike {own}"
        raise UserError(
            f"algo.teacher: {where} {differ}: take a teacher with the policy's tokenizer "
            f"(data.tokenizer is {resolved.config.data.tokenizer!r})"
        )


def _numbers(file: pathlib.Path) -> Any:
    """Returns the tokens of a tokenizer.json with their numbers; None if there is no such file."""
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
