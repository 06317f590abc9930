"""Array maths of reinforcement learning."""

from fp8rl_jax.rl.algorithm import Algorithm, Prepared, algorithm_of, prepare
from fp8rl_jax.rl.mismatch import mismatch_metrics
from fp8rl_jax.rl.presets import PRESETS
from fp8rl_jax.rl.shaping import informative_groups
