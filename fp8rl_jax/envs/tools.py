"""Tools: Python functions that the policy calls by what it writes in its replies.

::

    function -> tool_schema -> chat template -> prompt
    reply -> parse_tool_calls -> calls of functions -> observation        (tool_step)

What the policy does wrong is told to it as a line 'Error: ...', and raises nothing.

Not done: enumeration classes as types, tools without a fixed list of arguments, limits of time and
memory (tools run in the process of the step).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from fp8rl_jax.base.errors import UserError, did_you_mean, raised
from fp8rl_jax.envs.answers import with_integers
from fp8rl_jax.envs.step import Step, StepFunction
from fp8rl_jax.envs.tool_calls import Refusal, ToolCall, parse_tool_calls

_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
_Tools = dict[str, tuple[Callable[..., Any], dict[str, Any]]]  # name -> function, parameters
_SCALARS = {int, float, str, bool, type(None)}
_SECTIONS = ("Args:", "Returns:", "Raises:")
_ARGUMENT = re.compile(r"(\s*)(\w+)\s*(?:\([^()]*\))?:\s*(.*)")  # 'name: text', 'name (type): text'
_CHOICES = re.compile(r"\(choices:(.*)\)$", re.IGNORECASE)
# Paths of files and addresses in memory, which differ from machine to machine.
_OF_MACHINE = re.compile(
    r"""'~?/[^']*'|"~?/[^"]*"|(?<![\w.:/~])~?/[^\s'"()<>,;:]+|(?<=\ at\ )0x[0-9a-f]+""", re.VERBOSE
)
_CUT = "Error: the reply was cut; call a tool or answer in fewer words"  # fits 64 bytes


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function for chat templates, as `transformers` makes it.

    Types come from annotations, descriptions from the docstring in Google's style. A description
    may end with '(choices: ["a", "b"])', which lists the argument's values.

    Returns:
      {'type': 'function', 'function': {'name', 'description', 'parameters', 'return'}}, where
      'parameters' is {'type': 'object', 'properties', 'required'}; without 'required' if no
      argument is, without 'return' if its annotation is missing or has no type of JSON.

    Raises:
      UserError: it is no plain function, lacks an annotation or a description, takes arguments that
        have no name, or has an annotation without a type of JSON.
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise UserError(f"tool {function!r} is not a function; name one, defined with `def`")
    name = function.__name__
    if inspect.iscoroutinefunction(function):
        raise UserError(f"tool {name!r} is asynchronous; write a plain function")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # an annotation in quotes is any Python expression
        raise UserError(
            f"tool {name!r}: its annotations cannot be read ({raised(error)}); import the types "
            "that they name"
        ) from None
    description, described, returns = _docstring(function)
    if not description:
        raise UserError(f"tool {name!r} has no description; begin its docstring with what it does")
    properties: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"tool {name!r} takes {parameter}, which has no name in a call; write its "
                "arguments without *, ** and /"
            )
        if key not in hints:
            raise UserError(f"tool {name!r}: argument {key!r} has no annotation; write {key}: int")
        if key not in described:
            raise UserError(
                f"tool {name!r}: argument {key!r} has no description; write a line '{key}: ...' "
                "under 'Args:' in its docstring"
            )
        where = f"tool {name!r}: argument {key!r}"
        properties[key] = _type_schema(hints[key], where) | _described(described[key], where)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [key for key, p in parameters.items() if p.default is p.empty]:
        schema["required"] = required
    whole: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    if "return" in hints:
        with contextlib.suppress(UserError):  # the policy does not write it
            whole["return"] = _type_schema(hints["return"], "")
            if returns is not None:
                whole["return"]["description"] = returns
    return {"type": "function", "function": whole}


