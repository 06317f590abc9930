"""Tools: schemas of functions, and results of calls as observations."""

from __future__ import annotations

import json
import pathlib
import typing
from typing import Any, Literal, Optional, Union

import pytest
from tool_forms import FORMS, written

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs.tools import tool_schema, tool_step


def _plain(
    count: int, rate: float, text: str, flag: bool, anything: Any, listed: list, named: dict
) -> None:
    """Does much.

    A second paragraph: it has
      an indented line.

    Args:
      count: how many.
      rate (float): how fast, in a
        description of two lines: with a colon.
      text:
        whatever.
      flag: True (the default).

      anything: a value (choices: ["a ", 2, null])
      listed: values.
      named: values by name (CHOICES: [{}])

    Raises:
      ValueError: never.
    """


def _nested(
    numbers: list[int],
    table: dict[str, list[float]],
    pair: tuple[int, str],
    either: int | str,
    perhaps: Optional[int] = None,  # noqa: UP045
    complex_one: Union[list[int], str, None] = None,  # noqa: UP007
    level: Literal["low", "high"] = "low",
    mixed: Literal["a", 1, None] = 1,
    old: typing.List = (),  # noqa: UP006
    *,
    only: list[bool] | None = None,
) -> list[str]:
    """Does more.

    Args:
        numbers: a.
        table: b.
        pair: c.
        either: d.
        perhaps: e.
        complex_one: f.
        level: g.
        mixed: h.
        old: i.
        only: j.

    Returns:
        What it found,
          in two lines.
    """


def _least():
    """Does nothing."""


def _path() -> pathlib.Path:
    """Finds it.

    Returns:
      a path, which has no schema.
    """


class _Calculator:
    def add(self, x: float, y: float = 1.0) -> float:
        """Adds.

        Args:
          x: first.
          y: second.
        """
        return x + y


@pytest.mark.parametrize(
    "function",
    [_plain, _nested, _least, _path, _Calculator().add],
    ids=lambda function: function.__name__,
)
def test_schemas_are_those_of_transformers(function):
    utils = pytest.importorskip("transformers.utils")
    assert tool_schema(function) == utils.get_json_schema(function)


def _documented(annotations: dict[str, Any], text: str = "Adds.\n\nArgs:\n  x: one.\n") -> Any:
    def add(x):
        return x

    add.__doc__, add.__annotations__ = text, annotations
    return add


def _starred(*names: str):
    """Joins."""


async def _later():
    """Waits."""


_LACKS = (
    "tool 'add': argument 'x' has the type {}, which JSON lacks; write int, float, str, bool, "
    "list[...], dict[str, ...], Literal[...] or a union of these"
)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([5], "tool 5 is not a function; name one, defined with `def`"),
        ([_later], "tool '_later' is asynchronous; write a plain function"),
        ([_documented({})], "tool 'add': argument 'x' has no annotation; write x: int"),
        (
            [_documented({"x": int}, "Args:\n  x: one.")],
            "tool 'add' has no description; begin its docstring with what it does",
        ),
        (
            [_documented({"x": int}, "Adds.")],
            "tool 'add': argument 'x' has no description; write a line 'x: ...' under 'Args:' in "
            "its docstring",
        ),
        (
            [_documented({"x": int}, "Adds.\n\nArgs:\n  x: one (choices: a, b)")],
            "tool 'add': argument 'x' has choices that are no JSON list; write "
            '(choices: ["a", "b"])',
        ),
        ([_documented({"x": set[int]})], _LACKS.format("set[int]")),
        ([_documented({"x": list[bytes] | None})], _LACKS.format("bytes")),
        ([_documented({"x": tuple[int, ...]})], _LACKS.format("tuple[int, ...]")),
        ([_documented({"x": Literal[b"a"]})], _LACKS.format("Literal[b'a']")),
        ([_documented({"x": [int]})], _LACKS.format("[<class 'int'>]")),
        (
            [_documented({"x": "Missing"})],
            "tool 'add': its annotations cannot be read (NameError: name 'Missing' is not "
            "defined); import the types that they name",
        ),
        (
            [_starred],
            "tool '_starred' takes *names: 'str', which has no name in a call; write its arguments "
            "without *, ** and /",
        ),
        ([_least, _least], "two tools have the name '_least'; rename one of them"),
    ],
)
def test_what_is_no_tool(tools, message):
    with pytest.raises(UserError) as error:
        tool_step(tools)
    assert str(error.value) == message


def _echo(value: Any) -> Any:
    """Returns a value.

    Args:
      value: any.
    """
    return value


def _fail(how: str) -> str:
    """Fails.

    Args:
      how: the way.
    """
    if how == "open":
        return pathlib.Path("/no/such/file of mine.txt").read_text()
    if how == "exit":
        raise SystemExit
    if how == "object":
        return object()  # type: ignore[return-value]
    if how == "address":
        raise ValueError(f"not {object()}, 1/2 km/h\nin '~/a b' or (/usr/x.py), line 3")
    return {"half": "\ud800", "set": json.dumps([how])}[how]


def _move(
    steps: int, speed: float = 1.0, way: Literal["up", "down"] = "up", to: list[int] | None = None
) -> dict:
    """Moves.

    Args:
      steps: a.
      speed: b.
      way: c.
      to: d.
    """
    return {"steps": steps, "speed": speed, "way": way, "to": to}


_STEP = tool_step([_echo, _fail, _move])
_ECHOED: list[tuple[Any, str]] = [
    ("two\nlines", "two\nlines"),
    ({"b": 1, "a": [None, True, "ü"]}, '{"b": 1, "a": [null, true, "ü"]}'),
]


