"""`fp8rl drift`: where rollout and learner differ, if they do. See attribute.py."""

from fp8rl_jax.drift.attribute import analyse
from fp8rl_jax.drift.programs import Programs

__all__ = ["Programs", "analyse"]
