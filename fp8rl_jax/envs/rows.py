"""Turns rows of a data set into questions.

Four forms are known. Plain: a column of texts and one of answers. Instruction: `instruction`, with
`input` below it if there is one. verl: `prompt` is a conversation, `reward_model.ground_truth` the
answer. TRL: `prompt` is a conversation, the answer a column. Messages keep all their fields; a
column `tools` of function schemas is passed to the chat template.

Not done: images in a conversation; a question spread over other columns.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import parse_json
from fp8rl_jax.envs.answers import answer_text, has_value, text_of_json
from fp8rl_jax.envs.question import DEMONSTRATION, Question, demonstrated, joined, objects
from fp8rl_jax.envs.rewards.written_number import whole_number

Rows = Iterator[tuple[str, Mapping[str, Any]]]  # (place of a row for error messages, row)

_INSTRUCTION = "instruction"
_INPUT = "input"
QUESTION_KEYS = ("question", "prompt", "problem", _INSTRUCTION, _INPUT)
_VERL_ANSWER = "reward_model.ground_truth"
ANSWER_KEYS = (
    _VERL_ANSWER,
    "answer",
    "solution",
    "target",
    "ground_truth",
    "label",
    "output",
    "completion",
    "response",
)
NO_ANSWER = "-"  # the value of env.answer_key for rows without an answer
_TOOLS = "tools"
_VERL_COLUMNS = ("data_source", "ability", "reward_model", "extra_info")  # not in a prompt
_MARK = "####"
_GROUPED_DIGITS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_MISSING = object()
_PLAIN = {"role", "content"}  # the fields of a plain message
_MESSAGE_KEYS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})  # last: ShareGPT
_LAST_ROLES = ("user", "tool")  # of the last message of a prompt


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A stand-in for the value of a row's column that Python cannot hold, with the reason."""

    reason: str


TWICE = Unreadable("the file has several columns of that name")


