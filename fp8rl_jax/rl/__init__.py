"""The arithmetic of reinforcement learning, as small pure functions.

::

    rewards (P, G) -> shaping -> advantages: baseline, scale --+
    log-probs of learner and rollout -> corrections: weights --+-> prepare (host, float64)
    mask of the tokens that count -> aggregation: weights -----+          |
                                                                          v
    log-probs now, before, reference -> losses, kl (device, differentiable) -> loss of a batch
    log-probs of train step and rollout -> mismatch: drift metrics

Read first: algorithm.py, which composes the functions that section `algo` names. Each module ends
with the table of its names; presets.py names published combinations.

Not done: value functions, generalised advantage estimation, rewards for single tokens.
"""

from fp8rl_jax.rl.algorithm import (
    Algorithm,
    Outcomes,
    Prepared,
    algorithm_of,
    prepare,
    reply_numbers,
)
from fp8rl_jax.rl.mismatch import mismatch_metrics
from fp8rl_jax.rl.presets import PRESETS
from fp8rl_jax.rl.shaping import informative_groups