def _answer(name: str, form: str = "Qwen2.5", /, **arguments: Any) -> str:
    state, observation, reward, done = _STEP("s", written(form, [(name, arguments)]), {})
    assert (state, reward, done) == ("s", 0.0, False)
    return observation


@pytest.mark.parametrize(("value", "text"), _ECHOED)
def test_results(value, text):
    assert _answer("_echo", value=value) == text


def test_results_that_json_lacks():
    """Sets are sorted, numbers before texts; arrays are lists."""
    np = pytest.importorskip("numpy")

    def look() -> None:
        """Looks."""
        return {"z": {10, "b", 9, ("a", 1)}, "a": frozenset({2.5, 1}), "n": np.arange(2)}

    observation = tool_step([look])(None, written("Mistral", [("look", {})]), {}).observation
    assert observation == '{"z": [9, 10, "b", ["a", 1]], "a": [1, 2.5], "n": [0, 1]}'


def test_several_calls_and_none():
    calls = [("_echo", {"value": 1}), ("ech", {}), ("_echo", {"value": "x"})]
    for form in FORMS:
        step = _STEP(None, written(form, calls), {})
        error = 'Error: no tool has the name "ech"; did you mean _echo?'
        assert step.observation == ["1", error, "x"], form
    assert _STEP(7, "No call.", {}) == (7, "", 0.0, True)
    many = _STEP(None, "<tool_call>" * 65, {}).observation
    assert len(many) == 65 and many[-1] == "Error: only the first 64 calls of a reply are made"


def test_a_reply_that_was_cut_is_no_answer():
    """Complete calls are made; what is left of another is no mistake of the policy."""
    told = "Error: the reply was cut; call a tool or answer in fewer words"
    assert len(told) <= 64, "what rollout.max_observation_tokens shows, of bytes"
    answered: dict[str, int] = {}
    for form in FORMS:
        reply = written(form, [("_echo", {"value": 1}), ("_echo", {"value": "xy"})])
        whole = "\n".join(_STEP(7, reply, {}).observation)
        for end in range(len(reply) + 1):
            state, observation, reward, done = _STEP(7, reply[:end], {}, cut=True)
            assert (state, reward, done) == (7, 0.0, False)
            observation = observation if isinstance(observation, str) else "\n".join(observation)
            assert observation in (told, "1", f"1\n{told}", whole), (form, reply[:end])
            answered[observation] = answered.get(observation, 0) + 1
        assert observation == whole, form
    assert {*answered} == {told, "1", f"1\n{told}", whole}
    assert _STEP(7, "The answer is 1", {}, cut=True).observation == told


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("open", "FileNotFoundError: [Errno 2] No such file or directory: ..."),
        ("exit", "SystemExit"),
        ("object", "TypeError: it returned a value of type object, which JSON lacks"),
        ("address", "ValueError: not <object object at ...>, 1/2 km/h in ... or (...), line 3"),
        ("other", "KeyError: 'other'"),
    ],
)
def test_tools_that_fail(how, text):
    """One line without a path, an address or a traceback."""
    assert _answer("_fail", how=how) == f"Error: _fail failed with {text}"


def test_half_of_a_character_is_replaced():
    assert _answer("_fail", how="half") == "?"


_MOVED = {"steps": 3, "speed": 1.0, "way": "up", "to": None}


@pytest.mark.parametrize(
    ("arguments", "moved"),
    [
        ({"steps": 3, "speed": 2, "to": [1]}, {"speed": 2, "to": [1]}),
        ({"steps": 3, "way": "down", "to": None}, {"way": "down"}),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_arguments_that_fit(form, arguments, moved):
    assert json.loads(_answer("_move", form, **arguments)) == _MOVED | moved


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, '_move needs the argument "steps"'),
        ({"steps": 1, "x\n": 5}, '_move takes no argument "x\\n"; it takes steps, speed, way, to'),
        ({"steps": True}, '_move\'s argument "steps" is true and must be of {"type": "integer"}'),
        ({"steps": 3.5}, "is 3.5 and must be of"),
        ({"steps": None}, "is null and must be of"),
        ({"steps": 3, "way": "left"}, 'is "left" and must be of'),
        ({"steps": 3, "to": [1, "a"]}, 'is [1, "a"] and must be of'),
        ({"steps": "three" * 50}, 'is "threethree'),
    ],
)
def test_arguments_that_do_not_fit(arguments, error):
    answer = _answer("_move", **arguments)
    assert answer.startswith("Error: _move") and error in answer and len(answer) < 200
    assert _answer("_move", "Qwen3-Coder", **arguments).startswith("Error: _move")


def test_texts_become_other_types_in_xml_alone():
    """There all values are texts; in JSON a text is no number."""
    arguments = {"steps": "3", "speed": "2.5", "to": "[1, 2]"}
    moved = json.loads(_answer("_move", "Qwen3-Coder", **arguments))
    assert moved == _MOVED | {"steps": 3, "speed": 2.5, "to": [1, 2]}
    for name, text in arguments.items():
        answer = _answer("_move", **{"steps": 3, name: text})
        assert f'"{name}" is {json.dumps(text)} and must be of' in answer


def test_quotes_are_part_of_a_text():
    """In the forms whose arguments are texts."""
    for form in ("Qwen3-Coder", "GLM-4.5"):
        assert _answer("_echo", form, value='"exact phrase"') == '"exact phrase"'
        assert _answer("_echo", form, value='"a\\nb"') == '"a\\nb"'
