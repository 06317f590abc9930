"""The static sampler on two CPU cores: two threads run one program, each on half of the prompts.

A decode step is many operations of a tenth of a millisecond, too small for XLA:CPU to split over
cores. Two executions of a program on one device run in parallel if two threads call them; if one
thread calls both, they run one after the other. A row's bits depend on its own sequence alone, so
two halves give the bits of one program (tests/rollout/test_halves.py). A half also stops as soon as
its responses have ended.

Programs are compiled in the caller's thread: some of JAX's settings are thread-local.

Not done: more than two parts; halves of a mesh of several devices, which uses all cores already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.kernels.machine import available_cores
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.rollout.sampler import Loop, Requests, Rollout, SamplerConfig, make_sampler

_LEAST_ROWS = 8  # rows of a half; fewer rows take about as long as twice as many


def parts_of(prompts: int, group_size: int, cores: int) -> int:
    """Returns the number of programs that sample the prompts on a CPU: 1 or 2."""
    halves = cores >= 2 and prompts % 2 == 0 and prompts // 2 * group_size >= _LEAST_ROWS
    return 2 if halves else 1


class HalvedSampler:
    """The sampler of `make_sampler` for one device: same arguments, same bits.

    It runs two halves on a CPU if `parts_of` returns 2, else one program for all prompts. An error
    in a thread is raised in the caller's thread.
    """

    def __init__(self, model: ModelConfig, recipe: Recipe | str, sampler: SamplerConfig):
        """
        Raises:
          ValueError: `sampler` asks for taps, which are not supported.
        """
        if sampler.taps:
            raise ValueError("a sampler in halves records no taps")
        loop = Loop(model, get_recipe(recipe), sampler)
        self._cores = available_cores() if loop.on_cpu else 1
        self._group = sampler.group_size
        self._prepare = loop.prepare_once()
        self._program = make_sampler(model, recipe, sampler)
        self._compiled: dict[tuple, Callable[..., Rollout]] = {}

    def __call__(self, weights, prompts, requests: Requests) -> Rollout:
        """Samples responses; takes the arguments of `make_sampler`'s result."""
        parts = parts_of(len(prompts), self._group, self._cores)
        if parts == 1:
            return self._program(weights, prompts, requests)
        prepared = self._prepare(weights)

        def part(index: int) -> tuple:
            def cut(x):
                each = len(x) // parts
                return np.asarray(x)[index * each : (index + 1) * each]

            return prepared, cut(prompts), _cut(requests, cut)

        arguments = [part(index) for index in range(parts)]
        program = self._compile(arguments[0])
        with ThreadPoolExecutor(parts) as pool:
            found = list(pool.map(lambda given: jax.device_get(program(*given)), arguments))
        return jax.tree.map(lambda *xs: jnp.asarray(np.concatenate(xs)), *found)

    def trace(self, weights, prompts, requests: Requests) -> jax.stages.Traced:
        """Traces the program for the arguments of a call, or for their shapes."""
        parts = parts_of(prompts.shape[0], self._group, self._cores)

        def cut(x) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype)

        return self._program.trace(  # type: ignore[attr-defined]
            weights, cut(prompts), _cut(requests, cut)
        )

    def _compile(self, arguments: tuple) -> Callable[..., Rollout]:
        """Returns the compiled program for arguments of these shapes and dtypes."""
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tree, *((np.shape(x), x.dtype) for x in leaves)
        if shapes not in self._compiled:
            self._compiled[shapes] = self._program.lower(*arguments).compile()  # type: ignore[attr-defined]
        return self._compiled[shapes]


def _cut(requests: Requests, cut: Callable) -> Requests:
    """Returns the requests with `cut` of every array that has a row for each prompt or sample."""
    return dataclasses.replace(
        requests,
        lengths=cut(requests.lengths),
        sample_ids=cut(requests.sample_ids),
        temperature=cut(requests.temperature),
        limits=cut(requests.limits),
    )
