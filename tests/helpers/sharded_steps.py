"""Run by test_sharding.py in a process of its own: an RL step on a mesh, its numbers as JSON."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np

from fp8rl_jax.config import load_config
from fp8rl_jax.learner import LossConfig
from fp8rl_jax.plan import h200
from fp8rl_jax.rollout import ContinuousSampler
from fp8rl_jax.training.checkpoint import named_checksums
from fp8rl_jax.training.digests import state_digest
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer
from fp8rl_jax.training.runtime import make_runtime


def _note_collectives(sampler) -> list[str]:
    """Filled at each call of a continuous sampler with what its loop sends between devices."""
    found: list[str] = []
    if isinstance(sampler, ContinuousSampler):
        advance = sampler._advance

        def noted(*arguments):
            program = advance.lower(*arguments).compile().as_text()
            found.extend(h200.collectives(program))
            assert "while(" in program, "the text must be that of the loop"
            return advance(*arguments)

        sampler._advance = noted
    return found


def _noted(program, found: dict[str, int]):
    """A jitted program that notes the collectives of its compiled form when it is called."""

    def run(*arguments):
        found.update(h200.collectives(program.lower(*arguments).compile().as_text()))
        return program(*arguments)

    return run


def main() -> None:
    mesh, recipe, micro_batches = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    overrides = [f"--config.mesh.{k}={v}" for k, v in mesh.items()]
    overrides += [f"--config.precision.{side}={recipe}" for side in ("rollout", "learner")]
    overrides += ["--config.rollout.prompts_per_step=8", "--config.rollout.group_size=2"]
    overrides += [f"--config.{field}" for field in sys.argv[4:]]
    config = load_config(str(pathlib.Path(__file__).parent / "tiny_config.py"), overrides)
    rt = make_runtime(config)
    optimizer = make_optimizer(learning_rates(1e-3, 1), 0.9, 0.99, 0.0, 1.0)
    state = rt.engine.new_state(rt.engine.init_params(), optimizer)
    sharded = sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))
    step = rt.engine.train_step(optimizer, LossConfig(), micro_batches)
    served = rt.engine.refit(state)
    weights, checksum = served.weights, served.checksum
    questions = rt.questions["train"][:8]
    collectives = _note_collectives(rt.engine.sampler)
    sampler, by_rows = rt.engine.sampler, {"sampler": {}, "step": {}}
    if rt.mesh.size == rt.mesh.shape["data"] > 1:  # every device holds all parameters
        sampler = _noted(sampler, by_rows["sampler"])
        step = _noted(step, by_rows["step"])
    tokens, ones = rt.prompts(questions), np.ones(16, np.float32)
    prompts = Prompts.numbered(*tokens, rt.engine.keys["rollout"], ones)
    rollout = rt.engine.sample(weights, prompts, sampler=sampler)
    advantages = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    batch = rt.engine.batch(rollout, prompts, advantages)
    state, logp, metrics = rt.engine.update(state, batch, step)
    scaling = {
        f"{site}.{operand}": np.asarray(getattr(states, operand).state["amax"]).ravel().tolist()
        for site, states in state.scaling_state.items()
        for operand in ("weight", "activation", "gradient")
    }
    assert bool(metrics["checksum"] == checksum)
    drift = np.abs(logp - rollout.logprobs)[rollout.mask].max()
    print(
        json.dumps(
            {
                "devices": rt.mesh.size,
                "sharded_leaves": int(sharded),
                "loop_collectives": collectives,
                "data_collectives": by_rows,
                "drift": float(drift),
                "tokens": rollout.tokens.tolist(),
                "logp": logp.view(np.int32)[rollout.mask].tolist(),
                "loss": float(metrics["loss"]),
                "grad_norm": float(metrics["grad_norm"]),
                "scaling": scaling,
                "state": state_digest(named_checksums(state)),
            }
        )
    )


if __name__ == "__main__":
    main()
