"""A question with its reference answer, and the split that its text belongs to.

A question's split is a hash of its text, so no question can be in two splits, whatever seed or
file it comes from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

SPLITS = ("sft", "train", "eval")  # demonstrations, questions of RL, held-out questions
_SFT_SHARE = 0.3  # of all questions


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with its reference answer.

    Attributes:
      text: what is asked; of a conversation, the contents of its messages.
      answer: what rewards compare with.
      solution: the row's whole answer, where `answer` is a part of it.
      messages: a conversation that is more than one plain message of the user's: {'role',
        'content'} each, with what else the source says of it (tool_calls, name, ...).
      row: all that the source says of the question, for rewards that ask for it.
      set: the held-out source that it is of, where there are several.
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
        """What the policy is given: a text, or messages for a chat template, or {'messages',
        'tools'} for one."""
        if self.tools:
            messages = self.messages or [{"role": "user", "content": self.text}]
            return {"messages": messages, "tools": self.tools}
        return self.messages or self.text

    @property
    def identity(self) -> str:
        """Equal for two questions whose prompts are."""
        if not (self.messages or self.tools):
            return self.text
        return json.dumps([self.text, self.messages, self.tools], default=repr)

    @property
    def demonstration(self) -> str:
        """What supervised fine-tuning teaches."""
        return self.solution or self.answer


def split_of(text: str, eval_fraction: float = 0.1) -> str:
    """'eval' for this share of all texts, 'sft' for three tenths, 'train' for the rest.

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
    """At most `count` of the questions, drawn by a hash of their texts; their order is kept."""
    if len(questions) <= count:
        return list(questions)
    digests = [hashlib.sha256(b"subset" + q.text.encode()).digest() for q in questions]
    last = sorted(digests)[count - 1] if count else b""
    return [q for q, digest in zip(questions, digests, strict=True) if digest <= last]


def with_template(question: Question, template: str) -> Question:
    """The question within `template`, in the place of '{question}'; of a conversation the user's
    last message."""
    if template == "{question}":
        return question
    if not question.messages:
        filled = template.replace("{question}", question.text)
        return dataclasses.replace(question, text=filled)
    messages = [dict(message) for message in question.messages]
    asked = [m for m in messages if m["role"] == "user"] or messages[-1:]
    asked[-1]["content"] = template.replace("{question}", asked[-1].get("content") or "")
    return dataclasses.replace(question, text=joined(messages), messages=messages)


def joined(messages: Sequence[Mapping[str, Any]]) -> str:
    """The contents of a conversation, one paragraph each."""
    return "\n\n".join(m["content"] for m in messages if m.get("content") is not None)
