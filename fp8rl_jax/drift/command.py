"""Analyses the sampler and the learner of a configuration: `fp8rl drift`."""

from __future__ import annotations

import pathlib

import ml_collections

from fp8rl_jax.drift.attribute import analyse
from fp8rl_jax.drift.programs import Programs, affordable
from fp8rl_jax.policy.load import Note, load_trained
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import make_runtime


def analyse_drift(
    config: ml_collections.ConfigDict,
    checkpoint: str | None = None,
    prompts: int | None = None,
    note: Note = lambda text: None,
) -> dict:
    """Analyses new samples of the configuration's training questions (`drift.analyse`).

    Args:
      config: recipes, model and batch; recipes may differ from those of the run.
      checkpoint: directory of a run, whose newest weights are used; None for random weights.
      prompts: number of questions; None for those of one RL step.
      note: called with a line for each part.

    Raises:
      UserError: the checkpoint is missing, damaged, or of another model.
    """
    if prompts is not None:
        config = config.copy_and_resolve_references()
        config.rollout.prompts_per_step = prompts
    runtime = make_runtime(config)
    source = "random weights"
    optimizer = optimizer_of_phase(config, "rl")
    if checkpoint is None:
        if config.model.checkpoint:
            note(f"weights of {config.model.checkpoint}")
        else:
            note("random weights: name a run with --checkpoint to take its newest ones")
        state = runtime.engine.new_state(runtime.engine.initial_params(), optimizer)
    else:
        source = f"the newest weights of {checkpoint} on a sample of its own"
        trained, _ = load_trained(runtime, pathlib.Path(checkpoint), note)
        state = runtime.engine.new_state(trained.params, optimizer, trained.scaling_state)
    asked = runtime.questions["train"][: config.rollout.prompts_per_step]
    questions = affordable(runtime, asked)
    if len(questions) < len(asked):
        note(f"{len(questions)} of {len(asked)} questions: more would not fit into 4 GiB")
    return {"source": source} | analyse(Programs.on(runtime, state, questions), note)
