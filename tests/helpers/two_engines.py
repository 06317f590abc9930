"""Run by training/test_engine.py in a process of its own: RL steps by one engine, and by two, of
which one samples and the other learns, each on a device of its own; prints JSON.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import AxisType

from fp8rl_jax import sharding
from fp8rl_jax.config import load_config
from fp8rl_jax.data import Stream
from fp8rl_jax.training.ahead import Rollouts
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import Runtime, make_runtime
from fp8rl_jax.training.step import metrics_of, rl_step

_STEPS = 2


class SampledElsewhere:
    """An engine that samples by another one, which has devices of its own."""

    def __init__(self, learner, sampler):
        self._learner, self._sampler = learner, sampler
        self.sampled = 0

    def __getattr__(self, name: str):
        return getattr(self._learner, name)

    def sample(self, weights, prompts, *more, **named):
        self.sampled += 1
        weights = jax.device_put(weights, self._sampler.layout.weight_shardings)
        return self._sampler.sample(weights, prompts, *more, **named)


def _on(runtime: Runtime, device) -> Runtime:
    """The runtime on one device."""
    types_ = (AxisType.Auto,) * len(sharding.MESH_AXES)
    mesh = jax.make_mesh((1, 1, 1, 1), sharding.MESH_AXES, axis_types=types_, devices=[device])
    return dataclasses.replace(runtime, mesh=mesh)


def _steps(runtime: Runtime, params) -> dict:
    config, engine = runtime.config, runtime.engine
    state = engine.new_state(params, optimizer_of_phase(config, "rl"))
    served, logprobs, rewards, drift = engine.refit(state), [], [], []
    stream = Stream(runtime.questions["train"], config.rollout.prompts_per_step, config.run.seed)
    rollouts = Rollouts(runtime, stream, lambda step, progress: None)
    for _ in range(_STEPS):
        result = rl_step(runtime, state, served, None, rollouts)
        record = metrics_of(runtime, result)
        state, served = result.state, result.served
        logprobs.append(result.drawn.samples.rollout.logprobs)
        rewards.append(record["reward_mean"])
        drift.append(record["train_rollout_logprob_abs_diff_max"])
    leaves = [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    places = {str(x.devices()) for x in jax.tree.leaves(served.weights)}
    return {
        "logprobs": logprobs,
        "rewards": rewards,
        "drift": drift,
        "leaves": leaves,
        "places": sorted(places),
        "version": int(served.version),
    }


def main() -> None:
    overrides = [f"--config.run.dir={sys.argv[1]}", "--config.precision.rollout=fp8"]
    overrides += ["--config.precision.learner=fp8", "--config.mesh.data=2"]
    config = load_config(str(pathlib.Path(__file__).parent / "tiny_config.py"), overrides)
    runtime = make_runtime(config)
    first, second = (_on(runtime, device) for device in jax.devices())
    params = jax.device_get(first.engine.init_params())
    one = _steps(first, params)
    both = _on(runtime, jax.devices()[0])
    engine = SampledElsewhere(both.engine, second.engine)
    vars(both)["engine"] = engine
    two = _steps(both, params)
    same = zip(one["leaves"] + one["logprobs"], two["leaves"] + two["logprobs"], strict=True)
    print(
        json.dumps(
            {
                "differ": sum(int((a != b).sum()) for a, b in same),
                "sampled": engine.sampled,
                "rewards": [one["rewards"], two["rewards"]],
                "drift": one["drift"] + two["drift"],
                "places": [one["places"], two["places"]],
                "version": two["version"],
                "moved": float(np.abs(one["logprobs"][1] - one["logprobs"][0]).max()),
            }
        )
    )


if __name__ == "__main__":
    main()
