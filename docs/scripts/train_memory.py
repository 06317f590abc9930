"""Prints the temporary memory of a train step: `python docs/scripts/train_memory.py fp8 bf16`.

A name is a recipe's, or with a backward pass `fp8:dequantized`. Compiles the train step of an
eight-layer model for this machine and runs nothing.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax import learner, models
from fp8rl_jax.batch import Batch
from fp8rl_jax.quant import get_recipe

MODEL = models.ModelConfig(259, 256, 768, 8, 4, 2, 64)
ROWS, LENGTH, RESPONSE = 16, 256, 64


def temporary_bytes(name: str) -> int:
    """XLA's temporary memory of one train step: activations, gradients, workspace."""
    name, _, backward = name.partition(":")
    recipe = get_recipe(name)
    if backward:
        recipe = dataclasses.replace(recipe, name=name, backward=backward)
    shape = jax.ShapeDtypeStruct
    rope = tuple(shape((LENGTH, MODEL.head_dim // 2), jnp.float32) for _ in range(2))
    response = shape((ROWS, RESPONSE), jnp.float32)
    batch = Batch(
        tokens=shape((ROWS, LENGTH), jnp.int32),
        prompt_lengths=shape((ROWS,), jnp.int32),
        targets=shape((ROWS, RESPONSE), jnp.int32),
        mask=response,
        temperature=shape((ROWS,), jnp.float32),
        advantages=response,
        weights=response,
        old_logprobs=response,
        rollout_weights=response,
        ref_logprobs=response,
        lengths=shape((ROWS,), jnp.int32),
    )
    optimizer = optax.sgd(1e-3)

    def start():
        params = models.init_params(MODEL, jax.random.key(0, impl="threefry2x32"))
        return learner.new_state(params, optimizer, jnp.zeros(2, jnp.uint32), recipe)

    gradients = learner.GradientProgram(learner.ForwardPass(MODEL, get_recipe(recipe)))
    step = learner.make_train_step(gradients, optimizer)
    compiled = step.lower(jax.eval_shape(start), batch, rope).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    sizes = {name: temporary_bytes(name) for name in sys.argv[1:]}
    first = next(iter(sizes.values()))
    for name, size in sizes.items():
        print(f"{name:>20} {size / 1e6:7.0f} MB   {np.divide(size, first):.2f} of the first")


if __name__ == "__main__":
    main()
