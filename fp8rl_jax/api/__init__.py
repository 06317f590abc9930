"""The library's Python interface; `fp8rl_jax` exports these names without importing JAX::

    fields       keyword arguments -> fields of a configuration
      |
      +-- job    grpo(model, questions, reward), run(config): the main job -> Job
      |            kept_reward writes a notebook's function as a module for worker processes
      |
      +-- policy load -> Policy -> sample -> Samples -> score, compare, train_step -> Policy
                   programs caches compiled programs by the sizes of their arrays

Read `policy` and `job` first. Nothing is computed here: the calls run the programs of `fp8rl
train`. All are provisional: arguments may change when policies get multi-turn conversations, which
are not done yet.
"""

from fp8rl_jax.api.job import Job, grpo, run
from fp8rl_jax.api.policy import Drift, Policy, Samples, compare, load, sample, score, train_step
