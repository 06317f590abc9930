"""Measures a policy's accuracy on held-out questions: `fp8rl eval`."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from fp8rl_jax.envs import load_questions
from fp8rl_jax.plan.refuse import check_eval_memory
from fp8rl_jax.policy.load import Note, load_policy
from fp8rl_jax.training.evaluate import Evaluation, evaluate
from fp8rl_jax.training.runtime import make_runtime


def evaluate_policy(
    config: ml_collections.ConfigDict, note: Note = lambda text: None
) -> list[dict[str, Any]]:
    """Evaluates the policy in `run.dir` on held-out questions of `env.task`, or of each data set
    that `env.eval_task` names.

    Prompts are padded to the longest question. The policy of a run samples with the random bits of
    the run's own evaluation at that checkpoint.

    Args:
      config: from `load_config` or `directory_config`.
      note: called with a line of progress.

    Returns:
      One record of `evaluate` for each set, with the names of checkpoint, task and recipe.

    Raises:
      UserError: a field of the configuration cannot work.
    """
    recipe, found = evaluations(config, note)
    about = {"checkpoint": config.run.dir, "task": config.env.task, "precision": recipe}
    return [{**about, **evaluation.record} for evaluation in found]


def evaluations(
    config: ml_collections.ConfigDict, note: Note, drawn_at: tuple[str, int] | None = None
) -> tuple[str, list[Evaluation]]:
    """Does what `evaluate_policy` does, with the random bits of a phase and a step, by default
    those of the policy; returns the recipe's name and the evaluations."""
    runtime = make_runtime(config, with_questions=False)
    check_eval_memory(runtime.resolved, runtime.sampling.mesh)
    data = load_questions(config.env, {"eval": config.eval.questions}, config.run.seed)
    if data.note:
        note(data.note)
    asked = data.questions["eval"]
    policy = load_policy(runtime, [q.prompt for q in asked], note, as_questions=True)
    runtime = dataclasses.replace(policy.runtime, questions={"eval": asked})
    phase, step = drawn_at or (policy.phase, policy.step)
    found = evaluate(runtime, policy.weights, phase, step)
    return runtime.resolved.rollout_recipe.name, found
