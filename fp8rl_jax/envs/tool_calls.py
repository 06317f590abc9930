"""Finds the tool calls in a reply of the policy, in the form that its model was trained with.

::

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>                 Hermes, Qwen2.5, Qwen3
    <tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>    Qwen3-Coder
    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]                     Mistral
    <|python_tag|>{"name": ..., "parameters": {...}}; {...}                  Llama 3.1 to 3.3

In Llama's form `<|python_tag|>` may be missing; then the calls are the whole reply. Calls in a
thought, <think>...</think>, do not count; a thought may begin in the prompt. Texts in the JSON of a
call may contain these tags, texts in Qwen3-Coder's form may not.

Not done: Mistral's newer form [TOOL_CALLS]NAME[ARGS]{...}, and calls written as Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

# The empty match at the beginning is the place of a call without a tag.
_TAG = re.compile(r"\A|</?think>|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>")
_SPACE = re.compile(r"\s*")
_BARE = re.compile(  # a call of Llama begins so, and hardly any other JSON does
    r'''\{ \s* (?:"type" \s* : \s* "function" \s* , \s*)?
    "name" \s* : \s* "[^"]*" \s* , \s* "(?:parameters|arguments)"''',
    re.VERBOSE,
)
_FORM = 'write {"name": ..., "arguments": {...}}'
_MOST_CALLS = 64  # of one reply
_XML_FORM = "write <function=NAME>, <parameter=KEY>...</parameter> for each argument, </function>"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the policy wrote it.

    Attributes:
      name: name of the tool, perhaps unknown.
      arguments: values by name, as JSON has them.
      texts: whether all values are texts, as in Qwen3-Coder's form, whatever the tool takes.
    """

    name: str
    arguments: Mapping[str, Any]
    texts: bool = False


class _Refusal(Exception):
    """A sentence for the policy: what is wrong with its call, and what to write."""


def parse_tool_calls(reply: str) -> list[ToolCall | str]:
    """Returns the tool calls of a reply in order: a ToolCall, or a line 'Error: ...' for the policy
    if a call is malformed. Empty if the reply calls nothing.

    At most 64 calls are read, and an error says so if there are more. The time is linear in the
    reply's length, whatever it contains: tags are found in one pass, and behind each of those that
    are read the text is read once.

    Example:
      >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>')
      [ToolCall(name='add', arguments={'x': 1}, texts=False)]
    """
    calls: list[ToolCall | str] = []
    thinking = None  # until the first tag of a thought
    read = 0  # where the calls end that were read
    tags = list(_TAG.finditer(reply))
    ends = [tag.start() for tag in tags[1:]] + [len(reply)]
    for tag, end in zip(tags, ends, strict=True):
        if tag.start() < read:
            continue
        if tag[0] == "<think>":
            thinking = True
        elif tag[0] == "</think>":
            if thinking is None:  # the prompt began the thought
                calls.clear()
            thinking = False
        reader = _READERS.get(tag[0])
        if reader and not thinking and len(calls) <= _MOST_CALLS:
            try:
                found, read = reader(reply, tag.end(), end)
            except _Refusal as refusal:
                found, read = [f"Error: {refusal}"], tag.end()
            calls += found
    if len(calls) > _MOST_CALLS:
        calls[_MOST_CALLS:] = [f"Error: only the first {_MOST_CALLS} calls of a reply are made"]
    return calls


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """Reads a JSON value that begins at `start`, after white space; returns it with its end, white
    space included."""
    start = _after_space(text, start)
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        place = getattr(error, "pos", start) - start
        raise _Refusal(f"the tool call is no JSON at its character {place}; {_FORM}") from None
    return value, _after_space(text, end)


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found
    return found.end()


def _call(value: Any) -> ToolCall | str:
    """Turns a JSON value into a call."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if isinstance(arguments, dict):
            return ToolCall(value["name"], arguments)
    return f"Error: the tool call lacks a name or arguments; {_FORM}"


# Each reader gets the reply, the end of the tag and the beginning of the next tag. It returns the
# calls and where they end, or raises a _Refusal.


def _tagged(text: str, start: int, end: int) -> tuple[list[ToolCall | str], int]:
    start = _after_space(text, start)
    if text.startswith("<function=", start):
        return [_xml_call(text[start:end])], end
    value, behind = _json_at(text, start)
    if behind < len(text) and not text.startswith("</tool_call>", behind):
        raise _Refusal("text follows the JSON of the tool call; write </tool_call> there")
    return [_call(value)], behind


def _xml_call(text: str) -> ToolCall | str:
    """Turns '<function=NAME> ... </function>' into a call."""
    name, _, body = text.removeprefix("<function=").partition(">")
    *written, rest = body.split("</parameter>")
    arguments = {}
    for parameter in written:
        head, closed, value = parameter.lstrip().partition(">")
        if not (closed and head.startswith("<parameter=")):
            return f"Error: a parameter of the tool call is malformed; {_XML_FORM}"
        key = head.removeprefix("<parameter=").strip()
        arguments[key] = value.removeprefix("\n").removesuffix("\n")
    if rest.strip() != "</function>":
        return f"Error: the tool call does not end with </function>; {_XML_FORM}"
    return ToolCall(name.strip(), arguments, texts=True)


def _listed(text: str, start: int, end: int) -> tuple[list[ToolCall | str], int]:
    values, behind = _json_at(text, start)
    if not isinstance(values, list):
        raise _Refusal('the tool calls are no list; write [{"name": ..., "arguments": {...}}]')
    return [_call(value) for value in values], behind


def _separated(text: str, start: int, end: int) -> tuple[list[ToolCall | str], int]:
    calls = []
    while True:
        value, start = _json_at(text, start)
        calls.append(_call(value))
        if start == len(text):
            return calls, start
        if text[start] != ";":
            raise _Refusal("text follows the JSON of the tool call; write ';' between calls")
        start += 1


def _bare(text: str, start: int, end: int) -> tuple[list[ToolCall | str], int]:
    if _BARE.match(text, _after_space(text, start)):
        return _separated(text, start, end)
    return [], start  # an answer, perhaps in JSON


_READERS = {
    "": _bare,
    "</think>": _bare,
    "<tool_call>": _tagged,
    "[TOOL_CALLS]": _listed,
    "<|python_tag|>": _separated,
}
