"""Finds whether and why rollout and learner compute different log-probabilities (drift)::

    before a run   self_check    compares both on a small copy (cut) of the model, and checks every
                                 product of the run's programs (own_products)
    in a run       monitor       on drift: writes the step (kept_step), analyses it within a budget
    `fp8rl drift`  command       analyses a kept step, or new samples of a checkpoint
                      |
                      v
      programs -> attribute -> explain -> render
      both sides,  first value  culprit    drift.json,
      with taps    that differs, and       drift.html,
      and swaps    by operation  advice    terminal

Read `attribute` first; `operations` names the values that it compares. Not done: analysing a run of
several processes (nothing is kept), and intermediate values where mesh.tensor is above 1.
"""

from fp8rl_jax.drift.attribute import analyse
from fp8rl_jax.drift.monitor import DriftMonitor
from fp8rl_jax.drift.programs import Programs, affordable
from fp8rl_jax.drift.self_check import SelfCheck, kept_self_check, self_check
