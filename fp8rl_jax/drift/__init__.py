"""Finds whether and why rollout and learner compute different log-probabilities (drift)::

    before a run   self_check    compares both on a small copy (cut) of the model, and checks every
                                 product of the run's programs (own_products)
    `fp8rl drift`  command       analyses new samples of a checkpoint; a step of a run is run again
                                 (fp8rl_jax.replay) and analysed likewise
                      |
                      v
      programs -> attribute -> explain -> render
      both sides,  first value  culprit    drift.json,
      with taps    that differs, and       drift.html,
      and swaps    by operation  advice    terminal

Read `attribute` first; `operations` names the values that it compares. Not done: intermediate
values where mesh.tensor is above 1.
"""

from fp8rl_jax.drift.attribute import Ran, analyse, compare_sides
from fp8rl_jax.drift.programs import Programs, affordable
from fp8rl_jax.drift.self_check import SelfCheck, kept_self_check, note_drift, self_check
