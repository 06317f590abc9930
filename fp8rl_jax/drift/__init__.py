"""`fp8rl drift`: where rollout and learner differ, if they do. See attribute.py."""

from fp8rl_jax.drift.attribute import analyse
from fp8rl_jax.drift.monitor import DriftMonitor
from fp8rl_jax.drift.programs import Programs, affordable
from fp8rl_jax.drift.self_check import SelfCheck, kept_self_check, self_check
