"""Reads tool calls in Python, of which nothing is run: Llama's list and Gemma's block."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from fp8rl_jax.envs.tool_calls.call import Found, Refusal, ToolCall

_LIST_FORM = "write [NAME(KEY=VALUE, ...)]"
_BLOCK_FORM = "write NAME(KEY=VALUE, ...), a call in each line"
_JSON_NAMES = {"true": True, "false": False, "null": None}  # also taken in Python


def listed(text: str, start: int) -> Found:
    """Reads a list of calls, up to Llama's tag of its end or the end of the text."""
    last = text.find("<|python_end|>", start)
    last = len(text) if last < 0 else last
    return _calls(text[start:last], _LIST_FORM), last


def block(text: str, start: int) -> Found:
    """Reads the lines behind '```tool_code', each a call or print(call)."""
    last = text.find("```", start)
    last = len(text) if last < 0 else last
    code = text[start:last]
    try:
        return _calls(code, _BLOCK_FORM), last
    except Refusal:
        *before, cut = code.rstrip().split("\n")
        if not "".join(before).strip():
            raise
        return [*_calls("\n".join(before), _BLOCK_FORM), *_refused(cut)], last


def _refused(line: str) -> list[ToolCall | str]:
    """Reads the last line of a block that is malformed: the calls before it are made."""
    try:
        return _calls(line, _BLOCK_FORM)
    except Refusal as refusal:
        return [f"Error: {refusal}"]


def _calls(code: str, form: str) -> list[ToolCall | str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            statements = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Refusal(f"the tool calls are no list in Python; {form}") from None
    calls: list[ToolCall | str] = []
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else None
        match value:
            case ast.Call(ast.Name("print"), [ast.Call() as printed], []):
                value = printed
        items = value.elts if isinstance(value, ast.List) else [value]
        calls += [_call(item, form) for item in items]
    if not calls:
        raise Refusal(f"no tool is called; {form}")
    return calls


def _call(call: ast.expr | None, form: str) -> ToolCall | str:
    function = call.func if isinstance(call, ast.Call) else call
    parts = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not (isinstance(call, ast.Call) and isinstance(function, ast.Name)):
        return f"Error: the list has more than tool calls; {form}"
    name = ".".join([function.id, *reversed(parts)])
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    if call.args or None in arguments:
        return f"Error: an argument of the tool call lacks its name; {form}"
    try:
        return ToolCall(name, {str(key): _value(value) for key, value in arguments.items()})
    except ValueError:
        return "Error: an argument of the tool call is no plain value; write a text, number or list"


def _value(value: ast.expr) -> Any:
    """Returns what JSON could have held, or raises ValueError."""
    match value:
        case ast.Constant(str() | int() | float() | None as constant):
            return constant
        case ast.Name(id) if id in _JSON_NAMES:
            return _JSON_NAMES[id]
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            found = [key.value for key in keys if isinstance(key, ast.Constant)]
            if all(isinstance(key, str) for key in found):
                return dict(zip(found, map(_value, values), strict=True))
    raise ValueError
