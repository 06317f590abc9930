"""Section `lora` of a configuration: the parameters that a run trains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from fp8rl_jax.models import ModelConfig, param_shapes
from fp8rl_jax.models.lora import Adapted, adapted

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
_FOLDED = 3  # into the run's seed


def adapted_shapes(config: ml_collections.ConfigDict, model: ModelConfig) -> Any:
    """Returns the shapes of what a run trains on, see `with_adapters`; runs nothing."""
    shapes = param_shapes(model)
    if not config.lora.rank:
        return shapes
    return jax.eval_shape(lambda params: with_adapters(config, params), shapes)


def with_adapters(config: ml_collections.ConfigDict, params: Any) -> Any:
    """Returns parameters as a run trains them: with new adapters, if section `lora` asks for some
    and they have none.

    Raises:
      UserError: `lora.modules` or `lora.rank` does not fit the model.
    """
    lora = config.lora
    if not lora.rank or isinstance(params, Adapted):
        return params
    key = jax.random.fold_in(jax.random.key(config.run.seed, impl="threefry2x32"), _FOLDED)
    modules = [pattern.strip() for pattern in lora.modules.split(",")]
    return adapted(params, lora.rank, lora.alpha, modules, _DTYPES[lora.base], key)
