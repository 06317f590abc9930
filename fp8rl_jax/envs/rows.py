"""Rows of a data set become questions: which form they have, and where question and answer are.

Three forms are known by their first row. Plain columns: a text and its answer. verl's: `prompt` is
a conversation and `reward_model.ground_truth` the answer. TRL's: `prompt` is a conversation, and
the answer a column.

Not done: pictures and tools in a conversation; a question in several columns.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fp8rl_jax.envs.question import Question, joined
from fp8rl_jax.errors import UserError

Rows = Iterator[tuple[str, Mapping[str, Any]]]  # where a row is, for an error, and the row

QUESTION_KEYS = ("question", "prompt", "problem", "input")
_VERL_ANSWER = "reward_model.ground_truth"
ANSWER_KEYS = (
    _VERL_ANSWER, "answer", "solution", "target", "ground_truth", "label", "output", "completion",
)  # fmt: skip
NO_ANSWER = "-"
_MARK = "####"
_GROUPED_DIGITS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class RowForm:
    """Where the rows of a data set have question and answer.

    Attributes:
      question_key, answer_key: names of columns; a dot goes into a column; '-' for no answer.
      conversation: the question is a list of messages.
      pattern: finds the answer in its column; None for the text after the last '####', if there
        is one.
      marked: the first row's answer has that mark.
    """

    question_key: str
    answer_key: str
    conversation: bool
    pattern: re.Pattern | None
    marked: bool

    @property
    def has_answer(self) -> bool:
        """Whether rows have an answer at all."""
        return self.answer_key != NO_ANSWER

    def __str__(self) -> str:
        answer = f"answer in {self.answer_key}" if self.has_answer else "no answer"
        if self.pattern is not None:
            answer += " by env.answer_pattern"
        elif self.marked:
            answer += f" after {_MARK}"
        kind = "rows"
        if self.conversation:
            kind = "verl's rows" if self.answer_key == _VERL_ANSWER else "TRL's conversational rows"
        return f"{kind} (question in {self.question_key}, {answer})"

    def question(self, place: str, row: Mapping[str, Any]) -> Question:
        """The row as a question; its text or answer may be empty.

        Args:
          place: of the row, for errors.
          row: of the data set.

        Raises:
          UserError: the row lacks a column, or a column is no text or conversation.
        """
        value = _column(row, self.question_key, place, "env.question_key")
        messages = _messages(value, place, self.question_key) if self.conversation else []
        if messages and messages[-1]["role"] != "user":
            raise UserError(
                f"{place}: {self.question_key!r} ends with a message of the role "
                f"{messages[-1]['role']!r}; a prompt ends with one of 'user'"
            )
        text = joined(messages) if self.conversation else _text(value, place, self.question_key)
        whole = answer = ""
        if self.has_answer:
            whole = _answer_text(
                _column(row, self.answer_key, place, "env.answer_key"), place, self.answer_key
            )
            answer = self._part(whole, place)
        return Question(
            text, answer, whole if whole != answer else "", messages if len(messages) > 1 else (),
            row,
        )  # fmt: skip

    def _part(self, whole: str, place: str) -> str:
        """The answer within its column."""
        if self.pattern is None:
            _, mark, tail = whole.rpartition(_MARK)
            tail = tail.strip()
            if _GROUPED_DIGITS.fullmatch(tail):
                tail = tail.replace(",", "")
            return tail if mark else whole
        found = None if not whole else [*self.pattern.finditer(whole)]
        if found == []:
            raise UserError(
                f"{place}: env.answer_pattern = {self.pattern.pattern!r} is not in the answer "
                f"{whole[-60:]!r}: change the pattern, or leave it out"
            )
        return found[-1].group(1 if self.pattern.groups else 0) or "" if found else ""


def recognise(place: str, row: Mapping[str, Any], env: Any) -> RowForm:
    """The form of a data set by its first row; `env` is the section of a configuration.

    Raises:
      UserError: no column for the question or the answer.
    """
    question = env.question_key or _first(row, QUESTION_KEYS, place, "question")
    answer = env.answer_key or _first(row, ANSWER_KEYS, place, "answer")
    conversation = isinstance(_column(row, question, place, "env.question_key"), list | tuple)
    pattern = re.compile(env.answer_pattern) if env.answer_pattern else None
    marked = answer != NO_ANSWER and _MARK in str(_column(row, answer, place, "env.answer_key"))
    return RowForm(question, answer, conversation, pattern, marked)


def _first(row: Mapping[str, Any], keys: tuple[str, ...], place: str, what: str) -> str:
    for key in keys:
        if _find(row, key) is not None:
            return key
    none = ", or write '-' for rows without one" if what == "answer" else ""
    raise UserError(
        f"{place}: no column is known as the {what} ({', '.join(keys)}); the row has "
        f"{', '.join(map(str, row))}: name one by env.{what}_key{none}"
    )


def _find(row: Mapping[str, Any], key: str) -> Any:
    """The value of a column, or of 'column.key' in it; None if there is none."""
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    inner = row.get(head) if dot else None
    return _find(inner, rest) if isinstance(inner, Mapping) else None


def _column(row: Mapping[str, Any], key: str, place: str, field: str) -> Any:
    if key == NO_ANSWER:
        return None
    value = _find(row, key)
    if value is None and key not in row:
        raise UserError(
            f"{place}: the row has no {key!r}, only {', '.join(map(str, row)) or 'nothing'}: put "
            f"it there, or name another column by {field}"
        )
    return value


def _text(value: Any, place: str, key: str) -> str:
    """A column as text."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise UserError(f"{place}: {key!r} is not UTF-8: save the data as UTF-8") from None
    if not isinstance(value, str):
        raise UserError(
            f"{place}: {key!r} is {_kind(value)}; name a column of texts or conversations"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: {key!r} has half of a character: save the data anew") from None
    return value


def _answer_text(value: Any, place: str, key: str) -> str:
    """An answer as text: numbers as Python writes them, other values as JSON."""
    if isinstance(value, numbers.Number):
        return str(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
        return _messages(value, place, key)[-1]["content"]
    if isinstance(value, list | tuple | Mapping):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return _text(value, place, key)


def _messages(value: Any, place: str, key: str) -> list[dict[str, str]]:
    """A conversation: [{'role', 'content'}, ...], not empty."""
    good = isinstance(value, list | tuple) and value and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value
    )  # fmt: skip
    if not good:
        raise UserError(
            f"{place}: {key!r} is {_kind(value)}; write a conversation, [{{'role': 'user', "
            "'content': TEXT}}]"
        )
    return [
        {"role": m["role"], "content": _text(m["content"], place, f"{key}.content")} for m in value
    ]


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
