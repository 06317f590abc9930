"""Run by models/parallel/test_mesh.py in a process of its own: two meshes of four devices each, at
the same time. The one samples, the other scores what was sampled; prints JSON.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from random_model import initial_params

from fp8rl_jax import learner, models, rollout, sharding
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import Batch, make_batch
from fp8rl_jax.quant import get_recipe

MODEL = models.ModelConfig(64, 256, 256, 2, 4, 2, 64)
RECIPE, SLOTS, PROMPT, ROWS = "fp8", 6, 5, 8


def _mesh(devices, **axes: int) -> Mesh:
    shape = tuple(axes.get(name, 1) for name in sharding.MESH_AXES)
    assert math.prod(shape) == len(devices)
    types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, sharding.MESH_AXES, types, devices=devices)


class Side:
    """Sampler and score of one mesh (None: of one device)."""

    def __init__(self, mesh: Mesh | None):
        self.mesh, parallel = mesh, models.Parallel.on(mesh)
        settings = rollout.SamplerConfig(SLOTS, 2, (), 0)
        self.sampler = rollout.make_sampler(MODEL, RECIPE, settings, parallel)
        self.scorer = learner.make_score(learner.ForwardPass(MODEL, get_recipe(RECIPE), parallel))
        self.params = initial_params(MODEL)
        if mesh is not None:
            self.params = jax.device_put(self.params, models.param_shardings(mesh, self.params))

    def _rows(self, tree):
        return (
            tree if self.mesh is None else jax.device_put(tree, sharding.batch_sharding(self.mesh))
        )

    def _whole(self, tree):
        return tree if self.mesh is None else jax.device_put(tree, sharding.replicated(self.mesh))

    def sample(self, prompts, lengths):
        weights = exact_jit(lambda params: models.quantize_params(params, RECIPE))(self.params)
        rope = self._whole(models.rope_tables(MODEL, PROMPT + SLOTS))
        ids, limits = np.arange(ROWS, dtype=np.int32), np.full(ROWS, SLOTS, np.int32)
        rows = (prompts, lengths, ids, np.ones(ROWS, np.float32), limits)
        tokens, lengths, ids, temperature, limits = self._rows(rows)
        key = jax.random.key(3, impl="threefry2x32")
        requests = rollout.Requests(lengths, key, ids, temperature, limits, rope)
        return jax.device_get(self.sampler(weights, tokens, requests))

    def score(self, batch):
        rope = self._whole(models.rope_tables(MODEL, PROMPT + SLOTS))
        return jax.device_get(self.scorer(self.params, {}, self._rows(batch), rope))


def _batch(prompts, lengths, sampled) -> Batch:
    tokens = np.zeros((ROWS, PROMPT + SLOTS), np.int32)
    lengths = np.repeat(lengths, 2)
    for row, (prompt, length) in enumerate(
        zip(np.repeat(prompts, 2, axis=0), lengths, strict=True)
    ):
        tokens[row, :length] = prompt[:length]
        tokens[row, length : length + SLOTS] = sampled.tokens[row]
    ones = np.ones(ROWS, np.float32)
    return make_batch(tokens, lengths, sampled.tokens, sampled.mask, ones)


def main() -> None:
    devices = jax.devices()
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 64, (ROWS // 2, PROMPT)).astype(np.int32)
    lengths = np.array([5, 3, 1, 4], np.int32)
    one = Side(None)
    first = one.sample(prompts, lengths)
    cut, rows = Side(_mesh(devices[:4], data=2, tensor=2)), Side(_mesh(devices[4:], fsdp=4))
    with ThreadPoolExecutor(2) as pool:  # each in a thread of its own, at the same time
        sampled = pool.submit(cut.sample, prompts, lengths)
        scored = pool.submit(rows.score, _batch(prompts, lengths, first))
    sampled, scored = sampled.result(), scored.result()
    print(
        json.dumps(
            {
                "tokens": int((sampled.tokens != first.tokens).sum()),
                "rollout": int((sampled.logprobs != first.logprobs).sum()),
                "learner": int((scored != first.logprobs).sum()),
                "size": float(np.abs(first.logprobs).mean()),
                "cut": sum("tensor" in str(x.sharding.spec) for x in jax.tree.leaves(cut.params)),
                "stored": sum("fsdp" in str(x.sharding.spec) for x in jax.tree.leaves(rows.params)),
            }
        )
    )


if __name__ == "__main__":
    main()
