"""Runs the main job from Python: by a configuration (`run`), or questions and reward (`grpo`)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import ml_collections

from fp8rl_jax import train
from fp8rl_jax.api.fields import path_of, with_fields
from fp8rl_jax.api.kept_reward import reward_name
from fp8rl_jax.api.policy import Policy, keep_programs, load
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.report.metrics import GAP
from fp8rl_jax.training.starter import starter

_ROOT = pathlib.Path("runs")


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that has ended.

    Attributes:
      directory: the run's directory.
      finished: whether all steps are done.
      report: path of report.html; None if the run did not finish.
    """

    directory: pathlib.Path
    finished: bool
    report: pathlib.Path | None

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each RL step, from metrics.jsonl."""
        return self._records("metrics")

    @functools.cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of all evaluations, in order, from eval.jsonl."""
        return self._records("eval")

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy of the newest checkpoint, to sample from or to train further."""
        return load(self.directory)

    def _records(self, name: str) -> list[dict[str, Any]]:
        lines = (self.directory / f"{name}.jsonl").read_text().splitlines()
        records = map(json.loads, lines)
        return [record for record in records if GAP not in record]


def run(
    config: ml_collections.ConfigDict | ml_collections.FrozenConfigDict | Mapping[str, Any],
    *,
    reward: str | Callable | None = None,
    resume: bool | Literal["auto"] = False,
) -> Job:
    """Runs the job in `config.run.dir`, as `fp8rl train` does. Provisional.

    Args:
      config: from `load_config`; or {section: {field: value}}, what differs from the defaults.
      reward: replaces `config.env.reward`; may be a function defined in a notebook.
      resume: continue from the newest checkpoint, bit for bit; 'auto': if there is a run.

    Raises:
      UserError: an error that you can fix.
      RewardError, NonFiniteError, DriftError: as for `fp8rl_jax.train.train`.
    """
    content = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    if not content or not all(isinstance(fields, Mapping) for fields in content.values()):
        raise UserError(
            f"run: config is a {type(config).__name__} without sections; write "
            "run(load_config(FILE)), or run({'run': {'dir': DIRECTORY}, ...})"
        )
    config = with_fields(content, {}, "run")
    directory = pathlib.Path(config.run.dir)
    if reward is not None:
        config.env.reward = reward_name(reward, directory, bool(resume))
    keep_programs(config)
    ended = train.train(config, resume)
    return Job(directory, ended.finished, ended.report)


def grpo(
    model: str | os.PathLike | None = None,
    questions: str | os.PathLike | Iterable[Any] = "basic_arithmetic",
    reward: str | Callable = "auto",
    *,
    resume: bool = False,
    **fields: Any,
) -> Job:
    """Trains a model on questions with GRPO, or with `preset=` of `fp8rl algo list`. Provisional.

    Defaults are those of `fp8rl init`, in a new directory for each run: lengths and batch sizes
    follow from the questions, and only a model with random weights is fine-tuned first.

    Args:
      model: directory of a Hugging Face model; or the name of a published model, which gives its
        shapes with random weights; None for the library's tiny model.
      questions: dicts ({"question": ..., "answer": ...}, and columns for the reward) or pairs
        (question, answer); or a value of `env.task`: a file of rows, a task's name.
      reward: a function (a notebook's too) or a value of `env.reward`. It is called as
        reward(prompt, response, answer), or with the arguments of TRL or verl (docs/data.md).
      resume: continue the run in the directory `dir`, with the same arguments.
      fields: fields of the configuration by name: `steps=50, learning_rate=1e-5, dir="runs/mine"`.

    Raises:
      UserError: an error that you can fix.
      RewardError, NonFiniteError, DriftError: as for `fp8rl_jax.train.train`.
    """
    if not isinstance(model, str | os.PathLike | None):
        raise UserError(
            f"grpo: model is a {type(model).__name__}; write a directory or a name, and give the "
            "others by name: grpo(questions=..., reward=...)"
        )
    settings = {path_of(name): value for name, value in fields.items()}
    names = (_ROOT / f"grpo-{number}" for number in itertools.count(1))
    new = next(path for path in names if not path.exists())
    directory = settings.setdefault("run.dir", str(new))
    if not isinstance(directory, str | os.PathLike):
        raise UserError(f"grpo: dir is a {type(directory).__name__}; write a directory")
    directory = pathlib.Path(directory)
    sections, _ = starter(
        "" if model is None else os.fspath(model),
        _task(questions, directory),
        reward_name(reward, directory, resume),
        settings,
        "grpo",
    )
    return run(with_fields(sections, {}, "grpo"), resume=resume)


def _task(questions: Any, directory: pathlib.Path) -> str:
    """Returns `env.task` for questions; writes a list of them to a file in the directory first."""
    if isinstance(questions, str | os.PathLike):
        return os.fspath(questions)
    if not isinstance(questions, Iterable):
        raise UserError(
            f"grpo: questions is a {type(questions).__name__}; write a list of them, or a value of "
            "env.task"
        )
    rows = [_row(question) for question in questions]
    try:
        text = "".join(f"{json.dumps(row, default=_of_numpy)}\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"grpo: a question cannot be written as JSON ({error}): give texts, numbers, lists and "
            "dicts of these"
        ) from None
    # The hash names the content: a run refuses to resume with another data set.
    name = f"questions_{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / name, text)
    return str(directory / name)


def _of_numpy(value: Any) -> Any:
    """Returns a number or an array of NumPy as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


def _row(question: Any) -> dict[str, Any]:
    if isinstance(question, Mapping):
        return dict(question)
    if isinstance(question, tuple | list) and len(question) == 2:
        return dict(zip(("question", "answer"), question, strict=True))
    raise UserError(
        f"grpo: a question is {question!r}; write {{'question': ..., 'answer': ...}}, or the pair "
        "(question, answer)"
    )
