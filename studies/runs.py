"""RL runs of a study: arms that start from the same weights, and figures of their logs.

All arms of a seed have the same start, questions, order and sampling keys; they differ in the
fields that an arm names. The start is written once, in Hugging Face's format, and is the
`model.checkpoint` of every run. A stopped run continues where it stopped.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fp8rl_jax.config import default_config
from fp8rl_jax.models import hf
from fp8rl_jax.models.stacks import path_of
from fp8rl_jax.policy.load import load_trained, open_trained
from fp8rl_jax.train import train
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.runtime import make_runtime
from studies.cells import Cell
from studies.frame import Found, Numbers, Plan
from studies.progress import Note
from studies.subjects import Subject, is_begun

# Metrics of an RL step that are kept if the run has them (docs/usage.md explains them).
SERIES = (
    "reward_mean",
    "entropy",
    "train_rollout_logprob_abs_diff",
    "mismatch_kl",
    "token_mult_prob_error",
    "tis_clipfrac",
    "kl_ref",
    "grad_norm",
    "calibrate_frac",
    "staleness_abs_diff",
    "staleness_kl",
    "staleness_ess",
    "learner_change_abs_diff",
    "learner_change_kl",
)
Fields = Mapping[str, Any]  # {'section.field': value}
# The learner scores a rollout before its first update, so that update's ratio is 1, without D.
# Uncorrected, D then does not enter the loss; with old_logprobs='rollout' it would enter the ratio
# and its clipping.
UNCORRECTED: Fields = {"algo.old_logprobs": "learner", "algo.correction": "none"}
TIS: Fields = {"algo.old_logprobs": "learner", "algo.correction": "tis(2.0)"}


class After(NamedTuple):
    """A measurement of an arm's last weights.

    Attributes:
      key: everything that the numbers depend on besides the weights; JSON.
      measure: function of the float32 parameters of the newest checkpoints, on the host, the oldest
        first; returns the numbers, JSON.
      last: number of these checkpoints.
    """

    key: dict[str, Any]
    measure: Callable[[list[Any]], dict[str, Any]]
    last: int = 1


def arm_cells(
    study: str, subject: Subject, plan: Plan, arms: Mapping[str, Fields], after: After | None = None
) -> dict[str, Cell]:
    """Returns {arm: cell}; a missing cell makes its RL run. Returns {} for a plan without steps.

    A cell's numbers are 'series', {name of SERIES: a value for each step}; 'own', the record of the
    evaluation after the last step, under the run's recipe; 'bf16', the evaluation of the same
    weights under bf16, by the same engine for all arms; and 'after', if `after` is given.

    Args:
      study: name with which the cells' names begin.
      subject: model with which the runs start.
      plan: steps of the runs, and where they are written.
      arms: {name: fields that differ from the subject's configuration}.
      after: measurement of the last weights.
    """
    if not plan.size.steps:
        return {}
    tag = f"{subject.tag}-seed{subject.seed}"
    key = {"study": study, **subject.identity, **subject.settings}
    key |= {"after": after.key} if after else {}
    cells = {}
    for name, fields in arms.items():
        changes = {"run.steps": plan.size.steps, **fields}
        run = functools.partial(
            _run, subject, changes, plan.out / f"runs-{tag}", name, plan.note, after
        )
        cells[name] = Cell(f"{study}-{tag}-{name}", {**key, "arm": name, "changes": changes}, run)
    return cells


def _run(
    subject: Subject,
    changes: Fields,
    directory: pathlib.Path,
    name: str,
    note: Note,
    after: After | None,
) -> Numbers:
    """Runs an arm in `directory / name` and returns its numbers."""
    config = arm_config(subject, changes, directory / "start")
    config.run.dir = str(directory / name)
    note(f"RL run {config.run.dir}, {config.run.steps} steps")
    train(config, resume=is_begun(directory / name))
    records = read_jsonl(directory / name / "metrics.jsonl")
    series = {
        metric: [float(f"{record[metric]:.5g}") if metric in record else None for record in records]
        for metric in SERIES
        if any(metric in record for record in records)
    }
    own = _kept(read_jsonl(directory / name / "eval.jsonl")[-1])
    return {"series": series, "own": own, **_of_last_weights(config, note, after)}


def arm_config(subject: Subject, changes: Fields, start: pathlib.Path) -> ml_collections.ConfigDict:
    """Returns the configuration of an RL run that starts from the subject's weights.

    Args:
      subject: model with which the run starts.
      changes: fields of the arm.
      start: directory into which the subject's parameters are written as a float32 Hugging Face
        checkpoint, unless it exists; not used for released weights.
    """
    config = ml_collections.ConfigDict(subject.runtime.config.to_dict())
    config.precision = default_config().precision
    config.precision.self_check = False  # the same for all arms, and tested elsewhere
    for path, value in changes.items():
        section, field = path.split(".")
        config[section][field] = value
    config.eval.every = config.run.steps
    config.sft.steps = 0
    if subject.released:
        return config
    if not start.exists():
        start.parent.mkdir(parents=True, exist_ok=True)
        hf.save(start, subject.model, subject.params, dtype="float32")
    if config.data.tokenizer == "checkpoint":
        config.data.tokenizer = config.model.checkpoint
    config.model = default_config().model
    config.model.checkpoint = str(start)
    return config


def _of_last_weights(config: ml_collections.ConfigDict, note: Note, after: After | None) -> Numbers:
    """Measures 'bf16' and 'after' of the run's last weights."""
    config = ml_collections.ConfigDict(config.to_dict())
    config.precision = default_config().precision
    config.precision.rollout = config.precision.learner = "bf16"
    runtime = make_runtime(config)
    state, phase = load_trained(runtime, pathlib.Path(config.run.dir), note)
    weights = runtime.engine.refit(state).weights
    record = evaluate(runtime, weights, phase, int(state.step))[0].record
    found = {"bf16": _kept(record)}
    if not after:
        return found
    opened = open_trained(runtime, pathlib.Path(config.run.dir))

    def weights_of(number: int) -> Any:
        read = opened.checkpoints.read_params(number, opened.like)
        return jax.tree_util.tree_map_with_path(lambda keys, _: read(path_of(keys)), state.params)

    snapshots = [weights_of(number) for number in opened.checkpoints.newest(after.last)]
    opened.checkpoints.close()
    return found | {"after": after.measure(snapshots)}


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    names = ("accuracy_greedy", "accuracy_sampled")
    return {name: record[name] for name in (*names, *(f"{n}_se" for n in names))}


def part(values: np.ndarray, quarter: int) -> np.ndarray:
    """Returns means (runs,) of values (runs, steps) over a quarter, 0 to 3, of at least a step."""
    steps = values.shape[1]
    first = quarter * steps // 4
    return values[:, first : max((quarter + 1) * steps // 4, first + 1)].mean(axis=1)


def series(runs: Sequence[Numbers], metric: str) -> np.ndarray:
    """Returns a metric of several runs of equal length, (runs, steps); NaN where it is missing."""
    missing = [None] * len(runs[0]["series"]["reward_mean"])
    return np.array([run["series"].get(metric, missing) for run in runs], np.float64)


def accuracy_less(found: Found, arm: str, other: str) -> tuple[np.ndarray, float]:
    """Returns an arm's sampled accuracy under bf16 minus another arm's, for each seed (S,), and the
    least standard deviation to assume for it: the noise of its two evaluations."""

    def values(name: str) -> np.ndarray:  # (2, S)
        metrics = ("accuracy_sampled", "accuracy_sampled_se")
        return np.array([[run["bf16"][m] for run in found.each(name)] for m in metrics])

    (one, one_error), (two, two_error) = values(arm), values(other)
    return one - two, float(np.sqrt((one_error**2 + two_error**2).mean()))


def accuracies(runs: Sequence[Numbers], recipe: str) -> list[float]:
    """Returns each run's sampled accuracy at its end, under 'bf16' or its 'own' recipe."""
    return [run[recipe]["accuracy_sampled"] for run in runs]