def tool_step(tools: Sequence[Callable[..., Any]]) -> StepFunction:
    """Makes the step of an environment in which the policy calls tools.

    A reply without a call ends the episode. Otherwise the functions are called in order, and the
    observation is the result of the call, or a list with one for each: texts as they are, other
    values as JSON, sets sorted, 'Error: ...' for a call that fails. Rewards are 0; the state is
    unchanged.

    A reply that was `cut` ends no episode. Its complete calls are made; the policy reads that it
    was cut in place of an error in the last call, or if there is no call.

    Args:
      tools: functions that `tool_schema` describes; their results should depend on the arguments
        alone, as those of every step.

    Raises:
      UserError: `tool_schema` refuses a function, or two have one name.

    Example:
      >>> def add(x: int, y: int) -> int:
      ...     '''Adds two numbers.
      ...
      ...     Args:
      ...       x: the first number.
      ...       y: the second number.
      ...     '''
      ...     return x + y
      >>> reply = '<tool_call>{"name": "add", "arguments": {"x": 2, "y": 3}}</tool_call>'
      >>> tool_step([add])(None, reply, {})
      Step(state=None, observation='5', reward=0.0, done=False)
    """
    named: _Tools = {}
    for function in tools:
        schema = tool_schema(function)["function"]
        if schema["name"] in named:
            raise UserError(f"two tools have the name {schema['name']!r}; rename one of them")
        named[schema["name"]] = function, schema["parameters"]

    def step(state: Any, reply: str, row: Mapping[str, Any], *, cut: bool = False) -> Step:
        calls = parse_tool_calls(reply)
        if cut and (not calls or isinstance(calls[-1], str)):
            calls[-1:] = [_CUT]  # instead of an error in what the cut left of a call
        if not calls:
            return Step(state, done=True)
        # JSON can hold halves of characters, which no tokenizer encodes.
        answers = [_answer(call, named).encode(errors="replace").decode() for call in calls]
        return Step(state, answers if len(answers) > 1 else answers[0])

    return step


def check_calls(
    tools: Sequence[Callable[..., Any]], written: Callable[[str, Mapping[str, Any]], str]
) -> None:
    """Raises UserError if a call of a tool is not read as the policy will write it.

    Args:
      tools: functions that `tool_schema` describes.
      written: returns the reply with a call of (name, arguments) in the form of the chat template.
    """
    for function in tools:
        schema = tool_schema(function)["function"]
        name = schema["name"]
        parameters = schema["parameters"]
        example = {key: _example(each) for key, each in parameters["properties"].items()}
        reply = written(name, example)
        match parse_tool_calls(reply):
            case [ToolCall(name=found) as call] if found == name:
                with contextlib.suppress(Refusal):
                    if _arguments(call, parameters) == example:
                        continue
        raise UserError(
            f"env.tools: the chat template writes a call of {name!r} as {_short(reply)}, a form "
            "that is not read: take a model of another family, or answer calls by env.step"
        )


def _example(schema: Mapping[str, Any]) -> Any:
    """Returns a value that is right by a schema of `_type_schema`."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    if "prefixItems" in schema:
        return [_example(each) for each in schema["prefixItems"]]
    names = schema.get("type", "string")
    match names if isinstance(names, str) else names[0]:
        case "array":
            return [_example(schema.get("items", {}))]
        case "object":
            return {"key": _example(schema.get("additionalProperties", {}))}
        case name:
            return {"integer": 7, "number": 0.5, "boolean": True, "null": None}.get(name, "a text")


def _answer(call: ToolCall | str, tools: _Tools) -> str:
    """Makes a call, and returns what the policy reads of its result, or of its error."""
    if isinstance(call, str):
        return call
    try:
        if call.name not in tools:
            hint = did_you_mean(
                call.name,
                tools,
                f"the tools are {', '.join(tools)}" if tools else "there are no tools",
            )
            raise Refusal(f"no tool has the name {_short(call.name)}; {hint}")
        function, parameters = tools[call.name]
        result = function(**_arguments(call, parameters))
        return result if isinstance(result, str) else _as_json(result)
    except Refusal as refusal:
        return f"Error: {refusal}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a tool may raise anything, and the episode goes on
        return f"Error: {call.name} failed with {_OF_MACHINE.sub('...', raised(error))}"


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str], str | None]:
    """Returns a docstring's description, the descriptions of its arguments, and of its result."""
    heading = ""
    sections: dict[str, list[str]] = {"": []}
    for line in (inspect.getdoc(function) or "").splitlines():
        if line.strip() in _SECTIONS:
            heading = line.strip()
        sections.setdefault(heading, []).append(line)
    texts = {h: "\n".join(lines[bool(h) :]).strip() for h, lines in sections.items()}
    described: dict[str, list[str]] = {}
    depth = None  # characters before the arguments' names
    current: list[str] = []
    for line in sections.get("Args:", [])[1:]:
        argument = _ARGUMENT.match(line)
        if argument and (depth is None or len(argument[1]) <= depth):
            depth = len(argument[1])
            current = [argument[3].strip()]
            described[argument[2]] = current
        else:
            current.append(line.strip())
    joined = {key: " ".join(filter(None, lines)) for key, lines in described.items()}
    return texts[""], joined, texts.get("Returns:")