def without_unreadable(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a row without its unreadable columns."""
    return {key: value for key, value in row.items() if not isinstance(value, Unreadable)}


@dataclasses.dataclass(frozen=True)
class RowForm:
    """The columns in which a data set's rows hold question and answer.

    Attributes:
      question_key, answer_key: names of columns; 'a.b' is key b in column a; '-' for no answer.
      input_key: name of a column whose text is put below the question; '' for none.
      conversation: whether a question among the first rows is a list of messages.
      pattern: expression that finds the answer in its column; None to use the last '####'.
      mark: what counts as an answer after the last '####': 'line', any text, if the mark begins a
        line (all first rows end so); 'number', only a number (some first rows end so); '' if no
        first row ends so, but a later number still counts.
    """

    question_key: str
    answer_key: str
    input_key: str
    conversation: bool
    pattern: re.Pattern | None
    mark: str

    @property
    def has_answer(self) -> bool:
        """Whether the rows have an answer."""
        return self.answer_key != NO_ANSWER

    def __str__(self) -> str:
        answer = f"answer in {self.answer_key}" if self.has_answer else "no answer"
        if self.pattern is not None:
            answer += " by env.answer_pattern"
        elif self.mark:
            answer += f" after {_MARK}"
        kind = "rows"
        if self.conversation:
            kind = "verl's rows" if self.answer_key == _VERL_ANSWER else "TRL's conversational rows"
        below = f" and {self.input_key}" if self.input_key else ""
        return f"{kind} (question in {self.question_key}{below}, {answer})"

    @functools.cached_property
    def _used(self) -> set[str]:
        """The columns of the prompt and the answer, and those of verl that no prompt needs."""
        used = {self.question_key, self.answer_key, self.input_key}
        used |= {key.partition(".")[0] for key in (self.question_key, self.answer_key)}
        return used.union(_VERL_COLUMNS if self.answer_key == _VERL_ANSWER else ())

    def has_input(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a row has a text to put below the question."""
        return bool(self.input_key) and has_value(_find(row, self.input_key))

    def not_shown(self, row: Mapping[str, Any], known: Collection[str]) -> list[str]:
        """Names what a row holds beside prompt and answer: columns with a value, and of an answer
        that is a conversation all but the text of its last message; leaves out `known` names."""
        names = [
            str(key)
            for key, value in row.items()
            if key not in known
            and key not in self._used
            and has_value(value)
            and not (key == _TOOLS and _tools(row))
            and not (key == DEMONSTRATION and demonstrated(row))
        ]
        answer = _find(row, self.answer_key)
        if _is_conversation(answer):
            last = [k for k, v in answer[-1].items() if k not in _PLAIN and has_value(v)]
            rest = [f"{self.answer_key}.{name}" for name in last]
            rest += [f"{self.answer_key} before its last message"] if len(answer) > 1 else []
            names += [name for name in rest if name not in known]
        return names

    def question(self, place: str, row: Mapping[str, Any]) -> Question:
        """Turns a row into a question, whose text or answer may be empty.

        Args:
          place: place of the row, for errors.
          row: a row of the data set.

        Raises:
          UserError: the row lacks a column, or a column is no text or conversation.
        """
        value = _column(row, self.question_key, place, "env.question_key")
        messages: list[dict[str, Any]] = []
        if isinstance(value, list | tuple):
            messages = _messages(value, place, self.question_key)
            if messages[-1]["role"] not in _LAST_ROLES:
                raise UserError(
                    f"{place}: {self.question_key!r} ends with a message of the role "
                    f"{messages[-1]['role']!r}; a prompt ends with one of 'user' or 'tool'"
                )
            text = joined(messages)
        else:
            text = _text(value, place, self.question_key)
        if self.input_key and (below := _text(_find(row, self.input_key), place, self.input_key)):
            if messages:
                raise UserError(
                    f"{place}: {self.question_key!r} is a conversation, and {self.input_key!r} has "
                    "a text: name the column of the question by env.question_key"
                )
            text = "\n\n".join(filter(str.strip, (text, below)))
        whole = answer = ""
        if self.has_answer:
            whole = self._whole_answer(place, row)
            answer = self._part(whole, place)
        plain = not messages or (
            len(messages) == 1 and messages[0].keys() == _PLAIN and messages[0]["role"] == "user"
        )
        kept = without_unreadable(row)
        tools = _tools(row)
        if tools:
            _text(text_of_json(tools), place, _TOOLS)
        if shown := demonstrated(kept):
            _text(text_of_json(shown), place, DEMONSTRATION)
        return Question(
            text,
            answer,
            whole if whole != answer else "",
            () if plain else messages,
            kept,
            tools=tools or (),
        )

    def _whole_answer(self, place: str, row: Mapping[str, Any]) -> str:
        value = _column(row, self.answer_key, place, "env.answer_key")
        if _is_conversation(value):
            value = _messages(value, place, self.answer_key)
        try:
            value = _last_or_text(value)
        except (ValueError, RecursionError) as error:
            reason = str(error) or "it is nested too deeply"
            raise UserError(
                f"{place}: {self.answer_key!r} cannot be written as a text ({reason})"
            ) from None
        return _text(value, place, self.answer_key)

    def _part(self, whole: str, place: str) -> str:
        """Extracts the answer from the text of its column."""
        if self.pattern is None:
            tail = _behind_mark(whole)
            if tail is None:
                return whole
            if whole_number(tail):
                return tail.replace(",", "") if _GROUPED_DIGITS.fullmatch(tail) else tail
            if self.mark and (not tail or (self.mark == "line" and _begins_line(whole))):
                return tail
            return whole
        matches = [*self.pattern.finditer(whole)] if whole else []
        if whole and not matches:
            raise UserError(
                f"{place}: env.answer_pattern = {self.pattern.pattern!r} is not in the answer "
                f"{whole[-60:]!r}: change the pattern, or leave it out"
            )
        return matches[-1].group(1 if self.pattern.groups else 0) or "" if matches else ""


def _behind_mark(whole: str) -> str | None:
    """Returns the text after the last mark; None without a mark, or if it has several lines."""
    _, mark, tail = whole.rpartition(_MARK)
    tail = tail.strip()
    return tail if mark and len(tail.splitlines()) <= 1 else None


def _begins_line(whole: str) -> bool:
    """Returns whether the last mark is at the beginning of a line."""
    before = whole.rpartition(_MARK)[0]
    return not before or before.endswith("\n")


def recognise(place: str, rows: Sequence[Mapping[str, Any]], env: Any) -> RowForm:
    """Recognises the form of a data set.

    Args:
      place: place of the first row, for errors.
      rows: the first rows. Of the usual columns, the first that has a value in any of these rows is
        taken, else the first that exists.
      env: the section of a configuration.

    Raises:
      UserError: there is no column for the question or the answer.
    """
    question = env.question_key or _first(rows, QUESTION_KEYS, place, "question")
    with_input = question == _INSTRUCTION and not env.question_key
    answer = env.answer_key or _first(rows, ANSWER_KEYS, place, "answer")
    answers = [] if answer == NO_ANSWER else [_find(row, answer) for row in rows]
    return RowForm(
        question_key=question,
        answer_key=answer,
        input_key=_INPUT if with_input else "",
        conversation=any(isinstance(_find(row, question), list | tuple) for row in rows),
        pattern=re.compile(env.answer_pattern) if env.answer_pattern else None,
        mark=_mark([text for value in answers if (text := _answer_or_none(value))]),
    )


def _last_or_text(value: Any) -> Any:
    """Returns the content of a conversation's last message, or any other answer as text."""
    return value[-1].get("content") if _is_conversation(value) else answer_text(value)


def _answer_or_none(value: Any) -> str | None:
    """Returns an answer as text; None if it is blank or cannot be a text."""
    try:
        text = _last_or_text(value)
        text = text.decode() if isinstance(text, bytes) else text
    except (ValueError, RecursionError):  # an error where the row is read
        return None
    return text if isinstance(text, str) and text.strip() else None


def _mark(answers: list[str]) -> str:
    """Returns `RowForm.mark` for the answers of the first rows."""
    tails = [_behind_mark(answer) for answer in answers]
    if tails and all(t and _begins_line(a) for t, a in zip(tails, answers, strict=True)):
        return "line"
    return "number" if any(tail is not None and whole_number(tail) for tail in tails) else ""


def _first(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], place: str, part: str) -> str:
    """Returns the first of the usual columns `keys` of a question or an answer, the `part`."""
    for key in keys:
        if any(has_value(_find(row, key)) for row in rows):
            return key
    for key in keys:
        if any(key in row for row in rows):
            return key
    none = ", or write '-' for rows without one" if part == "answer" else ""
    raise UserError(
        f"{place}: no column is known as the {part} ({', '.join(keys)}); the row has "
        f"{names_of(rows[0])}: name one by env.{part}_key{none}"
    )


