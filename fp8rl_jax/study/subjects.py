"""The model of a study that --config or --checkpoint names."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import jax
import ml_collections

from fp8rl_jax.policy.load import load_trained
from fp8rl_jax.policy.source import is_released
from fp8rl_jax.study.layers import Subject
from fp8rl_jax.training.runtime import make_runtime


def of_config(config: ml_collections.ConfigDict) -> Subject:
    """The model of a configuration at the start of a run: random weights, or `model.checkpoint`'s.

    Raises:
      UserError: of `make_runtime`.
    """
    runtime = make_runtime(config, with_questions=False)
    with jax.set_mesh(runtime.mesh):
        params = jax.device_get(runtime.initial_params())
    name = pathlib.Path(config.model.checkpoint).name or "random weights"
    return Subject(name, runtime.model, params, runtime.tokenizer)


def of_directory(config: ml_collections.ConfigDict, note: Callable[[str], None]) -> Subject:
    """The model in `run.dir`: a released one, or the newest checkpoint of a run.

    Raises:
      UserError: of `make_runtime` and `load_trained`.
    """
    if is_released(config):
        return of_config(config)
    runtime, directory = make_runtime(config, with_questions=False), pathlib.Path(config.run.dir)
    with jax.set_mesh(runtime.mesh):
        state, _ = load_trained(runtime, directory, note)
        params = jax.device_get(state.params)
    return Subject(directory.name, runtime.model, params, runtime.tokenizer)
