"""The jitted samplers and the refit that makes their weights. Never imports the learner.

::

    learner's parameters --> refit.py --> weights in FP8, and their checksum
                                              |
    prompts, keys, limits --> a sampler: prefill, then a loop of decode steps --> Rollout
                              draw: sampling.py; log-probability: models/logprobs.py

    sampler.py      one row for each sample until all have ended (read first); `Stream` for chats
    halves.py       the same on a CPU: each half of the batch in its own thread
    continuous.py   a fixed number of slots; a slot is refilled when its response ends, or pauses
    continuous_loop.py   its program: functions to trace
    schedule.py     which request has which slot and pages (page_pool.py), for that loop
    cases.py        recipes of `fp8rl plan` and `fp8rl bench`: which parts of a rollout are in FP8

plan/rollout.py computes how many slots and pages fit into a device.

All samplers draw the same tokens with the same log-probabilities, bit for bit.

Not done: speculative decoding, new requests during a rollout.
"""

from fp8rl_jax.rollout.continuous import Answer, ContinuousSampler, Progress, Watch
from fp8rl_jax.rollout.continuous_loop import Batching, Earlier, Extension, Replies
from fp8rl_jax.rollout.halves import HalvedSampler
from fp8rl_jax.rollout.refit import changed_bytes, make_calibrate, make_refit, sampled_bytes
from fp8rl_jax.rollout.sampler import (
    Loop,
    Requests,
    Rollout,
    SamplerConfig,
    Stream,
    make_sampler,
    make_stream,
)
