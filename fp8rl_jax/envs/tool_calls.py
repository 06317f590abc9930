"""Finds the tool calls in a reply of the policy, in the form that its model was trained with.

::

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>                 Hermes, Qwen2.5, Qwen3
    <tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>    Qwen3-Coder
    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]                     Mistral, to 2024
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}[TOOL_CALLS]...                    Mistral, from 2025
    <|python_tag|>{"name": ..., "parameters": {...}}; {...}                  Llama 3.1 to 3.3
    <|python_start|>[NAME(KEY=VALUE, ...), ...]<|python_end|>                Llama 3.2 and 4
    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>  Kimi-K2
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>              DeepSeek-V3.1
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a block of JSON        DeepSeek-V3, R1

In Mistral's newer form [CALL_ID]ID and [ARGS] may be missing. In Llama's forms the tags may be
missing; then the calls are the whole reply. Calls in a thought, <think>...</think>, do not count; a
thought may begin in the prompt. Texts in the JSON of a call may contain these tags, texts in
Qwen3-Coder's form and in Python may not.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

# The empty match at the beginning is the place of a call without a tag.
_TAG = re.compile(
    r"\A|</?think>|</?tool_call>|\[TOOL_CALLS\]|<\|python_(?:tag|start|end)\|>"
    r"|<\|tool_call_begin\|>|<｜tool▁call▁begin｜>"
)
_SPACE = re.compile(r"\s*")
_BARE = re.compile(  # a call of Llama begins so, and hardly any other JSON does
    r'''\{ \s* (?:"type" \s* : \s* "function" \s* , \s*)?
    "name" \s* : \s* "[^"]*" \s* , \s* "(?:parameters|arguments)"''',
    re.VERBOSE,
)
_BARE_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(\s*(?:[A-Za-z_]\w*\s*=(?!=)|\))")
_MISTRAL = "[TOOL_CALLS]"
# What is between the tag of a call and the JSON of its arguments, by tag.
_HEADS = {
    _MISTRAL: r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?",
    "<|tool_call_begin|>": (
        r"\s*(?:functions\.)?([^\s<{]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
    ),
    "<｜tool▁call▁begin｜>": (
        r"\s*(?:function<｜tool▁sep｜>)?([^\s<{]+)(?:<｜tool▁sep｜>)?(?:\s*```json)?"
    ),
}
_FORM = 'write {"name": ..., "arguments": {...}}'
_NAMED_FORM = "write its arguments as a JSON object"
_PYTHON_FORM = "write [NAME(KEY=VALUE, ...)]"
_JSON_NAMES = {"true": True, "false": False, "null": None}  # also taken in Python
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


def _json_at(text: str, start: int, form: str = _FORM) -> tuple[Any, int]:
    """Reads a JSON value that begins at `start`, after white space; returns it with its end, white
    space included. `form` is what to write instead of something else."""
    start = _after_space(text, start)
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        place = getattr(error, "pos", start) - start
        raise _Refusal(f"the tool call is no JSON at its character {place}; {form}") from None
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


def _named(text: str, start: int, end: int, head: str) -> tuple[list[ToolCall | str], int]:
    found = re.compile(head).match(text, start, end)
    if not found:
        raise _Refusal(f"the tool call does not begin with a name; write NAME, then {_NAMED_FORM}")
    arguments, behind = _json_at(text, found.end(), _NAMED_FORM)
    if not isinstance(arguments, dict):
        raise _Refusal(f"the tool call has no arguments by name; {_NAMED_FORM}")
    return [ToolCall(found[1], arguments)], behind


def _mistral(text: str, start: int, end: int) -> tuple[list[ToolCall | str], int]:
    if not text.startswith(("[", "{"), _after_space(text, start)):
        return _named(text, start, end, _HEADS[_MISTRAL])
    values, behind = _json_at(text, start)
    if not isinstance(values, list):
        raise _Refusal('the tool calls are no list; write [{"name": ..., "arguments": {...}}]')
    return [_call(value) for value in values], behind


def _separated(text: str, start: int, end: int) -> tuple[list[ToolCall | str], int]:
    calls = []
    while True:
        value, start = _json_at(text, start)
        calls.append(_call(value))
        if start == len(text) or text.startswith("<|python_end|>", start):
            return calls, start
        if text[start] != ";":
            raise _Refusal("text follows the JSON of the tool call; write ';' between calls")
        start += 1


def _bare(text: str, start: int, end: int) -> tuple[list[ToolCall | str], int]:
    if _BARE.match(text, _after_space(text, start)):
        return _separated(text, start, end)
    if _BARE_PYTHON.match(text, _after_space(text, start)):
        return _python(text[start:end]), end
    return [], start  # an answer, perhaps in JSON


def _python(code: str) -> list[ToolCall | str]:
    """Reads a list of calls in Python; nothing of it is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            listed = ast.parse(code.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _Refusal(f"the tool calls are no list in Python; {_PYTHON_FORM}") from None
    items = listed.elts if isinstance(listed, ast.List) else [listed]
    return [_python_call(item) for item in items]


def _python_call(call: ast.expr) -> ToolCall | str:
    parts, function = [], call.func if isinstance(call, ast.Call) else call
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not (isinstance(call, ast.Call) and isinstance(function, ast.Name)):
        return f"Error: the list has more than tool calls; {_PYTHON_FORM}"
    name = ".".join([function.id, *reversed(parts)])
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    if call.args or None in arguments:
        return f"Error: an argument of the tool call lacks its name; {_PYTHON_FORM}"
    try:
        return ToolCall(name, {str(key): _python_value(value) for key, value in arguments.items()})
    except ValueError:
        return "Error: an argument of the tool call is no plain value; write a text, number or list"


def _python_value(value: ast.expr) -> Any:
    """Returns what JSON could have held, or raises ValueError."""
    match value:
        case ast.Constant(str() | int() | float() | None as constant):
            return constant
        case ast.Name(id) if id in _JSON_NAMES:
            return _JSON_NAMES[id]
        case ast.List(items) | ast.Tuple(items):
            return [_python_value(item) for item in items]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            found = [key.value for key in keys if isinstance(key, ast.Constant)]
            if all(isinstance(key, str) for key in found):
                return dict(zip(found, map(_python_value, values), strict=True))
    raise ValueError


_Reader = Callable[[str, int, int], tuple[list[ToolCall | str], int]]
_READERS: dict[str, _Reader] = {
    "": _bare,
    "</think>": _bare,
    "<tool_call>": _tagged,
    _MISTRAL: _mistral,
    "<|python_tag|>": _separated,
    "<|python_start|>": _bare,
    "<|python_end|>": _bare,
    **{tag: functools.partial(_named, head=_HEADS[tag]) for tag in _HEADS if tag != _MISTRAL},
}
