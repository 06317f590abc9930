"""Train steps with exact products, traced or run: of every family, recipe, loss and with adapters.

`python tests/helpers/exact_steps.py` prints digests of their results, which must be the same on all
CPUs and with any number of threads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from drift_harness import Case, make_params

from fp8rl_jax import learner, models
from fp8rl_jax.batch import make_batch, pack
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rl import losses
from fp8rl_jax.rl.kl import ESTIMATORS
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer


class Step(NamedTuple):
    """A train step: its model and recipe, its loss, and a batch of (rows, response tokens)."""

    case: Case
    loss: learner.LossConfig = learner.LossConfig()
    shape: tuple[int, int] = (8, 24)
    packed: bool = False
    truncation: models.Truncation | None = None


_EXPERTS = {"experts": 4, "experts_per_token": 3}
_EVERYTHING = Step(
    Case(family="gpt-oss", rank=4, hidden=64, heads=2, kv_heads=1, **_EXPERTS),
    learner.LossConfig(losses.gmpo(), kl=ESTIMATORS["k3+"], kl_coef=0.1, router_aux_coef=0.1),
    packed=True,
    truncation=models.Truncation(5, 0.9),
)
STEPS = {
    "everything": _EVERYTHING,
    "latents, adapters": Step(Case(family="deepseek", rank=4)),
    **{f"recipe {name}": Step(Case(name)) for name in ("f32", "bf16", "fp8", "mxfp8")},
    **{f"recipe {name}": Step(Case(name)) for name in ("fp8_delayed", "fake", "fp8_linear")},
    **{f"recipe {name}, adapters": Step(Case(name, rank=4)) for name in ("f32", "bf16", "fp8")},
    **{name: Step(Case(family=name)) for name in ("qwen2", "mistral", "gemma3", "llama")},
    **{name: Step(Case(family=name, **_EXPERTS)) for name in ("glm", "gpt-oss", "moonlight")},
    "balance loss": Step(
        Case(family="glm", micro_batches=2, **_EXPERTS), learner.LossConfig(router_aux_coef=0.1)
    ),
    "qwen3 with experts": Step(Case(rank=2, **_EXPERTS)),
    "remat": Step(Case(remat="full")),
    **{
        f"loss {name}{', packed' if packed else ''}": Step(
            Case(layers=1), learner.LossConfig(make()), packed=packed
        )
        for name, make in losses.LOSSES.items()
        for packed in (False, True)
    },
}
_SHAPES = ((64, 12), (128, 8), (16, 24), (128, 64), (16, 60), (128, 4), (17, 5), (1, 33))
_SHAPES += ((3, 100), (23, 24), (34, 7), (5, 129))
_SMALL = Case("f32", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16)
RUN = {
    name: STEPS[name]
    for name in ("everything", "gpt-oss", "recipe f32, adapters", "recipe fp8, adapters")
} | {f"{rows} x {tokens}": Step(_SMALL, shape=(rows, tokens)) for rows, tokens in _SHAPES}


def arguments(step: Step, kernels: str = "exact", shapes: bool = False) -> tuple[Any, tuple]:
    """A jitted train step, and its arguments; with `shapes` the state's are shapes."""
    case = step.case
    recipe = dataclasses.replace(get_recipe(case.recipe), kernels=kernels)
    optimizer = make_optimizer(learning_rates(1e-2, 1), 0.9, 0.99, 0.1, 1.0)
    forward_pass = learner.ForwardPass(case.model(), recipe, remat=case.remat)
    gradients = learner.GradientProgram(forward_pass, step.loss, case.micro_batches)
    program = learner.make_train_step(gradients, optimizer)
    rng = np.random.default_rng(0)
    rows, new = step.shape
    prompts = rng.integers(1, 17, rows).astype(np.int32)
    mask = np.arange(new) < rng.integers(1, new + 1, rows)[:, None]
    tokens = rng.integers(0, case.pad, (rows, 16 + new)).astype(np.int32)
    responses = prompts[:, None] + np.arange(new)
    batch = make_batch(
        tokens,
        prompts,
        np.take_along_axis(tokens, responses, 1),
        mask,
        np.full(rows, 0.7, np.float32),
        rng.standard_normal((rows, new)),
        old_logprobs=rng.uniform(-6, -5, (rows, new)).astype(np.float32),
        ref_logprobs=rng.uniform(-6, -5, (rows, new)).astype(np.float32),
        truncation=step.truncation,
    )
    if step.packed:
        batch, _ = pack(batch, 16 + new, 128, 1, True)

    def new_state():
        rng = jnp.zeros(2, jnp.uint32)
        return learner.new_state(make_params(case), optimizer, rng, recipe)

    state = jax.eval_shape(new_state) if shapes else new_state()
    rope = tuple(jnp.asarray(table) for table in models.rope_tables(case.model(), 256))
    return program, (state, batch, rope)


def digest(step: Step) -> dict[str, str]:
    """Digests of the log-probabilities, the loss, the norm and the parameters after the update."""
    program, given = arguments(step)
    state, logp, metrics = jax.device_get(program(*given))
    assert metrics["good"] and metrics["grad_norm"] > 0
    values = {"logp": logp, "loss": metrics["loss"], "norm": metrics["grad_norm"]}
    values["params"] = state.params
    found = {}
    for name, tree in values.items():
        content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
        found[name] = hashlib.sha256(content).hexdigest()[:8]
    return found


def main() -> None:
    print(json.dumps({name: digest(step) for name, step in RUN.items()}))


if __name__ == "__main__":
    main()
