"""Published models by name: their shapes, from the config.json that each was released with."""

from __future__ import annotations

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families import FAMILIES

PRESETS: dict[str, ModelConfig] = {
    name: config for family in FAMILIES for name, config in family.presets.items()
}


def preset(name: str) -> ModelConfig:
    """Returns the shapes of a published model.

    Raises:
      UserError: no such name.
    """
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}; write one of {', '.join(PRESETS)}")
    return PRESETS[name]
