"""The jitted sampler and the refit that feeds it. Never imports the learner."""

from fp8rl_jax.rollout.calibrate import is_fresh, make_calibrate, require_fresh
from fp8rl_jax.rollout.refit import make_refit
from fp8rl_jax.rollout.sampler import Rollout, SamplerConfig, make_sampler

__all__ = [
    "Rollout",
    "SamplerConfig",
    "is_fresh",
    "make_calibrate",
    "make_refit",
    "make_sampler",
    "require_fresh",
]
