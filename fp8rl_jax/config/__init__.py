"""A run's configuration: its fields, how it is read, and the checks before anything compiles."""

from fp8rl_jax.config.fields import FIELDS, all_fields, describe_fields
from fp8rl_jax.config.load import (
    default_config,
    flatten,
    literal,
    load_config,
    override,
    saved_config,
    sections_config,
    set_options,
)
