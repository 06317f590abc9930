"""RL runs of a study: arms that begin with the same weights, and what their logs say.

All arms of a seed have the same start, questions, order and sampling keys; they differ in the
fields that an arm names. The start is written once, in Hugging Face's format, and a run begins with
it as with any `model.checkpoint`. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from fp8rl_jax.config import default_config
from fp8rl_jax.models import hf
from fp8rl_jax.policy.load import load_trained
from fp8rl_jax.study.cells import Cells
from fp8rl_jax.study.subjects import Note, Subject, is_begun
from fp8rl_jax.train import train
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.runtime import make_runtime

# What is kept of every RL step (docs/usage.md has their meanings), where the run has it.
SERIES = (
    "reward_mean", "entropy", "train_rollout_logprob_abs_diff", "mismatch_kl",
    "token_mult_prob_error", "tis_clipfrac", "kl_ref", "grad_norm", "calibrate_frac",
)  # fmt: skip
Fields = Mapping[str, Any]  # {'section.field': value}


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

    def run(self, study: str, name: str, fields: Fields) -> dict[str, Any]:
        """The cell of an arm: its run is made if there is none.

        Args:
          study: for the cell's name.
          name: of the arm.
          fields: that this arm has and the others do not.

        Returns:
          A cell whose numbers are 'series': {name of SERIES: a value for each step}; 'own': the
          record of the evaluation after the last step, under the run's own recipe; 'bf16': that of
          the same weights under bf16, which is the same engine for all arms.
        """
        changes = {**self._common, **fields}
        subject = self._subject
        identity = {**subject.identity, **subject.settings}
        key = {"study": study, **identity, "arm": name, "changes": changes}
        cell = f"{study}-{subject.tag}-seed{subject.seed}-{name}"
        return self._cells.get(cell, key, lambda: self._measure(name, changes))

    def _measure(self, name: str, changes: Fields) -> dict[str, Any]:
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
            "bf16": self._under_bf16(config),
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
        if not config.model.checkpoint:
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

    def _under_bf16(self, config: ml_collections.ConfigDict) -> dict[str, Any]:
        """Accuracy of the run's last weights, served in bf16."""
        config = ml_collections.ConfigDict(config.to_dict())
        config.precision = default_config().precision
        config.precision.rollout = config.precision.learner = "bf16"
        runtime = make_runtime(config)
        with jax.set_mesh(runtime.mesh):
            state, phase = load_trained(runtime, pathlib.Path(config.run.dir), self._note)
            weights = runtime.refit_state(state).weights
            return _accuracies(evaluate(runtime, weights, phase, int(state.step))[0].record)


def _accuracies(record: dict[str, Any]) -> dict[str, Any]:
    names = ("accuracy_greedy", "accuracy_sampled")
    return {name: record[name] for name in (*names, *(f"{n}_se" for n in names))}


def series(cells: Sequence[dict[str, Any]], metric: str) -> np.ndarray:
    """A metric of several runs of equal length, (runs, steps); NaN where a run lacks it."""
    steps = len(cells[0]["numbers"]["series"]["reward_mean"])
    missing = [float("nan")] * steps
    return np.array([cell["numbers"]["series"].get(metric, missing) for cell in cells])
