"""Compiles a configuration's programs for devices that need not exist.

The programs are those of a run (`Runtime`), from shapes alone: no parameter is made, and nothing
is run. `h200.h200_mesh` describes devices that JAX's CUDA plugin compiles for. A decoder is a loop
over its layers, so a large model is compiled with few layers and extrapolated: memory is linear in
the number of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fp8rl_jax import sharding
from fp8rl_jax.batch import make_batch
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data import ByteTokenizer
from fp8rl_jax.learner import step_arguments
from fp8rl_jax.models import rope_tables
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.plan import h200
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Loop, Requests, SamplerConfig
from fp8rl_jax.training.frozen_model import with_frozen_shapes
from fp8rl_jax.training.offload import OffloadedStep
from fp8rl_jax.training.runtime import Runtime

LARGE = 40e9  # parameters of a model above which few layers are compiled
_FEW = (2, 4)  # numbers of layers to compile besides those with other rules


def described_runtime(resolved: Resolved, mesh: Mesh, layers: int | None = None) -> Runtime:
    """Returns the `Runtime` of a run on the GPUs of `mesh`, with a tokenizer that is not used.

    Args:
      resolved: configuration with its vocabulary.
      mesh: devices that need not exist.
      layers: number of layers of the model; None for the configured number.
    """

    def on_gpu(recipe: Recipe) -> Recipe:
        of_cpu = recipe.kernels in ("auto", "exact")
        return dataclasses.replace(recipe, kernels="gpu") if of_cpu else recipe

    model = resolved.model
    if layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=layers)
    changed = dataclasses.replace(
        resolved,
        model=model,
        rollout_recipe=on_gpu(resolved.rollout_recipe),
        learner_recipe=on_gpu(resolved.learner_recipe),
        reference_recipe=on_gpu(resolved.reference_recipe),
    )
    return Runtime(changed, mesh, tokenizer=ByteTokenizer(), chat=None, questions={})


def _rope(runtime: Runtime) -> Any:
    """Returns the shapes of the rotary tables for the longest prompt and response."""
    model = runtime.resolved.model
    slots = runtime.resolved.sequence_tokens
    tables = jax.eval_shape(lambda: tuple(map(jnp.asarray, rope_tables(model, slots))))
    return sharding.laid_out(tables, runtime.layout.replicated)


def request_shapes(runtime: Runtime, prompts: int, samples: int) -> Requests:
    """Returns the shapes of a rollout's requests: `samples` samples of `prompts` prompts."""

    def requests(rope):
        return Requests(
            jnp.ones(prompts, jnp.int32),
            jax.random.key(0, impl="threefry2x32"),
            jnp.zeros(samples, jnp.int32),
            jnp.ones(samples),
            jnp.ones(samples, jnp.int32),
            rope,
        )

    return jax.eval_shape(requests, _rope(runtime))


def _train_arguments(runtime: Runtime, rows: int) -> tuple:
    """Returns the shapes of an RL train state, a batch of `rows` rows, and the rotary tables."""
    state = runtime.layout.state_shapes(runtime.engine.rl_optimizer)
    ones = np.ones(rows, np.int32)
    targets = np.zeros((rows, runtime.config.rollout.max_new_tokens), np.int32)
    tokens = np.zeros((rows, runtime.resolved.sequence_tokens), np.int32)
    batch = make_batch(
        tokens,
        ones,
        targets,
        targets == 0,
        ones.astype(np.float32),
        truncation=runtime.resolved.truncation,
    )
    batch, _ = runtime.engine.packed(batch)
    if runtime.resolved.recorded_numbers:
        shape = (*batch.targets.shape, runtime.resolved.recorded_numbers)
        batch = dataclasses.replace(batch, kept=jax.ShapeDtypeStruct(shape, jnp.int32))
    batch = sharding.laid_out(batch, runtime.layout.rows)
    return state, with_frozen_shapes(batch, runtime.resolved, runtime.layout), _rope(runtime)


def trace_train_step(runtime: Runtime) -> jax.stages.Traced:
    """Traces the train step of RL on one minibatch: gradients and the optimiser's update, with
    offloaded moments the gradients alone."""
    state, batch, rope = _train_arguments(runtime, runtime.resolved.minibatch_samples)
    step = runtime.engine.compiled_update
    if isinstance(step, OffloadedStep):
        return step.gradients.trace(dataclasses.replace(state, opt_state=None), batch, rope)
    return step.trace(*step_arguments(state, batch, rope))


