"""Reads tool calls whose arguments are JSON.

Each reader gets the reply, and where the tag of the call ends. It returns what it found, or raises
a Refusal.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from fp8rl_jax.envs.tool_calls.call import Found, Refusal, ToolCall

_DECODER = json.JSONDecoder(strict=False)  # line breaks in texts too
_SPACE = re.compile(r"\s*")
_FORM = 'write {"name": ..., "arguments": {...}}'
_NAMED_FORM = "write its arguments as a JSON object"
# What may stand beside the arguments of a call.
_BESIDE = {"name", "function", "id", "type", "index"}
# What follows a call that has left its arguments out.
_NO_ARGUMENTS = ("<|tool_call_end|>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]")
# What may follow Llama's calls.
_LLAMA_ENDS = ("<|python_end|>", "<|python_tag|>", "```")
_MISTRAL_HEAD = re.compile(
    r"\s*(?P<name>[^\s\[\]{}<`]+)\s*(?:\[CALL_ID\](?P<id>[^\[\]{}<`]*))?(?:\[ARGS\])?"
)
KIMI_HEAD = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<{]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
)
_RECIPIENT = re.compile(r"[^\s<]+")
_MESSAGE = "<|message|>"
DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<{]+)(?:<｜tool▁sep｜>)?(?:\s*```json)?"
)


def after_space(text: str, start: int) -> int:
    """Returns where white space ends that begins at `start`."""
    space = _SPACE.match(text, start)
    assert space
    return space.end()


def json_at(text: str, start: int, form: str = _FORM) -> tuple[Any, int]:
    """Reads a JSON value that begins at `start`, after white space; returns it with its end, white
    space included. `form` is what to write instead of something else."""
    start = after_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        place = getattr(error, "pos", start) - start
        raise Refusal(f"the tool call is no JSON at its character {place}; {form}") from None
    return value, after_space(text, end)


def hermes(text: str, start: int) -> Found:
    value, behind = json_at(text, start)
    if behind < len(text) and not text.startswith("</tool_call>", behind):
        raise Refusal("text follows the JSON of the tool call; write </tool_call> there")
    return [_call(value)], behind


def mistral(text: str, start: int) -> Found:
    if not text.startswith(("[", "{"), after_space(text, start)):
        return named(text, start, _MISTRAL_HEAD)
    start = after_space(text, start)
    if text.startswith("{", start):
        raise Refusal('the tool calls are no list; write [{"name": ..., "arguments": {...}}]')
    calls: list[ToolCall | str] = []
    while not text.startswith("]", start + 1):
        try:  # the calls before a malformed one are made
            value, start = json_at(text, start + 1)
        except Refusal as refusal:
            return [*calls, f"Error: {refusal}"], len(text)
        calls.append(_call(value))
        if start == len(text) or text[start] == "]":
            return calls, start + 1
        if not text.startswith(",", start):
            return [*calls, f"Error: text follows the JSON of the tool call; {_FORM}"], len(text)
    raise Refusal(f"the list of tool calls is empty; {_FORM}")


def harmony(text: str, start: int) -> Found:
    """Reads what follows 'to=' in the header of a message of gpt-oss."""
    name = _RECIPIENT.match(text, start)
    assert name
    behind = text.index(_MESSAGE, start) + len(_MESSAGE)
    return arguments_at(text, behind, name[0].removeprefix("functions."))


def arguments_at(text: str, start: int, name: str, id: str = "") -> Found:
    """Reads the arguments of a call whose name was found: a JSON object."""
    if text.startswith(_NO_ARGUMENTS, after_space(text, start)):
        return [ToolCall(name, {}, id=id)], start
    arguments, behind = json_at(text, start, _NAMED_FORM)
    if not isinstance(arguments, dict):
        raise Refusal(f"the tool call has no arguments by name; {_NAMED_FORM}")
    return [ToolCall(name, arguments, id=id)], behind


def bare(text: str, start: int) -> Found | None:
    """Reads a JSON object with a name and arguments, or a list of them; None for other JSON."""
    if not text.startswith(("{", "["), start):
        return None
    try:
        value, behind = json_at(text, start)
    except Refusal:
        return None
    values = value if isinstance(value, list) else [value]
    if not values or not all(map(_is_call, values)):
        return None
    if isinstance(value, dict):
        return llama(text, start)
    if behind < len(text) and not text.startswith(_LLAMA_ENDS, behind):
        raise Refusal("text follows the JSON of the tool calls; leave it out")
    return [_call(each) for each in values], behind


def _is_call(value: Any) -> bool:
    """Returns whether a JSON value has the form of a call, with its arguments."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    named = inner if isinstance(inner, dict) else value
    given = isinstance(named, dict) and not {"arguments", "parameters"}.isdisjoint(named)
    return given and isinstance(_call(value), ToolCall)


def llama(text: str, start: int) -> Found:
    calls: list[ToolCall | str] = []
    while True:
        try:  # the calls before a malformed one are made
            value, start = json_at(text, start)
        except Refusal as refusal:
            if not calls:
                raise
            return [*calls, f"Error: {refusal}"], len(text)
        calls.append(_call(value))
        if start == len(text) or text.startswith(_LLAMA_ENDS, start):
            return calls, start
        if text[start] == ";":
            start += 1
        elif text[start] != "{":
            raise Refusal("text follows the JSON of the tool call; write ';' between calls")


def named(text: str, start: int, head: re.Pattern) -> Found:
    """Reads a call whose head, a pattern with the group `name`, stands before its arguments."""
    begun = head.match(text, start)
    if not begun:
        raise Refusal(f"the tool call does not begin with a name; write NAME, then {_NAMED_FORM}")
    parts = begun.groupdict()
    return arguments_at(text, begun.end(), parts["name"], (parts.get("id") or "").strip())


def _call(value: Any) -> ToolCall | str:
    """Turns a JSON value into a call."""
    missing = f"Error: the tool call lacks a name or arguments; {_FORM}"
    if not isinstance(value, dict):
        return missing
    id = value.get("id")
    if isinstance(value.get("function"), dict):  # as OpenAI's API nests it
        value = value["function"]
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if arguments in (None, "") and set(value) <= _BESIDE | {"arguments", "parameters"}:
        arguments = {}
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        return missing
    return ToolCall(name, arguments, id=id if isinstance(id, str) else "")
