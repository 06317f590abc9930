"""Defines a question with its reference answer, and its split.

The split follows from a hash of the text, so no question is in two splits, whatever its source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_jax.base.json_file import parse_json

DEMONSTRATION = "demonstration"  # column with the messages of a demonstration
SPLITS = ("sft", "train", "eval")  # demonstrations, questions of RL, held-out questions
_SFT_SHARE = 0.3  # of all questions


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with its reference answer.

    Attributes:
      text: the question; for a conversation, the joined contents of its messages.
      answer: text that rewards compare responses with.
      solution: the row's full answer, if `answer` is only a part of it.
      messages: messages of a conversation, {'role', 'content'} each and the source's further fields
        (tool_calls, name, ...); empty for one plain user message.
      row: all columns of the source, for rewards that take them.
      set: name of the evaluation source, if there are several.
      tools: function schemas for the chat template.
    """

    text: str
    answer: str
    solution: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    set: str = ""
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def prompt(self) -> str | Sequence[Mapping[str, Any]] | Mapping[str, Any]:
        """The policy's prompt: a text, or for a chat template messages or {'messages', 'tools'}."""
        if self.tools:
            return {
                "messages": self.messages or [{"role": "user", "content": self.text}],
                "tools": self.tools,
            }
        return self.messages or self.text

    @property
    def identity(self) -> str:
        """A key of the prompt: equal prompts have equal keys."""
        if not (self.messages or self.tools):
            return self.text
        return json.dumps([self.text, self.messages, self.tools], default=repr)

    @property
    def demonstration(self) -> str | Sequence[Mapping[str, Any]]:
        """The answer that supervised fine-tuning trains on; messages after the prompt, every second
        of the environment, if the row has such a column `DEMONSTRATION`."""
        return demonstrated(self.row) or self.solution or self.answer


def demonstrated(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the messages in a row's column `DEMONSTRATION`; empty if it holds no messages."""
    return objects(row.get(DEMONSTRATION))


def objects(value: Any) -> list[Mapping[str, Any]]:
    """Returns a list of objects that may be JSON text; empty if `value` is anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = parse_json(value)
    if isinstance(value, list | tuple) and all(isinstance(part, Mapping) for part in value):
        return list(value)
    return []


def split_of(text: str, eval_fraction: float = 0.1) -> str:
    """Returns the split of a text: 'eval' for a share of `eval_fraction` of all texts, 'sft' for a
    share of 0.3, else 'train'.

    Example:
      >>> {split_of("What is 7 + 9?") for _ in range(3)}
      {'train'}
    """
    digest = hashlib.sha256(text.encode()).digest()
    place = (digest[0] % 10 + int.from_bytes(digest[1:5]) / 2**32) / 10
    if place < eval_fraction:
        return "eval"
    return "sft" if place < eval_fraction + _SFT_SHARE else "train"


def subset(questions: Sequence[Question], count: int) -> list[Question]:
    """Returns at most `count` questions, chosen by a hash of their texts, in the given order."""
    if len(questions) <= count:
        return list(questions)
    digests = [hashlib.sha256(b"subset" + q.text.encode()).digest() for q in questions]
    last = sorted(digests)[count - 1] if count else b""
    return [q for q, digest in zip(questions, digests, strict=True) if digest <= last]


def with_template(question: Question, template: str) -> Question:
    """Fills `template`: '{question}' becomes the question's text; in a conversation, `template`
    replaces the user's last message."""
    if template == "{question}":
        return question
    if not question.messages:
        return dataclasses.replace(question, text=template.replace("{question}", question.text))
    messages = [dict(message) for message in question.messages]
    asked = [m for m in messages if m["role"] == "user"] or messages[-1:]
    asked[-1]["content"] = template.replace("{question}", asked[-1].get("content") or "")
    return dataclasses.replace(question, text=joined(messages), messages=messages)


def joined(messages: Sequence[Mapping[str, Any]]) -> str:
    """Joins the contents of messages as paragraphs."""
    return "\n\n".join(m["content"] for m in messages if m.get("content") is not None)
