"""The jitted sampler and the refit that feeds it. Never imports the learner."""

from fp8rl_jax.rollout.continuous import Batching, ContinuousSampler, Progress, Watch
from fp8rl_jax.rollout.halves import HalvedSampler
from fp8rl_jax.rollout.refit import is_fresh, make_calibrate, make_refit
from fp8rl_jax.rollout.sampler import (
    Loop,
    Requests,
    Rollout,
    SamplerConfig,
    Stream,
    make_sampler,
    make_stream,
)
