"""Run by test_learner.py in a process of its own: gradients of the experts' balance loss alone.

    balance_steps.py FILE.npz [[devices, micro-batches, whether routing is replayed], ...]

writes the loss, counts and gradients of each case, and of the first one what its routers read and
found. No token counts for the policy's loss, so nothing else has a gradient.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.tree_util import tree_leaves_with_path as leaves_with_path
from random_model import initial_params
from small_models import NARROW

from fp8rl_jax import learner, models, sharding
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import Batch, make_batch
from fp8rl_jax.models.taps import ROUTING
from fp8rl_jax.quant import get_recipe

MODEL = dataclasses.replace(NARROW, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
COEFFICIENT = 0.5
_ROWS, _TOKENS, _RESPONSE = 8, 20, 6
TAPS = ("post_attention_layernorm/output", "router_logits", "router_experts")


def balance_batch(routing: dict) -> Batch:
    """Rows of 4 to 20 tokens, and words that one row has and another has not: the load of experts
    is another in every micro-batch."""
    rng = np.random.default_rng(1)
    tokens = (rng.integers(0, 8, (_ROWS, _TOKENS)) + 8 * np.arange(_ROWS)[:, None]).astype(np.int32)
    prompts = np.array([14, 2, 9, 5, 13, 3, 7, 11], np.int32)
    targets = np.ones((_ROWS, _RESPONSE), np.int32)
    mask = np.arange(_RESPONSE) < np.array([6, 2, 4, 6, 1, 3, 5, 6])[:, None]
    batch = make_batch(tokens, prompts, targets, mask, np.ones(_ROWS, np.float32))
    return dataclasses.replace(batch, weights=np.zeros_like(batch.weights), routing=routing)


def run(devices: int, parts: int, routing: dict, taps: tuple[str, ...] = ()):
    """(gradients, metrics) of a batch in so many micro-batches on so many devices."""
    shape = devices, 1, 1, 1
    types = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, sharding.MESH_AXES, types, devices=jax.devices()[:devices])
    loss = learner.LossConfig(router_aux_coef=COEFFICIENT)
    forward_pass = learner.ForwardPass(MODEL, get_recipe("f32"), models.Parallel.on(mesh))
    step = learner.GradientProgram(forward_pass, loss, micro_batches=parts, taps=taps)
    state = learner.new_state(
        initial_params(MODEL), optax.identity(), np.zeros(2, np.uint32), "f32"
    )
    state = jax.device_put(state, sharding.replicated(mesh))
    batch = jax.device_put(balance_batch(routing), sharding.batch_sharding(mesh))
    rope = tuple(jnp.asarray(t) for t in models.rope_tables(MODEL, _TOKENS))
    found, _, metrics = exact_jit(step)(state, batch, rope)
    return jax.device_get((found.params, metrics))


def main() -> None:
    path, cases = sys.argv[1], json.loads(sys.argv[2])
    arrays: dict[str, np.ndarray] = {}
    for number, (devices, parts, replayed) in enumerate(cases):
        experts = {ROUTING[0]: arrays["router_experts"].swapaxes(0, 1)} if replayed else {}
        grads, metrics = run(devices, parts, experts, TAPS * (number == 0))
        arrays |= metrics.get("taps", {})
        arrays |= {f"{number}{jax.tree_util.keystr(k)}": g for k, g in leaves_with_path(grads)}
        for name in ("router_aux_loss", "expert_tokens"):
            arrays[f"{number}/{name}"] = metrics[name]
    print(len(cases))
    np.savez(path, **{name.replace("/", "|"): x for name, x in arrays.items()})


if __name__ == "__main__":
    main()
