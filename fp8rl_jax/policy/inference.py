"""A run's newest checkpoint as a policy: evaluate it, ask it questions, or look for drift."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import jax
import ml_collections
import numpy as np

from fp8rl_jax.config import saved_config
from fp8rl_jax.config.precision import side_recipe
from fp8rl_jax.drift import Programs, affordable, analyse
from fp8rl_jax.envs import Question
from fp8rl_jax.errors import UserError
from fp8rl_jax.learner import TrainState
from fp8rl_jax.rollout import is_fresh
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.run_directory import first_difference, read_saved_config
from fp8rl_jax.training.runtime import Runtime, make_runtime
from fp8rl_jax.training.sft import WITHOUT_EFFECT


def load_weights(runtime: Runtime):
    """Rollout weights, phase and step of the newest checkpoint in `run.dir`.

    Raises:
      UserError: there is none, or it is damaged or of another model.
    """
    directory = pathlib.Path(runtime.config.run.dir)
    _require_same(directory, runtime.config, ("model", "data", "precision"))
    state, meta = _load_state(runtime, directory)
    if not is_fresh(state.kv_scales, int(state.step)):
        # A checkpoint between two evaluations of the warm-up: its scales are of older weights.
        held_out = runtime.questions["eval"][: runtime.config.eval.batch_size]
        held_out += held_out[-1:] * (runtime.config.eval.batch_size - len(held_out))
        state = runtime.calibrate_state(state, *runtime.pad_prompts(held_out))
    weights, _, _ = runtime.refit_state(state)
    return weights, meta["phase"], meta["step"]


def _require_same(
    directory: pathlib.Path, config, sections: tuple[str, ...], given: str = "run.dir"
) -> dict:
    """The config saved in a run directory, if it agrees with ours in these sections.

    Raises:
      UserError: it does not, or there is no checkpoint.
    """
    if not (directory / "checkpoints").is_dir():
        raise UserError(
            f"{given}: {directory} holds no checkpoints; train first, or name the directory "
            f"of a run with {'--config.run.dir' if given == 'run.dir' else given}"
        )
    theirs = read_saved_config(directory / "config.json")
    ours = json.loads(json.dumps(config.to_dict()))
    difference = first_difference(*(_what_matters(c, sections) for c in (theirs, ours)))
    if difference:
        name, before, now = difference
        raise UserError(
            f"{given}: the run in {directory} was trained with {name} = {before!r}, and the "
            f"config says {now!r}: set it back"
        )
    return theirs


def _load_state(runtime: Runtime, directory: pathlib.Path) -> tuple[TrainState, dict]:
    """The newest checkpoint's state, under the runtime it was trained with, and its meta data."""
    config = runtime.config
    checkpoints = Checkpoints(directory / "checkpoints", config.run.keep_checkpoints)
    number = checkpoints.latest()
    if number is None:
        raise UserError(
            f"run.dir: {directory / 'checkpoints'} holds no complete checkpoint; train first"
        )
    meta = checkpoints.read_meta(number)
    like = runtime.new_state(runtime.init_params(), optimizer_of_phase(config, meta["phase"])[0])
    state = checkpoints.restore(number, like)
    checkpoints.close()
    return state, meta


def _what_matters(config: dict, sections: tuple[str, ...]) -> dict:
    """The part of a saved configuration that a checkpoint's weights depend on."""
    kept = {section: config.get(section, {}) for section in sections}
    if "precision" in kept:
        precision = kept["precision"].items()
        without = {k: v for k, v in precision if f"precision.{k}" not in WITHOUT_EFFECT}
        kept["precision"] = without
    return kept


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


def analyse_drift(
    config: ml_collections.ConfigDict,
    checkpoint: str | None = None,
    prompts: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> dict:
    """`drift.analyse` of a config's sampler and learner, on its training questions.

    Args:
      config: recipes, model and batch; a run's own recipes may be changed.
      checkpoint: a run directory whose newest weights to take; random weights without one.
      prompts: how many questions; those of one RL step by default.
      note: told what is being done, a line at a time.

    Raises:
      UserError: the checkpoint is missing, damaged, or of another model.
    """
    if prompts is not None:
        config.rollout.prompts_per_step = prompts
    runtime = make_runtime(config)
    with jax.set_mesh(runtime.mesh):
        optimizer, _ = optimizer_of_phase(config, "rl")
        if checkpoint is None:
            if config.model.checkpoint:
                note(f"weights of {config.model.checkpoint}")
            else:
                note("random weights: name a run with --checkpoint to take its newest ones")
            state = runtime.new_state(runtime.initial_params(), optimizer)
        else:
            params, scaling = trained_params(config, pathlib.Path(checkpoint), note)
            state = runtime.new_state(params, optimizer, scaling)
        asked = runtime.questions["train"][: config.rollout.prompts_per_step]
        questions = affordable(runtime, asked)
        if len(questions) < len(asked):
            note(f"{len(questions)} of {len(asked)} questions: more would not fit into 4 GiB")
        state = runtime.calibrate_state(state, *runtime.pad_prompts(questions))
        weights = runtime.refit_state(state)[0]
        key = runtime.keys["rollout"]
        return analyse(Programs(runtime, state, weights, questions, key), note)


def trained_params(
    config: ml_collections.ConfigDict, directory: pathlib.Path, note: Callable[[str], None]
):
    """Parameters of a run's newest checkpoint, and scaling states where the recipe is its own.

    Args:
      config: ours; of the run's own, recipes and mesh may differ.
      directory: of the run.
      note: told which checkpoint it is.

    Raises:
      UserError: there is none, or it is damaged or of another model.
    """
    theirs = _require_same(directory, config, ("model", "data"), "--checkpoint")
    theirs = saved_config(theirs, f"{directory}/config.json")
    theirs.mesh = config.mesh
    saved = make_runtime(theirs, with_questions=False)
    state, meta = _load_state(saved, directory)
    note(f"weights of {directory} after {meta['phase']} step {meta['step']}")
    same = side_recipe(config, "learner") == saved.learner_recipe
    return state.params, state.scaling_state if same else None