def traced_programs(runtime: Runtime) -> dict[str, jax.stages.Traced]:
    """Traces the programs of an RL step: 'rollout', 'train step' and 'score'; compiles nothing.

    The learner's programs have no inputs for replayed routing.
    """
    rollout = runtime.config.rollout
    state, batch, rope = _train_arguments(runtime, runtime.resolved.step_samples)
    sampling = runtime.sampling
    requests = request_shapes(sampling, rollout.prompts_per_step, runtime.resolved.step_samples)
    prompts = jax.ShapeDtypeStruct((rollout.prompts_per_step, rollout.max_prompt_tokens), jnp.int32)
    return {
        "rollout": sampling.engine.sampler.trace(sampling.layout.weight_shapes, prompts, requests),
        "train step": trace_train_step(runtime),
        "score": runtime.engine.compiled_score.trace(
            state.params,
            state.scaling_state,
            dataclasses.replace(batch, frozen_hidden=None, frozen_head=None),
            rope,
        ),
    }


def trace_decode_step(runtime: Runtime) -> jax.stages.Traced:
    """Traces a decode step: one token of every concurrent sequence, with full-length KV caches."""
    rollout = runtime.config.rollout
    rows = rollout.slots or runtime.resolved.step_samples
    settings = SamplerConfig(rollout.max_new_tokens, 1, (0,), 0)
    resolved = runtime.resolved
    loop = Loop(resolved.model, resolved.rollout_recipe, settings, runtime.layout.parallel)
    weights = runtime.layout.weight_shapes
    wanted = request_shapes(runtime, rows, rows)
    prompts = jax.ShapeDtypeStruct((rows, rollout.max_prompt_tokens), jnp.int32)
    state = jax.eval_shape(loop.prefill, jax.eval_shape(loop.prepare, weights), prompts, wanted)

    def place(path, leaf):
        if "cache" in jax.tree_util.keystr(path):
            return sharding.batch_sharding(runtime.mesh, axis=1)
        return runtime.layout.rows if leaf.shape[:1] == (rows,) else runtime.layout.replicated

    state, wanted = (
        sharding.laid_out(tree, jax.tree_util.tree_map_with_path(place, tree))
        for tree in (state, wanted)
    )

    def step(weights, wanted, state):
        return loop.decode_step(loop.prepare(weights), wanted, state)

    weights = sharding.laid_out(weights, runtime.layout.weight_shardings)
    return jax.jit(step, donate_argnums=2).trace(weights, wanted, state)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """XLA's memory plan and collectives of a program, on each device.

    Attributes:
      arguments, temporary: bytes; results that reuse no argument's memory count as temporary.
      collectives: {'all-gather u8': number of such operations in the program}.
      layers: numbers of layers that were compiled, if bytes are extrapolated from them; else ().
    """

    arguments: float
    temporary: float
    collectives: dict[str, int]
    layers: tuple[int, ...] = ()

    @property
    def needed(self) -> float:
        """Total bytes of arguments and temporary arrays."""
        return self.arguments + self.temporary


def _compile(traced: jax.stages.Traced) -> Compiled:
    program = traced.lower().compile()
    memory = program.memory_analysis()
    sent = h200.collectives(program.as_text())
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes + made, sent)


def compile_for_h200(trace: Callable[[Runtime], jax.stages.Traced], planned: Planned) -> Compiled:
    """Compiles a program of the planned config for H200s; extrapolates to a large model's layers.

    Args:
      trace: `trace_train_step` or `trace_decode_step`.
      planned: the configuration, with mesh and hosts.

    Raises:
      UserError: JAX's CUDA plugin is not installed.
    """
    resolved = planned.resolved
    model = resolved.model
    mesh = h200.h200_mesh(dict(planned.mesh.shape), planned.hosts)
    recipes = (resolved.learner_recipe, resolved.rollout_recipe)
    # Layers that differ from most (dense, or in bf16) are all compiled.
    first = max(model.dense_layers, *(recipe.first_layers for recipe in recipes))
    kept = first + max(recipe.last_layers for recipe in recipes)
    layers = tuple(kept + few for few in _FEW)
    if parameter_counts(model).total <= LARGE or layers[-1] >= model.num_hidden_layers:
        return _compile(trace(described_runtime(resolved, mesh)))
    few, more = (_compile(trace(described_runtime(resolved, mesh, count))) for count in layers)

    def extrapolated(name: str) -> float:
        slope = (getattr(more, name) - getattr(few, name)) / (layers[1] - layers[0])
        return getattr(more, name) + slope * (model.num_hidden_layers - layers[1])

    return Compiled(extrapolated("arguments"), extrapolated("temporary"), more.collectives, layers)
