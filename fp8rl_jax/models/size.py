"""How many parameters a model has."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.params import init_params


class ParameterCounts(NamedTuple):
    """Attributes:
    total: all parameters.
    active: those that one token uses: of routed experts, its own.
    tables: embedding and output head; once if they are tied.
    """

    total: int
    active: int
    tables: int


def parameter_counts(config: ModelConfig, shapes=None) -> ParameterCounts:
    """Counts of a model's parameters; allocates nothing.

    Args:
      config: of the model.
      shapes: of its parameters (`init_params`), where they are known already.
    """
    if shapes is None:
        shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    total = idle = tables = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        names, count = [entry.key for entry in path], math.prod(leaf.shape)
        total += count
        if "experts" in names:
            idle += count // config.num_experts * (config.num_experts - config.num_experts_per_tok)
        if names[0] in ("embed_tokens", "lm_head"):
            tables += count
    return ParameterCounts(total, total - idle, tables)
