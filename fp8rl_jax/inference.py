"""A run's newest checkpoint as a policy: evaluate it, or ask it questions."""

from __future__ import annotations

import json
import pathlib

import jax
import ml_collections
import numpy as np

from fp8rl_jax.checkpoint import Checkpoints
from fp8rl_jax.envs import Question
from fp8rl_jax.errors import UserError
from fp8rl_jax.evaluate import evaluate
from fp8rl_jax.optimizer import optimizer_of_phase
from fp8rl_jax.rollout import is_fresh
from fp8rl_jax.runtime import Runtime, make_runtime
from fp8rl_jax.train import first_difference, read_saved_config
from fp8rl_jax.warmup import WITHOUT_EFFECT


def load_weights(runtime: Runtime):
    """Rollout weights, phase and step of the newest checkpoint in `run.dir`.

    Raises:
      UserError: there is none, or it is damaged or of another model.
    """
    config = runtime.config
    directory = pathlib.Path(config.run.dir) / "checkpoints"
    if not directory.is_dir():
        raise UserError(
            f"run.dir: {config.run.dir} holds no checkpoints; train first, or name the directory "
            "of a run with --config.run.dir"
        )
    theirs = read_saved_config(pathlib.Path(config.run.dir) / "config.json")
    ours = json.loads(json.dumps(config.to_dict()))
    difference = first_difference(*map(_what_matters, (theirs, ours)))
    if difference:
        name, before, now = difference
        raise UserError(
            f"run.dir: the run in {config.run.dir} was trained with {name} = {before!r}, and the "
            f"config says {now!r}: set it back"
        )
    checkpoints = Checkpoints(directory, config.run.keep_checkpoints)
    number = checkpoints.latest()
    if number is None:
        raise UserError(f"run.dir: {directory} holds no complete checkpoint; train first")
    meta = checkpoints.read_meta(number)
    like = runtime.new_state(runtime.init_params(), optimizer_of_phase(config, meta["phase"])[0])
    state = checkpoints.restore(number, like)
    checkpoints.close()
    if not is_fresh(state.kv_scales, int(state.step)):
        # A checkpoint between two evaluations of the warm-up: its scales are of older weights.
        held_out = runtime.questions["eval"][: config.eval.batch_size]
        held_out += held_out[-1:] * (config.eval.batch_size - len(held_out))
        state = runtime.calibrate_state(state, *runtime.pad_prompts(held_out))
    weights, _, _ = runtime.refit_state(state)
    return weights, meta["phase"], meta["step"]


def _what_matters(config: dict) -> dict:
    """The part of a saved configuration that a checkpoint's weights depend on."""
    kept = {section: config.get(section, {}) for section in ("model", "data", "precision")}
    precision = kept["precision"].items()
    without = {k: v for k, v in precision if f"precision.{k}" not in WITHOUT_EFFECT}
    return {**kept, "precision": without}


def evaluate_checkpoint(config: ml_collections.ConfigDict) -> dict:
    """The record of one evaluation of the newest checkpoint; see `evaluate`."""
    runtime = make_runtime(config)
    with jax.set_mesh(runtime.mesh):
        weights, phase, step = load_weights(runtime)
        return evaluate(runtime, weights, phase, step)[0]


def sample_checkpoint(
    config: ml_collections.ConfigDict, questions: list[str]
) -> list[tuple[str, str]]:
    """(question, answer) pairs, sampled at `rollout.temperature`, one answer a question."""
    runtime = make_runtime(config)
    with jax.set_mesh(runtime.mesh):
        weights, _, step = load_weights(runtime)
        size = config.eval.batch_size
        answers = []
        sampler = runtime.make_sampler(1, config.rollout.top_k, config.rollout.top_p)
        temperature = np.full(size, config.rollout.temperature, np.float32)
        for first in range(0, len(questions), size):
            part = [Question(text, "") for text in questions[first : first + size]]
            padded = part + [part[-1]] * (size - len(part))
            key = jax.random.fold_in(runtime.keys["eval"], first + step)
            rollout, _, _ = runtime.generate(sampler, weights, padded, key, temperature)
            answers += runtime.decode(rollout)[: len(part)]
    return list(zip(questions, answers, strict=True))
