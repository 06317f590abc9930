"""Section `lora` of a configuration: the parameters that a run trains.

What else of a run depends on adapters asks here, or its parameters (models/masters.py).
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import ml_collections

from fp8rl_jax.base import processes
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, param_shapes
from fp8rl_jax.models.hf import peft
from fp8rl_jax.models.masters import Adapted, adapted, is_adapted, trained, with_trained

_FOLDED = 3  # into the run's seed


def trains_adapters(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a run trains adapters on a frozen base."""
    return config.lora.rank > 0


def adapted_shapes(config: ml_collections.ConfigDict, model: ModelConfig) -> Any:
    """Returns the shapes of what a run trains on, see `with_adapters`; runs nothing."""
    shapes = param_shapes(model)
    if not trains_adapters(config):
        return shapes
    return jax.eval_shape(lambda params: _adapted(config, params), shapes)


def with_adapters(config: ml_collections.ConfigDict, params: Any) -> Any:
    """Returns parameters as a run trains them: with new adapters, if section `lora` asks for some
    and they have none.

    Raises:
      UserError: `lora.modules` or `lora.rank` does not fit the model.
    """
    if not trains_adapters(config) or is_adapted(params):
        return params
    make = functools.partial(_adapted, config)
    return (exact_jit(make) if config.lora.base == "fp8" else make)(params)  # fp8: it quantises


def _adapted(config: ml_collections.ConfigDict, params: Any) -> Adapted:
    lora = config.lora
    key = jax.random.fold_in(jax.random.key(config.run.seed, impl="threefry2x32"), _FOLDED)
    modules = [pattern.strip() for pattern in lora.modules.split(",")]
    return adapted(params, lora.rank, lora.alpha, modules, lora.base, key)


def check_adapters(config: ml_collections.ConfigDict, model: ModelConfig) -> None:
    """Checks the files of `lora.checkpoint`.

    Raises:
      UserError: they do not fit the model and section `lora`.
    """
    lora = config.lora
    if lora.checkpoint:
        adapters = trained(adapted_shapes(config, model))
        peft.check_adapter(lora.checkpoint, model, adapters, lora.rank, lora.alpha)


def begun(config: ml_collections.ConfigDict, model: ModelConfig, params: Any) -> Any:
    """Returns `with_adapters`, whose new adapters are those of `lora.checkpoint` if it is set.

    Raises:
      UserError: as `check_adapters`.
    """
    new = with_adapters(config, params)
    if not config.lora.checkpoint or new is params:
        return new
    check_adapters(config, model)
    adapters = processes.fetch(trained(new))
    return with_trained(new, peft.load_adapter(config.lora.checkpoint, model, adapters))


def adapter_files(config: ml_collections.ConfigDict) -> list[pathlib.Path]:
    """Returns the files of `lora.checkpoint`, if it is set."""
    names = (peft.CONFIG, peft.WEIGHTS) if config.lora.checkpoint else ()
    return [pathlib.Path(config.lora.checkpoint) / name for name in names]
