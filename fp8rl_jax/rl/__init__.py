"""Array maths of reinforcement learning. Imports no other package of the library."""

from fp8rl_jax.rl.advantages import group_advantages, zero_std_fraction
from fp8rl_jax.rl.corrections import tis_weights
from fp8rl_jax.rl.kl import k3
from fp8rl_jax.rl.losses import clipped_policy_loss
from fp8rl_jax.rl.mismatch import mismatch_metrics

__all__ = [
    "clipped_policy_loss",
    "group_advantages",
    "k3",
    "mismatch_metrics",
    "tis_weights",
    "zero_std_fraction",
]