def names_of(names: Any) -> str:
    """Joins names, at most twelve, for a message."""
    shown = [str(name)[:60] for name in names]
    more = f" and {len(shown) - 12:,} more" if len(shown) > 12 else ""
    return (", ".join(shown[:12]) + more) or "nothing"


def _find(row: Mapping[str, Any], key: str, missing: Any = None) -> Any:
    """Returns the value of a column, or for 'a.b' of key b in column a; `missing` if there is none.
    If column a is None, so is each key in it."""
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    if not dot or head not in row:
        return missing
    inner = row[head]
    if isinstance(inner, Mapping):
        return _find(inner, rest, missing)
    return inner if inner is None or isinstance(inner, Unreadable) else missing


def _column(row: Mapping[str, Any], key: str, place: str, field: str) -> Any:
    value = _find(row, key, _MISSING)
    if value is _MISSING:
        raise UserError(
            f"{place}: the row has no {key!r}, only {names_of(row)}: put it there, or name another "
            f"column by {field}"
        )
    if isinstance(value, Unreadable):
        raise UserError(f"{place}: {key!r} cannot be read ({value.reason}): save the data anew")
    return value


def _text(value: Any, place: str, key: str) -> str:
    """Returns the value of a column as text; raises UserError for other types than texts."""
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


def _is_conversation(value: Any) -> bool:
    """Returns whether an answer is a list of messages."""
    return _is_list_of(value, lambda part: isinstance(part, Mapping) and "role" in part)


def _is_list_of(value: Any, good: Callable[[Any], Any]) -> bool:
    """Returns whether a value is a non-empty list whose elements are all `good`."""
    return isinstance(value, list) and bool(value) and all(map(good, value))


def _messages(value: Any, place: str, key: str) -> list[dict[str, Any]]:
    """Checks and copies a conversation [{'role', 'content', ...}, ...] of at least one message.
    Further fields with a value are kept; a message with tool calls needs no content."""

    def good(message: Any) -> Any:
        has_role = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        return has_role and ("content" in message or message.get("tool_calls"))

    if not _is_list_of(list(value) if isinstance(value, tuple) else value, good):
        raise UserError(
            f"{place}: {key!r} is {_kind(value)}; write a conversation, [{{'role': 'user', "
            "'content': TEXT}}]"
        )
    return [_message(m, place, key) for m in value]


def _message(message: Mapping[str, Any], place: str, key: str) -> dict[str, Any]:
    copied: dict[str, Any] = {"role": _text(message["role"], place, f"{key}.role")}
    if "content" in message:
        content = message["content"]
        calls = content is None and message.get("tool_calls")
        copied["content"] = None if calls else _text(content, place, f"{key}.content")
    for name, part in message.items():
        if name not in copied and (part := without_none(part)) is not None:
            _text(text_of_json(part), place, f"{key}.{name}")
            copied[name] = part
    return copied


def without_none(value: Any) -> Any:
    """Removes keys whose value is None: in Arrow files each message, and each tool, has the keys of
    all of them."""
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list | tuple) else value


def _tools(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the function schemas in the column `tools` (a list or its JSON); [] for none."""
    tools = objects(without_none(row.get(_TOOLS)))
    return tools if all(tools) else []


def is_json_of_messages(question: Question) -> bool:
    """Returns whether a question's text is the JSON of a conversation, or an object with one."""
    if question.messages or not question.text.lstrip().startswith(("[", "{")):
        return False
    try:
        value = parse_json(question.text)
    except ValueError:
        return False

    def is_message(part: Any) -> bool:
        return isinstance(part, dict) and any(part.keys() >= keys for keys in _MESSAGE_KEYS)

    parts = [value, [value], *(value.values() if isinstance(value, dict) else ())]
    return any(_is_list_of(part, is_message) for part in parts)


def _kind(value: Any) -> str:
    try:
        return f"{type(value).__name__} {str(value)[:60]!r}"
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return type(value).__name__