def _described(text: str, where: str) -> dict[str, Any]:
    """Returns an argument's 'description', and its 'enum' if the text ends with choices."""
    listed = _CHOICES.search(text)
    if not listed:
        return {"description": text}
    try:
        choices = json.loads(listed[1])
    except ValueError:
        choices = None
    if not isinstance(choices, list):
        raise UserError(f'{where} has choices that are no JSON list; write (choices: ["a", "b"])')
    return {
        "enum": [choice.strip() if isinstance(choice, str) else choice for choice in choices],
        "description": text[: listed.start()].strip(),
    }


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    """Returns the JSON schema of an annotation; `where` begins the error if it has none."""
    origin = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if origin in (Union, types.UnionType):
        several = [_type_schema(each, where) for each in inner if each is not type(None)]
        schema: dict[str, Any] = {"anyOf": several}
        if all([*each] == ["type"] and isinstance(each["type"], str) for each in several):
            names = sorted({each["type"] for each in several})
            schema = {"type": names if len(names) > 1 else names[0]}
        elif len(several) == 1:
            schema = several[0]
        return schema | ({"nullable": True} if type(None) in inner else {})
    if origin is Literal and inner and {type(value) for value in inner} <= _SCALARS:
        names = list(dict.fromkeys(_TYPES[type(value)] for value in inner))
        return {"type": names if len(names) > 1 else names[0], "enum": [*inner]}
    if origin is list and inner:
        return {"type": "array", "items": _type_schema(inner[0], where)}
    if origin is dict and inner:
        return {"type": "object", "additionalProperties": _type_schema(inner[1], where)}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_type_schema(each, where) for each in inner]}
    if hint is Any:
        return {}
    if not isinstance(origin, type) or origin not in _TYPES or inner:
        raise UserError(
            f"{where} has the type {inspect.formatannotation(hint)}, which JSON lacks; write int, "
            "float, str, bool, list[...], dict[str, ...], Literal[...] or a union of these"
        )
    return {"type": _TYPES[origin]}


def _arguments(call: ToolCall, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call as its tool takes them; raises a Refusal otherwise."""
    schemas = parameters["properties"]
    for key in parameters.get("required", ()):
        if key not in call.arguments:
            raise Refusal(f"{call.name} needs the argument {_short(key)}")
    arguments = {}
    for key, value in call.arguments.items():
        if key not in schemas:
            known = f"it takes {', '.join(schemas)}" if schemas else "it takes none"
            raise Refusal(f"{call.name} takes no argument {_short(key)}; {known}")
        schema = {name: part for name, part in schemas[key].items() if name != "description"}
        values = [value]
        if call.texts:  # templates write the three constants as Python does
            text = {"True": "true", "False": "false", "None": "null"}.get(value, value)
            with contextlib.suppress(ValueError, RecursionError):
                parsed = json.loads(text)
                if not isinstance(parsed, str):  # quotes are part of a text
                    values = [parsed, value]
        values.append(with_integers(values[0]))
        right = [each for each in values if _fits(each, schema)]
        if not right:
            raise Refusal(
                f"{call.name}'s argument {_short(key)} is {_short(value)} and must be of "
                f"{json.dumps(schema)}"
            )
        arguments[key] = right[0]
    return arguments


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Returns whether a JSON value is right by a schema of `_type_schema`."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema and not any(_fits(value, each) for each in schema["anyOf"]):
        return False
    # True == 1, but one is not the other in JSON.
    same = (
        each == value and isinstance(each, bool) == isinstance(value, bool)
        for each in schema.get("enum", ())
    )
    if "enum" in schema and not any(same):
        return False
    names = schema.get("type", ())
    accepted = {names} if isinstance(names, str) else {*names}
    if accepted and _TYPES[type(value)] not in accepted | (
        {"integer"} if "number" in accepted else set()
    ):
        return False
    if isinstance(value, list):
        each_of = schema.get("prefixItems")
        if each_of is not None:
            return len(value) == len(each_of) and all(map(_fits, value, each_of))
        return all(_fits(each, schema.get("items", {})) for each in value)
    if isinstance(value, dict):
        return all(_fits(each, schema.get("additionalProperties", {})) for each in value.values())
    return True


def _short(value: Any) -> str:
    """Quotes what a policy wrote, in one line of at most 100 characters."""
    return json.dumps(value)[:100]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Turns what JSON lacks into lists and numbers."""
    if isinstance(value, (set, frozenset)):  # numbers by value, then others by their texts
        return sorted(
            value, key=lambda v: (0, v, "") if isinstance(v, (int, float)) else (1, 0, _as_json(v))
        )
    if hasattr(value, "tolist"):  # of numpy or JAX
        return value.tolist()
    raise TypeError(f"it returned a value of type {type(value).__name__}, which JSON lacks")
