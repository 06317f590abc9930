"""Makes a first configuration from a model, questions and a reward: lengths and batch sizes follow
from the questions."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np

from fp8rl_jax.base.paths import expanded
from fp8rl_jax.config import FIELDS, override, saved_config
from fp8rl_jax.config.model_source import read_model
from fp8rl_jax.data import encode_conversation, encode_prompt, load_tokenizer
from fp8rl_jax.envs import Question, Scoring, Tally, check_source, load_questions
from fp8rl_jax.training.runtime import Runtime, make_runtime

_HELD_OUT = 256  # largest number of questions of an evaluation
_NEW_TOKENS = 256  # response length of a pretrained model
_EPOCHS = 10  # largest number of epochs of fine-tuning: RL needs answers that vary
_SHARE = 0.99  # share of prompts that fit; the longest would cost memory in every row


def starter(
    model: str, questions: str, reward: str, fields: Mapping[str, Any], where: str
) -> tuple[dict[str, dict[str, Any]], Runtime]:
    """Returns {section: {field: value}} of a run that needs no further settings, and its runtime.

    Args:
      model: directory of a Hugging Face model; the name of a published model, for its shapes with
        random weights; '' for a small decoder that learns from the answers first.
      questions: value of `env.task`.
      reward: value of `env.reward`.
      fields: {'section.field': value} that the caller sets, `run.dir` among them.
      where: the caller's name in error messages.

    Raises:
      UserError: an argument cannot be used.
    """
    model = expanded(model, f"{where}: the model")
    pretrained = os.path.isdir(model) or "/" in model
    sections: dict[str, dict[str, Any]] = {name: {} for name in FIELDS}
    for path, value in fields.items():
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value

    def usual(section: str, **values: Any) -> None:
        sections[section] = values | sections[section]

    usual("run", steps=100)
    usual("precision", rollout="fp8", learner="fp8")
    usual("env", task=questions, reward=reward)
    usual("optimizer", learning_rate=1e-6 if pretrained else 3e-4)
    if model:
        usual("model", **{"checkpoint" if pretrained else "name": model})
    if pretrained:
        usual("data", tokenizer="checkpoint")
        usual("sft", steps=0)
    given = "questions" in sections["eval"]
    usual("eval", questions=_HELD_OUT)

    def made() -> ml_collections.ConfigDict:
        config = saved_config(sections, where)
        override(config, ())  # `~` in paths
        return config

    config = made()
    read_model(config)
    if load_tokenizer(config.data, config.model.checkpoint).chat_template is not None:
        usual("data", chat=True)
    check_source(config.env)
    counts = {"train": config.env.train_questions, "eval": config.eval.questions}
    counts["sft"] = config.sft.questions if config.sft.steps else 0
    found = load_questions(config.env, counts, config.run.seed).questions
    usual("rollout", group_size=8, prompts_per_step=_batch(16, found["train"]))
    if not given:
        sections["eval"]["questions"] = min(_HELD_OUT, max(1, len(found["eval"])))
    if found["sft"]:
        usual("sft", **_fine_tuning(found["sft"]))
    usual("rollout", **_lengths(found, make_runtime(made(), with_questions=False)))
    runtime = make_runtime(made())
    return {section: values for section, values in sections.items() if values}, runtime


def paid(runtime: Runtime, where: str) -> str:
    """Returns a message with the rewards of two responses to the runtime's first question.

    Raises:
      RewardError: the reward fails.
    """
    question = runtime.questions["train"][0]
    tally = Tally(where)
    scoring = Scoring(runtime.resolved.rewards, [question, question], [str(question.answer), ""])
    values, _ = scoring.result(tally)
    tally.check()
    return (
        f"{runtime.config.env.reward} pays {values[0]:g} for the answer {str(question.answer)!r} "
        f"of the first question, and {values[1]:g} for an empty response"
    )


def _fine_tuning(questions: list[Question]) -> dict[str, int]:
    """Returns the fields of section `sft` that fit the questions."""
    batch = _batch(32, questions)
    steps = max(20, min(400, _EPOCHS * len(questions) // batch))
    fields = {"steps": steps, "batch_size": batch}
    if steps // 10 < FIELDS["sft"]["warmup_steps"].default:
        fields["warmup_steps"] = steps // 10
    return fields


def _lengths(found: dict[str, list[Question]], runtime: Runtime) -> dict[str, int]:
    """Returns the fields `max_prompt_tokens` and `max_new_tokens` that fit the questions."""
    prompts = [
        len(encode_prompt(question.prompt, runtime.tokenizer, runtime.chat))
        for question in [*found["train"], *found["sft"]]
    ]
    new = _NEW_TOKENS
    if found["sft"]:
        answers = [
            encode_conversation(
                q.prompt, q.demonstration, runtime.tokenizer, runtime.chat, runtime.turns
            )[1]
            for q in found["sft"]
        ]
        new = _rounded([len(answer) for answer in answers], 4)
    return {"max_prompt_tokens": _rounded(prompts, 16), "max_new_tokens": new}


def _batch(most: int, questions: list[Question]) -> int:
    """Returns a batch size: at most `most`, and at most `_SHARE` of the questions."""
    return max(1, min(most, int(_SHARE * len(questions))))


def _rounded(lengths: list[int], multiple: int) -> int:
    """Returns the `_SHARE` quantile of lengths, rounded up to a multiple."""
    length = np.quantile(lengths, _SHARE, method="higher")
    return multiple * math.ceil(max(length, 1) / multiple)
