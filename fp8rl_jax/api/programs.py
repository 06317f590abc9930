"""Caches the compiled programs of a policy, one for each size of their arrays."""

from __future__ import annotations

from collections.abc import Callable

from fp8rl_jax.training.runtime import Runtime


class Programs:
    """A cache of a configuration's compiled programs, by the sizes of their arrays."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._sized: dict[tuple[int, int], Runtime] = {}
        self._made: dict[tuple, Callable] = {}

    def sized(self, prompt_slots: int, response_slots: int) -> Runtime:
        """Returns the Runtime with these numbers of prompt and response slots."""
        key = prompt_slots, response_slots
        if key not in self._sized:
            self._sized[key] = self.runtime.with_slots(
                max_prompt_tokens=prompt_slots, max_new_tokens=response_slots
            )
        return self._sized[key]

    def sampler(self, runtime: Runtime, group_size: int) -> Callable:
        """Returns the sampler for a Runtime of `sized`."""
        rollout = runtime.config.rollout
        key = "sample", rollout.max_prompt_tokens, rollout.max_new_tokens, group_size
        if key not in self._made:
            self._made[key] = runtime.engine.make_sampler(
                group_size,
                rollout.top_k,
                rollout.top_p,
                runtime.engine.replayed_taps,
                records_kept=True,  # any policy may score the samples
            )
        return self._made[key]

    def update(self, runtime: Runtime) -> Callable:
        """Returns the train step for a Runtime of `sized`; it leaves the old state usable."""
        rollout = runtime.config.rollout
        key = "update", rollout.max_prompt_tokens, rollout.max_new_tokens
        if key not in self._made:
            engine = runtime.engine
            self._made[key] = engine.train_step(
                engine.rl_optimizer,
                engine.loss,
                runtime.config.learner.gradient_accumulation_steps,
                donate=False,
            )
        return self._made[key]
