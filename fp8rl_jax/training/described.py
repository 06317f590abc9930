"""A configuration's train step and decode step, lowered for devices that need not be there.

The programs are those of a run (`Runtime`), from shapes alone: no parameter is made, and nothing
can be run. `deviceless.h200_mesh` describes devices that JAX's CUDA plugin compiles for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8rl_jax import learner, sharding
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data import ByteTokenizer
from fp8rl_jax.models import rope_tables
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Loop, Requests, SamplerConfig
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import Runtime


def on_gpu(recipe: Recipe) -> Recipe:
    """The recipe with the kernels that a GPU takes."""
    of_cpu = recipe.kernels in ("auto", "exact")
    return dataclasses.replace(recipe, kernels="triton") if of_cpu else recipe


def described_runtime(resolved: Resolved, mesh: Mesh, layers: int | None = None) -> Runtime:
    """What a run on `mesh` compiles its programs from, with a tokenizer that is never asked.

    Args:
      resolved: with its vocabulary.
      mesh: of devices that need not be there.
      layers: of the model; its own number if left out.
    """
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
    return Runtime(**vars(changed), mesh=mesh, tokenizer=ByteTokenizer(), chat=None, questions={})


def _rope(runtime: Runtime) -> Any:
    """Shapes of the tables of rotary frequencies, of prompts and responses at their longest."""
    rollout = runtime.config.rollout
    positions = rollout.max_prompt_tokens + rollout.max_new_tokens
    tables = jax.eval_shape(lambda: tuple(map(jnp.asarray, rope_tables(runtime.model, positions))))
    return sharding.laid_out(tables, sharding.replicated(runtime.mesh))


def request_shapes(runtime: Runtime, prompts: int, samples: int) -> Requests:
    """Shapes of a rollout's requests: so many samples of so many prompts, of any length."""

    def requests(rope):
        ids, ones = jnp.zeros(samples, jnp.int32), jnp.ones(samples, jnp.int32)
        lengths = jnp.ones(prompts, jnp.int32)
        return Requests(
            lengths, jax.random.key(0, impl="threefry2x32"), ids, jnp.ones(samples), ones, rope
        )

    return jax.eval_shape(requests, _rope(runtime))


def _batch(runtime: Runtime, rows: int) -> learner.Batch:
    """Shapes of so many rows, laid out over the mesh."""
    rollout = runtime.config.rollout
    new = rollout.max_new_tokens
    tokens = rollout.max_prompt_tokens + new
    field = {
        "tokens": ((rows, tokens), jnp.int32),
        "targets": ((rows, new), jnp.int32),
        "prompt_lengths": ((rows,), jnp.int32),
        "temperature": ((rows,), jnp.float32),
    }
    arrays = {
        f.name: jax.ShapeDtypeStruct(*field.get(f.name, ((rows, new), jnp.float32)))
        for f in dataclasses.fields(learner.Batch)
        if f.name != "routing"
    }
    return sharding.laid_out(learner.Batch(**arrays), sharding.batch_sharding(runtime.mesh))


def _train_step(runtime: Runtime) -> tuple[Any, tuple]:
    """The train step of RL on one minibatch, and shapes of its arguments."""
    config = runtime.config
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    optimizer, _ = optimizer_of_phase(config, "rl")
    state = runtime.layout.state_shapes(optimizer)
    step = runtime.engine.compiled_update
    return step, (state, _batch(runtime, rows // config.algo.num_minibatches), _rope(runtime))


def lower_train_step(runtime: Runtime) -> jax.stages.Lowered:
    """The train step of RL on one minibatch: gradients and the optimiser's update."""
    step, arguments = _train_step(runtime)
    return step.lower(*arguments)


def traced_programs(runtime: Runtime) -> dict[str, jax.stages.Traced]:
    """The programs of an RL step, traced and not compiled: 'rollout', 'train step' and 'score'.

    Nothing that the learner replays of a rollout's routing is in them.
    """
    rollout = runtime.config.rollout
    rows = rollout.prompts_per_step * rollout.group_size
    step, arguments = _train_step(runtime)
    state, _, rope = arguments
    wanted = request_shapes(runtime, rollout.prompts_per_step, rows)
    prompts = jax.ShapeDtypeStruct((rollout.prompts_per_step, rollout.max_prompt_tokens), jnp.int32)
    return {
        "rollout": runtime.engine.sampler.trace(
            runtime.layout.weight_shapes,
            prompts,
            wanted.lengths,
            wanted.key,
            wanted.sample_ids,
            wanted.temperature,
            wanted.limits,
            wanted.rope,
        ),
        "train step": step.trace(*arguments),
        "score": runtime.engine.compiled_score.trace(
            state.params, state.scaling_state, state.kv_scales, _batch(runtime, rows), rope
        ),
    }


def lower_decode_step(runtime: Runtime) -> jax.stages.Lowered:
    """One token of every sequence that decodes at a time, with caches of their whole length."""
    config, mesh = runtime.config, runtime.mesh
    rollout = config.rollout
    rows = rollout.slots or rollout.prompts_per_step * rollout.group_size
    settings = SamplerConfig(rollout.max_new_tokens, 1, (0,), 0)
    loop = Loop(runtime.model, runtime.rollout_recipe, settings, runtime.layout.parallel)
    weights, wanted = runtime.layout.weight_shapes, request_shapes(runtime, rows, rows)
    prompts = jax.ShapeDtypeStruct((rows, rollout.max_prompt_tokens), jnp.int32)
    state = jax.eval_shape(loop.prefill, jax.eval_shape(loop.prepare, weights), prompts, wanted)
    by_row = PartitionSpec(sharding.BATCH_AXES)

    def place(path, leaf):
        if "cache" in jax.tree_util.keystr(path):
            return NamedSharding(mesh, PartitionSpec(None, sharding.BATCH_AXES))
        fits = leaf.shape[:1] == (rows,)
        return NamedSharding(mesh, by_row if fits else PartitionSpec())

    state = sharding.laid_out(state, jax.tree_util.tree_map_with_path(place, state))
    wanted = sharding.laid_out(wanted, jax.tree_util.tree_map_with_path(place, wanted))

    def step(weights, wanted, state):
        return loop.decode_step(loop.prepare(weights), wanted, state)

    lowered = jax.jit(step, donate_argnums=2)
    return lowered.lower(sharding.laid_out(weights, runtime.layout.weight_shardings), wanted, state)
