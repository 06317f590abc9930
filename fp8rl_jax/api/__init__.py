"""The library from Python in a few calls, which `fp8rl_jax` offers by name without importing JAX.

* `policy`: `load`, `sample`, `score`, `train_step`, `compare` of a policy as a value; `programs`
  has what they compile.
* `job`: `grpo(model, questions, reward)` and `run(config)`, the main job.
* `kept_reward`: a function of a notebook as a module that worker processes import.
* `fields`: fields of a configuration by their last name.

All of them are provisional: until policies take part in conversations of several turns, their
arguments may change. Nothing is computed here: they call what `fp8rl train` calls.
"""

from fp8rl_jax.api.job import Job, grpo, run
from fp8rl_jax.api.policy import Drift, Policy, Samples, compare, load, sample, score, train_step
