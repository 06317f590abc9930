"""Checkpoints in Hugging Face's format: `load`, `save` and `convert` (docs/checkpoints.md)."""

from fp8rl_jax.models.hf.convert import convert
from fp8rl_jax.models.hf.loader import load
from fp8rl_jax.models.hf.loader import read_model_config as read_config
from fp8rl_jax.models.hf.writer import save
