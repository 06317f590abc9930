"""A question with its reference answer, and the split that its text belongs to.

A question's split is a hash of its text, so no question can be in two splits, whatever seed or
file it comes from.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

SPLITS = ("sft", "train", "eval")
_SFT_SHARE = 0.3  # of all questions


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with its reference answer.

    Attributes:
      text: what is asked; of a conversation, the contents of its messages.
      answer: what rewards compare with.
      solution: the row's whole answer, where `answer` is a part of it.
      messages: a conversation that is more than one message of the user's: {'role', 'content'}
        each.
      row: all that the source says of the question, for rewards that ask for it.
      set: the held-out source that it is of, where there are several.
    """

    text: str
    answer: str
    solution: str = ""
    messages: Sequence[Mapping[str, str]] = ()
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    set: str = ""

    @property
    def prompt(self) -> str | Sequence[Mapping[str, str]]:
        """What the policy is given: a text, or messages for a chat template."""
        return self.messages or self.text

    @property
    def demonstration(self) -> str:
        """What supervised fine-tuning teaches."""
        return self.solution or self.answer


def split_of(text: str, eval_fraction: float = 0.1) -> str:
    """'eval' for this share of all texts, 'sft' for three tenths, 'train' for the rest."""
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
    """The question within `template`, in the place of '{question}'; of a conversation its last
    message."""
    if template == "{question}":
        return question
    text = question.messages[-1]["content"] if question.messages else question.text
    filled = template.replace("{question}", text)
    if not question.messages:
        return dataclasses.replace(question, text=filled)
    messages = [*question.messages[:-1], {**question.messages[-1], "content": filled}]
    return dataclasses.replace(question, text=joined(messages), messages=messages)


def joined(messages: Sequence[Mapping[str, str]]) -> str:
    """The contents of a conversation, one paragraph each."""
    return "\n\n".join(message["content"] for message in messages)
