"""Run by test_sharding.py in a process of its own: one RL step on several meshes, as JSON.

Every mesh samples, scores and trains from the same parameters; the first one is the yardstick. Each
train step is given the rollout of the mesh before it, so rollout and learner meet across meshes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from drift_harness import with_adapters
from jax.sharding import AxisType
from random_model import initial_params

from fp8rl_jax import sharding
from fp8rl_jax.base import processes
from fp8rl_jax.batch import of_sequences
from fp8rl_jax.config import load_config
from fp8rl_jax.kernels import dispatch
from fp8rl_jax.learner import LossConfig
from fp8rl_jax.plan import h200
from fp8rl_jax.quant.kv import scales_in
from fp8rl_jax.quant.operands import COUNTS
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.runtime import Runtime, make_runtime

ROWS = 16
# Wide enough that blocks of 128 can be cut in two.
MODEL = {
    "model.hidden_size": 256,
    "model.intermediate_size": 512,
    "model.head_dim": 64,
    "model.num_key_value_heads": 4,
    "rollout.max_new_tokens": 24,
}


def _mesh(sizes: list[int]):
    """A mesh of [data, fsdp, tensor] or [data, fsdp, tensor, expert] devices of this process."""
    shape = (*sizes, 1)[:4]
    devices = jax.devices()[: int(np.prod(shape))]
    types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, sharding.MESH_AXES, axis_types=types, devices=devices)


def _differing(one: np.ndarray, other: np.ndarray) -> int:
    return int((one.view(np.int32) != other.view(np.int32)).sum())


def _flat(tree) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *map(np.ravel, jax.tree.leaves(tree))])


def _collectives(rt: Runtime, state, batch) -> list[str]:
    """What a forward pass sends between devices: 'all-gather u8' and the like, without repeats."""
    arguments = (
        state.params,
        state.scaling_state,
        processes.place(batch, rt.layout.rows),
        rt.engine.rope,
    )
    program = rt.engine.compiled_score.lower(*arguments).compile().as_text()
    return list(h200.collectives(program))


def _gradient_error(one: dict, other: dict) -> float:
    """Largest relative difference of any parameter's gradient, in the Euclidean norm."""
    norm = np.linalg.norm
    errors = jax.tree.map(lambda a, b: norm(a - b) / (norm(a) or 1.0), one, other)
    return float(max(jax.tree.leaves(errors)))


def _step(rt: Runtime, params, temperature, advantages, case: dict, rollout=None):
    """One step on a mesh: {name: host arrays}. Learns from its own rollout, or from `rollout`."""
    start = time.time()
    optimizer = optax.chain(optax.trace(decay=0.0), optax.scale(-1e-3))  # keeps the gradient
    state = rt.engine.new_state(params, optimizer)
    questions = rt.questions["train"][: ROWS // rt.config.rollout.group_size]
    state = rt.engine.calibrate(state, of_sequences(*rt.prompts(questions)))
    served = rt.engine.refit(state)
    weights, checksum = served.weights, served.checksum
    stored = sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))
    cut = sum("tensor" in str(x.sharding.spec) for x in jax.tree.leaves(weights))
    tokens = rt.prompts(questions)
    prompts = Prompts.numbered(*tokens, rt.engine.keys["rollout"], temperature)
    own = rt.engine.sample(weights, prompts)
    own = dataclasses.replace(own, taps=jax.device_get(own.taps))  # for another mesh
    batch = rt.engine.batch(rollout or own, prompts, advantages)
    scored = rt.engine.score(state, batch)
    collectives = _collectives(rt, state, batch) if case.get("collectives") else []
    loss = LossConfig(router_aux_coef=rt.config.algo.router_aux_loss_coef)
    step = rt.engine.train_step(optimizer, loss, case.get("micro_batches", 1))
    scales = jax.device_get(scales_in(state.scaling_state))
    state, logp, metrics = jax.device_get(
        step(state, processes.place(batch, rt.layout.rows), rt.engine.rope)
    )
    assert bool(metrics["checksum"] == jax.device_get(checksum))
    return {
        "cut": int(cut),
        "stored": stored,
        "rollout": own,
        "scored": scored,
        "logp": logp,
        "scales": scales,
        "gradient": state.opt_state[0].trace,
        "health": metrics.get("health", {}),
        "collectives": collectives,
        "seconds": time.time() - start,
    }


def main() -> None:
    case = json.loads(sys.argv[1])
    more = MODEL | case.get("config", {})
    more |= {f"precision.{side}": case["recipe"] for side in ("rollout", "learner")}
    more |= {"rollout.prompts_per_step": ROWS // 2, "rollout.group_size": 2}
    config = load_config(
        str(pathlib.Path(__file__).parent / "tiny_config.py"),
        [f"--config.{name}={value}" for name, value in more.items()],
    )
    base = make_runtime(config)
    model = dataclasses.replace(base.resolved.model, vocab_size=case.get("vocabulary", 320))
    params = jax.device_get(initial_params(model))
    rng = np.random.default_rng(0)
    for layer in params["layers"]["self_attn"].values():
        if "bias" in layer:
            layer["bias"] = rng.standard_normal(layer["bias"].shape).astype(np.float32)
    if config.lora.rank:
        params = jax.device_get(with_adapters(params, config.lora.rank, base=config.lora.base))
    advantages = rng.standard_normal(ROWS).astype(np.float32)
    temperature = np.ones(ROWS, np.float32)
    if case.get("by_hand"):
        # As on GPUs under `auto`: kernels are traced too, and the reference runs in their place.
        dispatch.backend = lambda: "gpu"
        dispatch.triton_installed = lambda: True
    results, one, rollout = [], None, None
    resolved = dataclasses.replace(base.resolved, model=model)
    for sizes in case["meshes"]:
        rt = dataclasses.replace(base, resolved=resolved, mesh=_mesh(sizes))
        now = _step(rt, params, temperature, advantages, case, rollout)
        one = one or now
        mask = now["rollout"].mask
        results.append(
            {
                "mesh": sizes,
                "cut": now["cut"],
                "stored": now["stored"],
                "tokens": int(mask.sum()),
                "tokens_differing": int((now["rollout"].tokens != one["rollout"].tokens).sum()),
                "rollout_differing": _differing(now["rollout"].logprobs, one["rollout"].logprobs),
                "drift": _differing(now["logp"][mask], (rollout or now["rollout"]).logprobs[mask]),
                "train_differing": _differing(now["logp"], one["logp"]),
                "score_differing": _differing(now["scored"], one["scored"]),
                "kv_scales_differing": _differing(_flat(now["scales"]), _flat(one["scales"])),
                "gradient_error": _gradient_error(one["gradient"], now["gradient"]),
                "health": _totals(now["health"]),
                "collectives": now["collectives"],
                "seconds": now["seconds"],
            }
        )
        rollout = now["rollout"]
    print(json.dumps(results))


def _totals(health: dict) -> dict[str, list[float]]:
    """{operand class: {count: sum over sites and layers}}."""
    return {
        name: {
            count: float(sum(counts[count].sum() for counts in sites.values())) for count in COUNTS
        }
        for name, sites in health.items()
    }


if __name__ == "__main__":
    main()
