"""Runs an RL step that drifted again, and traces the drift to an operation."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.drift import Programs, Ran, affordable, analyse, compare_sides
from fp8rl_jax.replay.again import run_again
from fp8rl_jax.replay.differences import line_of
from fp8rl_jax.report.metrics import DRIFT_MAX
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.runtime import Runtime

# The parts of `analyse` for a step whose drift did not come back.
_NOT_ANALYSED: dict[str, Any] = {
    "operations": [],
    "first": None,
    "logits": None,
    "unobservable": [],
    "tapped_programs": 0,
    "weights": {"comparable": True, "leaves": 0, "differing": []},
    "products": {"sentence": "not tried", "wrong": []},
}


def is_analysed(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a drift in the steps of a run is a fault, and `analyse_step` can trace it."""
    resolved = resolve_config(config)
    return resolved.zero_drift and _one_reply_of_its_policy(resolved)


def _one_reply_of_its_policy(resolved: Resolved) -> bool:
    """Returns whether a step's samples are single replies that the policy before it drew."""
    return resolved.step is None and not resolved.stale


def largest_drift(directory: pathlib.Path) -> int | None:
    """Returns the RL step of a run with the largest drift; None if none has drifted."""
    rows = [row for row in read_jsonl(directory / "metrics.jsonl") if row.get(DRIFT_MAX)]
    return max(rows, key=lambda row: row[DRIFT_MAX], default={}).get("step")


def analyse_step(
    directory: pathlib.Path,
    step: int,
    config: ml_collections.ConfigDict,
    into: pathlib.Path,
    note: Callable[[str], None] = lambda text: None,
) -> dict:
    """Runs a step of a run again, with the policy before its update, and analyses its drift.

    Args:
      directory: directory of the run.
      step: number of the RL step, from 1 on.
      config: the run's configuration.
      into: directory for the replay's files, empty.
      note: called with a line for each part.

    Returns:
      The result of `analyse` on those questions with the largest drift that are `affordable`, with
      'step', 'drift' (the recorded largest |dlogp|), 'questions' (how many were analysed) and 'of'
      (how many the step has).

    Raises:
      UserError: as `run_again`; or the step cannot be analysed.
    """
    if not _one_reply_of_its_policy(resolve_config(config)):
        raise UserError(
            "steps of conversations, and those that learn what older policies drew, are not "
            "analysed: --prompts=N samples one reply with the newest weights"
        )
    values = run_again(directory, step, config, into, "sample", note).values
    runtime = values["runtime"]
    samples = values["drawn"].samples
    every = np.arange(len(samples.questions))
    whole = _programs(values, every)
    note(f"running the sampler and the train step of RL step {step}")
    ran = _first_update(whole)
    gap = np.abs(np.asarray(ran.logp, np.float64) - ran.rollout.logprobs)
    gap = np.where(ran.rollout.mask, gap, 0.0)
    groups = _largest(gap, runtime, samples.questions)
    result: dict[str, Any] = {**_NOT_ANALYSED, "verdict": {"culprit": "none"}}
    if gap.any():
        chosen = _programs(values, groups)
        result = analyse(chosen, note, ran if len(groups) == len(every) else None)
    result |= compare_sides(whole, ran.rollout, ran.batch, ran.logp)
    result |= {
        "step": step,
        "drift": line_of(directory, "metrics", step).get(DRIFT_MAX, 0.0),
        "questions": len(groups),
        "of": len(every),
    }
    return {**result, "verdict": _verdict(result, bool(gap.any()))}


def _programs(values: dict[str, Any], groups: np.ndarray) -> Programs:
    """Returns sampler and learner before the update, on the questions of these groups."""
    runtime = values["runtime"]
    samples = values["drawn"].samples
    return Programs(
        runtime,
        values["state"],
        runtime.engine.refit(values["state"]).weights,
        [samples.questions[group] for group in groups],
        samples.prompts.key,
        first_ids=samples.prompts.first_ids[groups],
    )


def _first_update(programs: Programs) -> Ran:
    """Runs both programs, on the rows of the step's first update."""
    rollout = programs.rollout()
    rows = slice(0, len(rollout.mask) // programs.runtime.resolved.algorithm.minibatches)
    cut = {name: array[rows] for name, array in rollout.rows.items()}
    batch = jax.tree.map(lambda x: x[rows], programs.batch(rollout))
    return Ran(dataclasses.replace(rollout, **cut), batch, programs.learner(batch)[0])


def _largest(gap: np.ndarray, runtime: Runtime, questions: list) -> np.ndarray:
    """Returns the groups with the largest |dlogp|, as many as are `affordable`; ascending.

    `gap`: |dlogp| (N, R) of the first update's rows.
    """
    size = runtime.config.rollout.group_size
    worst = np.maximum.reduceat(gap.max(axis=1), np.arange(0, len(gap), size))
    order = np.argsort(-worst, kind="stable")
    count = len(affordable(runtime, [questions[i] for i in order]))
    parts = runtime.config.learner.gradient_accumulation_steps * batch_divisor(runtime.mesh)
    unit = math.lcm(size, parts) // size  # groups that make equal parts
    return np.sort(order[: max(count // unit, 1) * unit])


def _verdict(result: dict, drifts: bool) -> dict:
    """Returns the analysis' verdict if the step drifted again, else 'rows' or 'not repeated'."""
    if result["verdict"]["culprit"] != "none":
        return result["verdict"]
    step = result["step"]
    if drifts:
        culprit = "rows"
        sentence = (
            f"The drift of RL step {step} comes back when its {result['of']} questions run again, "
            f"and not with {result['questions']} of them, whose values fit into memory: it depends "
            "on the number of rows."
        )
    else:
        culprit = "not repeated"
        sentence = (
            f"RL step {step} recorded drift of {result['drift']:.3g}, and run again its two sides "
            "agree bit for bit. So a program gave two results for one input, or its result was "
            "changed on the way."
        )
    advice = (
        "see whether it stays away with precision.cpu_products=exact on a CPU, or on another "
        "machine, and report it with drift.json"
    )
    return {"culprit": culprit, "layer": None, "sentence": sentence, "advice": advice}
