"""Reads tool calls whose arguments stand between tags: Qwen3-Coder's, GLM's, and one of Llama's.

A value never contains a tag: it ends where the next tag begins, as other engines read it, or the
call is refused.
"""

from __future__ import annotations

import re

from fp8rl_jax.envs.tool_calls.call import Found, Refusal, ToolCall
from fp8rl_jax.envs.tool_calls.in_json import after_space, arguments_at

_FUNCTION_FORM = (
    "write <function=NAME>, <parameter=KEY>...</parameter> for each argument, </function>"
)
_FUNCTION_NAME = re.compile(r"([^<>]*)>")
_FUNCTION_END = re.compile(r"</function>|</?tool_call>|<function=")
_PARAMETER = re.compile(r"\s*<parameter=([^<>]*)>")
_VALUE_END = re.compile(r"</parameter>|(?=<parameter=|</function>)")
_FUNCTION_NEXT = re.compile(r"</parameter>|<function=")
_UNENDED = "the tool call does not end with </function>"
_KEYED_FORM = (
    "write NAME, <arg_key>KEY</arg_key><arg_value>...</arg_value> for each argument, </tool_call>"
)
_KEYED_NAME = re.compile(r"\n?([^\s<{\[]+)\s*(?=<arg_key>|</tool_call>)")
_KEYED_END = re.compile(r"</?tool_call>")
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>((?:(?!</?arg_(?:key|value)>).)*)</arg_value>",
    re.DOTALL,
)


def function(text: str, start: int) -> Found:
    """Reads what follows '<function='."""
    name = _FUNCTION_NAME.match(text, start)
    if name is None:
        raise Refusal(f"the name of the tool call is malformed; {_FUNCTION_FORM}")
    if text.startswith("{", after_space(text, name.end())):  # Llama's
        calls, behind = arguments_at(text, name.end(), name[1].strip())
        if behind < len(text) and not _FUNCTION_END.match(text, behind):
            raise Refusal("text follows the JSON of the tool call; write </function> there")
        return calls, behind
    arguments = {}
    place = name.end()
    while parameter := _PARAMETER.match(text, place):
        stop = _VALUE_END.search(text, parameter.end())
        if stop is None:
            break
        value = text[parameter.end() : stop.start()]
        arguments[parameter[1].strip()] = value.removeprefix("\n").removesuffix("\n")
        place = stop.end()
    last = _FUNCTION_END.match(text, after_space(text, place))
    if last is None:
        known = "</function>" in text[place:] or "</tool_call>" in text[place:]
        problem = "a parameter of the tool call is malformed" if known else _UNENDED
        raise Refusal(f"{problem}; {_FUNCTION_FORM}")
    behind = last.end() if last[0] == "</function>" else last.start()
    following = _FUNCTION_NEXT.search(text, behind)
    if following and following[0] == "</parameter>":  # the value held an end tag
        raise Refusal(f"a parameter of the tool call holds a tag; {_FUNCTION_FORM}")
    return [ToolCall(name[1].strip(), arguments, texts=True)], behind


def keyed(text: str, start: int) -> Found | None:
    """Reads what follows '<tool_call>' in GLM's form; None if it has another."""
    name = _KEYED_NAME.match(text, start)
    if name is None:
        return None
    last = _KEYED_END.search(text, name.end())
    if last is None:
        raise Refusal(f"the tool call does not end with </tool_call>; {_KEYED_FORM}")
    arguments = {}
    place = name.end()
    while argument := _ARGUMENT.match(text, place, last.start()):
        arguments[argument[1].strip()] = argument[2]
        place = argument.end()
    if after_space(text, place) < last.start():
        raise Refusal(f"an argument of the tool call is malformed; {_KEYED_FORM}")
    return [ToolCall(name[1], arguments, texts=True)], last.start()
