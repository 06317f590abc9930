"""Configurations that tests of the plan count, with models and recipes of their own."""

from __future__ import annotations

import dataclasses

from fp8rl_jax import sharding
from fp8rl_jax.config import default_config
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.config.resolved import Resolved


def mesh_of(**axes: int):
    """A mesh of devices that are not there; axes that are left out are 1."""
    return sharding.abstract_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | axes)


def resolved_as(model, recipe, **sections) -> Resolved:
    """The default configuration with another model and one recipe, and changes of its sections."""
    config = default_config()
    for section, fields in sections.items():
        config[section].update(fields)
    resolved = resolve_config(config)
    return dataclasses.replace(resolved, model=model, rollout_recipe=recipe, learner_recipe=recipe)
