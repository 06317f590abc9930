"""The main job from Python: on a configuration (`run`), or on questions and a reward (`grpo`)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_collections

from fp8rl_jax import train
from fp8rl_jax.api.fields import path_of, with_fields
from fp8rl_jax.api.kept_reward import reward_name
from fp8rl_jax.api.policy import Policy, keep_programs, load
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.data import encode_demonstration, encode_prompt
from fp8rl_jax.envs import load_questions
from fp8rl_jax.models.presets import PRESETS
from fp8rl_jax.training.runtime import make_runtime

_NEW_TOKENS = 256  # of a response, where nothing says how long answers are
_MOST_TOKENS = 1024  # of a prompt that others make room for
_SIZES = ("max_prompt_tokens", "max_new_tokens")
_ROOT = pathlib.Path("runs")


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that has ended.

    Attributes:
      directory: of the run.
      finished: whether all steps are done.
      report: its report.html; None if it did not finish.
    """

    directory: pathlib.Path
    finished: bool
    report: pathlib.Path | None

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Of each RL step."""
        return self._records("metrics")

    @functools.cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Accuracy on held-out questions, in order."""
        return self._records("eval")

    @functools.cached_property
    def policy(self) -> Policy:
        """The newest checkpoint, to sample from or to train on."""
        return load(self.directory)

    def _records(self, name: str) -> list[dict[str, Any]]:
        file = self.directory / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]


def run(
    config: ml_collections.ConfigDict,
    *,
    reward: str | Callable | None = None,
    resume: bool = False,
) -> Job:
    """The whole job in `config.run.dir`: `fp8rl train` from Python. Provisional.

    Args:
      config: of `load_config`.
      reward: takes the place of `config.env.reward`; may be a function of a notebook.
      resume: continue from the newest checkpoint, bit for bit.

    Raises:
      UserError: something that you can fix, in one sentence.
      RewardError, NonFiniteError, DriftError: as `fp8rl_jax.train.train`.
    """
    directory = pathlib.Path(config.run.dir)
    if reward is not None:
        config = config.copy_and_resolve_references()
        config.env.reward = reward_name(reward, directory, resume)
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

    Some defaults are others than those of `fp8rl train`: a directory of its own for each run;
    slots for prompts and responses as the questions need them; supervised fine-tuning only for a
    model that begins with random weights.

    Args:
      model: directory of a Hugging Face model; the name of a published one, for its shapes; None
        for the library's tiny model.
      questions: dicts ({"question": ..., "answer": ...}, and columns for the reward) or pairs
        (question, answer); or what `env.task` may be: a file of rows, a task's name.
      reward: a function, of a notebook too, or what `env.reward` may be. It is called as
        reward(prompt, response, answer), or as TRL and verl call theirs (docs/data.md).
      resume: continue a run whose directory `dir` names, with the same arguments.
      fields: fields of the configuration by name: `steps=50, learning_rate=1e-5, dir="runs/mine"`.

    Raises:
      UserError: something that you can fix, in one sentence.
      RewardError, NonFiniteError, DriftError: as `fp8rl_jax.train.train`.
    """
    given = {path_of(name): value for name, value in fields.items()}
    base: dict[str, dict[str, Any]] = {"run": {"dir": str(_new_directory())}}
    if model is not None and os.fspath(model) in PRESETS:
        base["model"] = {"name": os.fspath(model)}
    elif model is not None:
        base |= {"model": {"checkpoint": os.fspath(model)}, "data": {"tokenizer": "checkpoint"}}
        base["sft"] = {"steps": 0}
    config = with_fields(base, given, "grpo")
    config.env.task = _task(questions, pathlib.Path(config.run.dir))
    sizes = {name for name in _SIZES if f"rollout.{name}" not in given}
    if sizes:
        config.rollout.update({k: v for k, v in _slots(config).items() if k in sizes})
    return run(config, reward=reward, resume=resume)


def _new_directory() -> pathlib.Path:
    """The first of runs/grpo-1, runs/grpo-2, ... that is not there."""
    names = (_ROOT / f"grpo-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def _task(questions: Any, directory: pathlib.Path) -> str:
    """`env.task` for questions: a file in the directory, unless they are a source already."""
    if isinstance(questions, str | os.PathLike):
        return os.fspath(questions)
    rows = [_row(question) for question in questions]
    try:
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"grpo: a question cannot be written as JSON ({error}): give texts, numbers, lists and "
            "dicts of these"
        ) from None
    # By its content: another list of questions is another data set, which a run refuses.
    name = f"questions_{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / name, text)
    return str(directory / name)


def _row(question: Any) -> dict[str, Any]:
    if isinstance(question, Mapping):
        return dict(question)
    if isinstance(question, tuple | list) and len(question) == 2:
        return dict(zip(("question", "answer"), question, strict=True))
    raise UserError(
        f"grpo: a question is {question!r}; write {{'question': ..., 'answer': ...}}, or the pair "
        "(question, answer)"
    )


def _slots(config: ml_collections.ConfigDict) -> dict[str, int]:
    """Fields of section `rollout` with room for all questions of at most `_MOST_TOKENS`."""
    runtime = make_runtime(config, with_questions=False)
    counts = {"sft": config.sft.questions if config.sft.steps else 0}
    counts |= {"train": config.env.train_questions, "eval": config.eval.questions}
    found = load_questions(config.env, counts, config.run.seed).questions
    tokenizer, chat = runtime.tokenizer, runtime.chat
    prompts = [encode_prompt(q.prompt, tokenizer, chat) for part in found.values() for q in part]
    taught = [
        encode_demonstration(q.prompt, q.demonstration, tokenizer, chat)[1] for q in found["sft"]
    ]
    longest = max(map(len, prompts), default=2), max(map(len, taught), default=_NEW_TOKENS)
    return dict(zip(_SIZES, (min(longest[0], _MOST_TOKENS), longest[1]), strict=True))
