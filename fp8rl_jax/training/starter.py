"""The configuration to begin with, for a model, questions and a reward: lengths and batch sizes
come from the questions."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from fp8rl_jax.config import saved_config
from fp8rl_jax.config.model_source import read_model
from fp8rl_jax.data import encode_demonstration, encode_prompt, load_tokenizer
from fp8rl_jax.envs import Question, check_source, is_generated, load_questions
from fp8rl_jax.training.runtime import make_runtime

# Of a generator; a data set gives what it has.
_QUESTIONS = {"sft": 4096, "train": 4096, "eval": 256}
_NEW_TOKENS = 256  # of a pretrained model's answer
_SHARE = 0.99  # of the prompts that have room; longer ones are rare and cost memory in every row


def starter(model: str, questions: str, reward: str, directory: str) -> dict[str, dict[str, Any]]:
    """{section: {field: value}} of a run that starts as it is.

    Args:
      model: directory of a Hugging Face model; the name of a published model, for its shapes with
        random weights; '' for a small decoder that learns from the answers first.
      questions: as `env.task`.
      reward: as `env.reward`.
      directory: of the run.

    Raises:
      UserError: one of them cannot be used.
    """
    pretrained = os.path.isdir(model) or "/" in model
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": directory, "steps": 100},
        "precision": {"rollout": "fp8", "learner": "fp8"},
        "env": {"task": questions, "reward": reward},
        "optimizer": {"learning_rate": 1e-6 if pretrained else 3e-4},
    }
    if model:
        sections["model"] = {"checkpoint" if pretrained else "name": model}
    if pretrained:
        sections["data"] = {"tokenizer": "checkpoint"}
    config = saved_config(sections, "fp8rl init")
    read_model(config)
    tokenizer = load_tokenizer(config.data, config.model.checkpoint)
    if tokenizer.chat_template is not None:
        sections["data"]["chat"] = True
    check_source(config.env)
    counts = _QUESTIONS | ({"sft": 0} if pretrained else {})
    found = load_questions(config.env, counts, config.run.seed).questions
    sections["rollout"] = _rollout(sections, found, pretrained)
    if is_generated(questions):
        sections["env"]["train_questions"] = _QUESTIONS["train"]
    sections["eval"] = {"questions": min(_QUESTIONS["eval"], max(1, len(found["eval"])))}
    if pretrained:
        sections["sft"] = {"steps": 0}
    else:
        batch = _batch(32, found["sft"])
        sections["sft"] = {"steps": 400, "questions": _QUESTIONS["sft"], "batch_size": batch}
    make_runtime(saved_config(sections, "fp8rl init"))
    return sections


def _rollout(sections, found: dict[str, list[Question]], pretrained: bool) -> dict[str, int]:
    """The section `rollout`: rooms for prompts and responses, from the questions' own lengths."""
    runtime = make_runtime(saved_config(sections, "fp8rl init"), with_questions=False)
    text, questions = (runtime.tokenizer, runtime.chat), [*found["train"], *found["sft"]]
    prompts, new = [len(encode_prompt(q.prompt, *text)) for q in questions], _NEW_TOKENS
    if not pretrained:
        answers = (encode_demonstration(q.prompt, q.demonstration, *text)[1] for q in questions)
        new = _rounded([len(answer) for answer in answers], 4)
    return {
        "prompts_per_step": _batch(16, found["train"]),
        "group_size": 8,
        "max_prompt_tokens": _rounded(prompts, 8),
        "max_new_tokens": new,
    }


def _batch(most: int, questions: list[Question]) -> int:
    """A batch of at most `most` questions, after too long ones were left out."""
    return max(1, min(most, int(_SHARE * len(questions))))


def _rounded(lengths: list[int], multiple: int) -> int:
    """The length that `_SHARE` of all have at most, as a multiple."""
    length = np.quantile(lengths, _SHARE, method="higher")
    return multiple * math.ceil(max(length, 1) / multiple)
