"""Loads a run's questions: as many as its configuration asks for, and short enough to fit."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import (
    ChatFormat,
    Tokenizer,
    Turns,
    encode_conversation,
    encode_prompt,
    merges,
    pad_demonstrations,
    pad_prompts,
)
from fp8rl_jax.envs import Data, Question, check_source, eval_tasks, load_questions, tool_schemas
from fp8rl_jax.training.kept_lengths import KeptLengths, Lengths

_ENOUGH = 100  # held-out questions: a standard error of at most 5 points


def load_data(
    config, tokenizer: Tokenizer, chat: ChatFormat | None, turns: Turns | None = None
) -> Data:
    """Returns the questions of a run by split; in a chat with the tools of `env.tools`, unless
    their rows have others. `turns`: form of conversations with an environment.

    Raises:
      UserError: a source cannot be read, a question does not fit its slots (a data set's questions
        that do not fit are dropped, unless `env.overlong` is 'error'), or there are too few.
    """
    check_source(config.env)
    counts = {
        "sft": config.sft.questions if config.sft.steps else 0,
        "train": config.env.train_questions,
        "eval": config.eval.questions,
    }
    lengths = _Lengths(config, tokenizer, chat, turns)
    drop = config.env.overlong == "drop"
    tools = tool_schemas(config.env.tools) if chat else ()
    data = load_questions(config.env, counts, config.run.seed, lengths.fit if drop else None, tools)
    lengths.kept.keep()
    demonstrations = [(q.prompt, q.demonstration) for q in data.questions["sft"]]
    if not (data.note and drop):
        slots = config.rollout.max_prompt_tokens
        prompts = [q.prompt for split in data.questions.values() for q in split]
        pad_prompts(prompts, tokenizer, slots, chat)
        if demonstrations:
            pad_demonstrations(
                demonstrations, tokenizer, slots, config.rollout.max_new_tokens, chat, turns
            )
    if data.note:
        _check_counts(config, data, lengths)
    notes = (data.note, merges(demonstrations, tokenizer, chat))
    return data._replace(note="; ".join(filter(None, notes)))


def few_held_out(questions: Sequence[Question]) -> str:
    """Returns a warning if an evaluation of these questions says little; '' if not. With several
    sets it is of the smallest."""
    sizes = collections.Counter(question.set for question in questions)
    count = min(sizes.values(), default=_ENOUGH)
    if count >= _ENOUGH:
        return ""
    held_out = "only 1 question is" if count == 1 else f"only {count} questions are"
    return (
        f"warning: {held_out} held out, so one standard error of an accuracy is up to "
        f"{50 / math.sqrt(count):.0f} points: hold out more by env.eval_fraction, env.eval_task or "
        "eval.questions"
    )


class _Lengths:
    """Checks which questions fit their slots, and collects the lengths of those that do not."""

    def __init__(self, config, tokenizer: Tokenizer, chat: ChatFormat | None, turns: Turns | None):
        self._rollout = config.rollout
        self._tokenizer = tokenizer
        self._chat = chat
        self._turns = turns
        self.kept = KeptLengths(config, chat)
        self.too_long: dict[str, list[int]] = {}

    def fit(self, split: str, question: Question) -> bool:
        """Returns whether the prompt, and a demonstration with its end token, fit."""
        shown = question.demonstration if split == "sft" else None

        def count() -> Lengths:
            if shown is None:
                return len(encode_prompt(question.prompt, self._tokenizer, self._chat)), 0
            prompt, response, _ = encode_conversation(
                question.prompt, shown, self._tokenizer, self._chat, self._turns
            )
            return len(prompt), len(response)

        about: list[Any] = [question.prompt, shown]
        if self._turns is not None:
            about += [self._turns.role, self._turns.most]
        prompt, response = self.kept.of(about, count)
        for field, length in (("max_prompt_tokens", prompt), ("max_new_tokens", response)):
            if length > self._rollout[field]:
                self.too_long.setdefault(field, []).append(length)
                return False
        return True


def _check_counts(config, data: Data, lengths: _Lengths) -> None:
    """Raises UserError if a data set gives fewer questions than a step takes."""
    least = {
        "train": (config.rollout.prompts_per_step, "rollout.prompts_per_step"),
        "eval": (1, "an evaluation"),
    }
    if config.sft.steps:
        least["sft"] = (config.sft.batch_size, "sft.batch_size")
    sets = eval_tasks(config.env)
    for split, (count, field) in least.items():
        found = len(data.questions[split])
        where = f"the split {split!r}"
        if split == "eval" and len(sets) > 1:
            sizes = collections.Counter(q.set for q in data.questions[split])
            smallest = min(sets, key=lambda name: sizes[name])
            found = sizes[smallest]
            where = f"the evaluation set {smallest!r}"
        if found >= count:
            continue
        advice = "take more questions, or lower it"
        if split == "eval":
            advice = "raise env.eval_fraction, or name another source by env.eval_task"
        for name, long in lengths.too_long.items():
            advice = (
                f"{len(long):,} are too long for rollout.{name} = {config.rollout[name]} (half of "
                f"these take up to {sorted(long)[len(long) // 2]} tokens, the longest "
                f"{max(long)}): raise it"
            )
        raise UserError(
            f"env.task: {found} questions are left for {where}, and {field} takes {count}: {advice}"
        )
