"""Measures expert parallelism on a CPU with four virtual devices: CPU seconds of a rollout and of a
train step that send tokens to the devices of their experts (`mesh.expert=4`), over those whose
devices gather all experts (`mesh.fsdp=4`), with the same model, prompts and tokens.

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 \\
        python docs/scripts/expert_cost.py fp8
"""

from __future__ import annotations

import pathlib
import sys
import time

import jax
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.config import load_config
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import make_runtime

_ROWS, _TIMES = 64, 7
_FIELDS = {
    "run.cache_dir": "",
    "model.num_experts": 16,
    "model.num_experts_per_tok": 4,
    "model.hidden_size": 256,
    "model.moe_intermediate_size": 256,
    "rollout.prompts_per_step": _ROWS // 4,
    "rollout.group_size": 4,
    "mesh.data": 1,
}


class _Side:
    """Rollout and train step on a mesh."""

    def __init__(self, axis: str, recipe: str):
        fields = {**_FIELDS, f"mesh.{axis}": 4, "precision.rollout": recipe}
        fields["precision.learner"] = recipe
        path = pathlib.Path(__file__).resolve().parents[2] / "configs" / "tiny_arithmetic.py"
        words = [f"--config.{name}={value}" for name, value in fields.items()]
        self.rt = make_runtime(load_config(str(path), words))
        self.optimizer = optimizer_of_phase(self.rt.config, "rl")
        self.state = self.rt.engine.new_state(self.rt.engine.init_params(), self.optimizer)
        self.weights = self.rt.engine.refit(self.state).weights
        tokens = self.rt.prompts(self.rt.questions["train"][: _ROWS // 4])
        ones = np.ones(_ROWS, np.float32)
        self.prompts = Prompts.numbered(*tokens, self.rt.engine.keys["rollout"], ones)
        self.step = self.rt.engine.train_step(self.optimizer, self.rt.engine.loss, 1, donate=False)

    def rollout(self):
        return self.rt.engine.sample(self.weights, self.prompts)

    def train(self, batch):
        return jax.block_until_ready(self.step(self.state, batch, self.rt.engine.rope))

    def batch(self, sampled):
        advantages = np.linspace(-1, 1, _ROWS, dtype=np.float32)
        batch = self.rt.engine.batch(sampled, self.prompts, advantages)
        return processes.place(batch, self.rt.layout.rows)


def _seconds(run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    recipe = sys.argv[1]
    sides = [_Side(axis, recipe) for axis in ("expert", "fsdp")]
    sampled = [side.rollout() for side in sides]
    assert all((a.tokens == b.tokens).all() for a, b in [sampled])
    batches = [side.batch(one) for side, one in zip(sides, sampled, strict=True)]
    for side, batch in zip(sides, batches, strict=True):
        side.train(batch)  # compiles
    times = {"rollout": [], "train step": []}
    for _ in range(_TIMES):
        times["rollout"].append([_seconds(side.rollout) for side in sides])
        times["train step"].append(
            [_seconds(lambda s=s, b=b: s.train(b)) for s, b in zip(sides, batches, strict=True)]
        )
    for name, pairs in times.items():
        ratios = sorted(expert / gathered for expert, gathered in pairs)
        middle, low, high = ratios[len(ratios) // 2], ratios[0], ratios[-1]
        print(
            f"{recipe}: CPU seconds of a {name}, tokens sent over experts gathered: "
            f"{middle:.2f} ({low:.2f} to {high:.2f}, {_TIMES} pairs)"
        )


if __name__ == "__main__":
    main()
