"""What counting the experts' tokens before an update costs: gradients of four micro-batches.

    JAX_PLATFORMS=cpu python docs/scripts/balance_cost.py

prints CPU seconds of the gradients without the balance loss, with it, and with it and a replayed
choice of experts, which is counted without a forward pass. Medians of turns.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8rl_jax import learner, models
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import make_batch
from fp8rl_jax.models.taps import ROUTING
from fp8rl_jax.quant import get_recipe

MODEL = models.ModelConfig(
    512, 256, 512, 4, 4, 2, 64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
)
ROWS, PROMPT, RESPONSE, PARTS, TURNS = 32, 32, 96, 4, 7


def main() -> None:
    rng, length = np.random.default_rng(0), PROMPT + RESPONSE
    key = jax.random.key(0, impl="threefry2x32")
    params = exact_jit(lambda key: models.init_params(MODEL, key))(key)
    state = learner.new_state(params, optax.identity(), np.zeros(2, np.uint32), "fp8")
    tokens = rng.integers(0, MODEL.vocab_size, (ROWS, length)).astype(np.int32)
    targets = tokens[:, PROMPT:]
    plain = make_batch(
        tokens, np.full(ROWS, PROMPT, np.int32), targets, targets >= 0, np.ones(ROWS, np.float32)
    )
    chosen = rng.integers(0, MODEL.num_experts, (ROWS, MODEL.num_hidden_layers, length, 2))
    replayed = dataclasses.replace(plain, routing={ROUTING[0]: chosen.astype(np.int32)})
    rope = tuple(map(jnp.asarray, models.rope_tables(MODEL, length)))
    cases = {"without": (0.0, plain), "balanced": (0.01, plain), "replayed": (0.01, replayed)}
    forward_pass = learner.ForwardPass(MODEL, get_recipe("fp8"))
    steps, seconds = {}, {name: [] for name in cases}
    for name, (coefficient, batch) in cases.items():
        loss = learner.LossConfig(router_aux_coef=coefficient)
        steps[name] = exact_jit(learner.GradientProgram(forward_pass, loss, PARTS))
        jax.block_until_ready(steps[name](state, batch, rope))
    for _ in range(TURNS):
        for name, (_, batch) in cases.items():
            begin = time.process_time()
            jax.block_until_ready(steps[name](state, batch, rope))
            seconds[name].append(time.process_time() - begin)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<10} {median:.3f} CPU s, {median / medians['without']:.2f}")


if __name__ == "__main__":
    main()
