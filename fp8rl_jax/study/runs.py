"""RL runs of a study: arms that begin with the same weights, and what their logs say.

All arms of a seed have the same start, questions, order and sampling keys; they differ in the
fields that an arm names. The start is written once, in Hugging Face's format, and a run begins with
it as with any `model.checkpoint`. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fp8rl_jax.config import default_config
from fp8rl_jax.models import hf
from fp8rl_jax.policy.load import load_trained
from fp8rl_jax.study.cells import Cells
from fp8rl_jax.study.progress import Note
from fp8rl_jax.study.subjects import Subject, is_begun
from fp8rl_jax.train import train
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.runtime import make_runtime

# What is kept of every RL step (docs/usage.md has their meanings), where the run has it.
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
)
Fields = Mapping[str, Any]  # {'section.field': value}
# The learner scores a rollout before its first update, so that update's ratio is 1 and holds
# nothing of D, the difference to the sampler. Uncorrected, D is then nowhere in the loss; with
# old_logprobs='rollout' the ratio and its clipping would hold it.
UNCORRECTED: Fields = {"algo.old_logprobs": "learner", "algo.correction": "none"}
TIS: Fields = {"algo.old_logprobs": "learner", "algo.correction": "tis(2.0)"}


class After(NamedTuple):
    """What is measured of an arm's last weights.

    Attributes:
      key: what the numbers depend on beside the weights; JSON.
      measure: of float32 parameters on the host; JSON.
    """

    key: dict[str, Any]
    measure: Callable[[Any], dict[str, Any]]


class Arms:
    """The runs of one subject."""

    def __init__(
        self, subject: Subject, common: Fields, out: pathlib.Path, cells: Cells, note: Note
    ):
        """
        Args:
          subject: where they begin.
          common: fields that differ from the subject's configuration in all of them, `run.steps`
            among them.
          out: directory of the runs.
          cells: finished ones.
          note: told what happens.
        """
        self._subject, self._common, self._cells, self._note = subject, common, cells, note
        self._out = out / f"runs-{subject.tag}-seed{subject.seed}"

    def run(
        self, study: str, name: str, fields: Fields, after: After | None = None
    ) -> dict[str, Any]:
        """The cell of an arm: its run is made if there is none.

        Args:
          study: for the cell's name.
          name: of the arm.
          fields: that this arm has and the others do not.
          after: measured of the last weights.

        Returns:
          A cell whose numbers are 'series': {name of SERIES: a value for each step}; 'own': the
          record of the evaluation after the last step, under the run's own recipe; 'bf16': that of
          the same weights under bf16, which is the same engine for all arms; 'after', where it was
          asked for.
        """
        changes = {**self._common, **fields}
        subject = self._subject
        identity = {**subject.identity, **subject.settings}
        key = {"study": study, **identity, "arm": name, "changes": changes}
        key |= {"after": after.key} if after else {}
        cell = f"{study}-{subject.tag}-seed{subject.seed}-{name}"
        return self._cells.get(cell, key, lambda: self._measure(name, changes, after))

    def _measure(self, name: str, changes: Fields, after: After | None) -> dict[str, Any]:
        config = self._config(changes)
        directory = self._out / name
        config.run.dir = str(directory)
        self._note(f"RL run {directory}, {config.run.steps} steps")
        train(config, resume=is_begun(directory))
        records = read_jsonl(directory / "metrics.jsonl")
        series = {
            metric: [float(f"{record[metric]:.5g}") for record in records]
            for metric in SERIES
            if metric in records[0]
        }
        return {
            "series": series,
            "own": _accuracies(read_jsonl(directory / "eval.jsonl")[-1]),
            **self._of_last_weights(config, after),
        }

    def _config(self, changes: Fields) -> ml_collections.ConfigDict:
        """The subject's configuration with its weights as the beginning of RL."""
        config = ml_collections.ConfigDict(self._subject.runtime.config.to_dict())
        config.precision = default_config().precision
        config.precision.self_check = False  # the same for all arms, and tested elsewhere
        for path, value in changes.items():
            section, field = path.split(".")
            config[section][field] = value
        config.eval.every = config.run.steps
        config.sft.steps = 0
        if not self._subject.released:
            if config.data.tokenizer == "checkpoint":
                config.data.tokenizer = config.model.checkpoint
            config.model = default_config().model
            config.model.checkpoint = str(self._start())
        return config

    def _start(self) -> pathlib.Path:
        """The subject's parameters as a Hugging Face checkpoint in float32."""
        path = self._out / "start"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            hf.save(path, self._subject.model, self._subject.params, dtype="float32")
        return path

    def _of_last_weights(
        self, config: ml_collections.ConfigDict, after: After | None
    ) -> dict[str, Any]:
        """'bf16' and 'after' of the run's last weights."""
        config = ml_collections.ConfigDict(config.to_dict())
        config.precision = default_config().precision
        config.precision.rollout = config.precision.learner = "bf16"
        runtime = make_runtime(config)
        state, phase = load_trained(runtime, pathlib.Path(config.run.dir), self._note)
        weights = runtime.engine.refit(state).weights
        record = evaluate(runtime, weights, phase, int(state.step))[0].record
        params = jax.device_get(state.params) if after else None
        found = {"bf16": _accuracies(record)}
        return found | {"after": after.measure(params)} if after else found


def _accuracies(record: dict[str, Any]) -> dict[str, Any]:
    names = ("accuracy_greedy", "accuracy_sampled")
    return {name: record[name] for name in (*names, *(f"{n}_se" for n in names))}


def part(values: np.ndarray, quarter: int) -> np.ndarray:
    """Means (runs,) over a quarter, 0 to 3, of the steps of (runs, steps): at least one step."""
    steps = values.shape[1]
    first = quarter * steps // 4
    return values[:, first : max((quarter + 1) * steps // 4, first + 1)].mean(axis=1)


def series(cells: Sequence[dict[str, Any]], metric: str) -> np.ndarray:
    """A metric of several runs of equal length, (runs, steps); NaN where a run lacks it."""
    steps = len(cells[0]["numbers"]["series"]["reward_mean"])
    missing = [float("nan")] * steps
    return np.array([cell["numbers"]["series"].get(metric, missing) for cell in cells])
