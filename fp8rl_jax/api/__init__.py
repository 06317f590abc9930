"""The library from Python in a few calls, which `fp8rl_jax` offers by name without importing JAX.

    policy = fp8rl_jax.load(...)              policy       a policy as a value, and its programs
    samples = fp8rl_jax.sample(policy, ...)
    fp8rl_jax.score, train_step, compare
    fp8rl_jax.grpo(model, questions, reward)  job          the main job on your own questions
    fp8rl_jax.run(config, reward=...)         kept_reward  a function of a notebook as a module
                                              fields       fields of a config by their last name

All of them are provisional: until policies take part in conversations of several turns, their
arguments may change. Nothing is computed here: they call what `fp8rl train` calls.
"""

from fp8rl_jax.api.job import Job, grpo, run
from fp8rl_jax.api.policy import Drift, Policy, Samples, compare, load, sample, score, train_step
