"""Array maths of reinforcement learning. Imports no other package of the library."""

from fp8rl_jax.rl.losses import (
    clipped_policy_loss,
    group_advantages,
    k3,
    tis_weights,
    zero_std_fraction,
)
from fp8rl_jax.rl.mismatch import mismatch_metrics
