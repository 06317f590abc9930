"""Tool calls in replies: every known form, as templates write it, and what is malformed."""

from __future__ import annotations

import keyword
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_forms import FORMS, written

from fp8rl_jax.envs.tool_calls import ToolCall, parse_tool_calls

_THOUGHTS = [
    "",
    "<think>\n<tool_call>{}</tool_call> or {\n</think>\n\n",
    'begun in the prompt <tool_call>{"name": "f", "arguments": {}}</tool_call></think>',
]
_JSON_FORMS = [name for name in FORMS if name != "Qwen3-Coder"]
_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,9}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)
_TAGS = ["</tool_call>", "<tool_call>{", "<think>", "</think>", "[TOOL_CALLS]", '"};{"', "\\", "\n"]
_TEXTS = st.lists(st.text() | st.sampled_from(_TAGS), max_size=3).map("".join)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


_PYTHON_TEXTS = st.text() | st.sampled_from(["]", "f(x=1)", "'", '"', "\\d", "\n"])
_PYTHON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | _PYTHON_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_PYTHON_TEXTS, inner, max_size=3),
    max_leaves=6,
)


def _calls(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(
        st.tuples(_NAMES, st.dictionaries(_NAMES, values, max_size=3)), min_size=1, max_size=3
    )


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(_JSON_FORMS), _calls(_VALUES), st.sampled_from(_THOUGHTS))
def test_calls_as_templates_write_them_in_json(form, calls, thought):
    found = parse_tool_calls(thought + written(form, calls))
    assert found == [ToolCall(name, arguments) for name, arguments in calls]


@settings(max_examples=40, deadline=None)
@given(_calls(st.text(st.characters(codec="utf-8", exclude_characters="<"))))
@example([("run", {"code": "\n\nif a <b> c:\n  return {'d'}\n"})])
def test_calls_as_templates_write_them_in_xml(calls):
    found = parse_tool_calls(_THOUGHTS[1] + written("Qwen3-Coder", calls))
    assert found == [ToolCall(name, arguments, texts=True) for name, arguments in calls]


@settings(max_examples=40, deadline=None)
@given(_calls(_PYTHON_VALUES), st.sampled_from(_THOUGHTS), st.booleans())
def test_calls_in_python(calls, thought, tagged):
    lines = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in calls
    ]
    code = f"[{', '.join(lines)}]"
    reply = thought + (f"<|python_start|>{code}<|python_end|>" if tagged else code)
    assert parse_tool_calls(reply) == [ToolCall(name, given) for name, given in calls]


_F = '{"name": "f", "arguments": {}}'


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", []),
        ("The answer is {1, 2}.", []),
        ('{"answer": 5}', []),
        ('{"name": "Ann", "age": 5', []),
        (f"<think>{_F}<tool_call>{_F}</tool_call>", []),
        (f"<think>a</think>{_F} is a call.", ["text follows"]),
        ('{"type": "function", "name": "f", "parameters": {}}', [ToolCall("f", {})]),
        ('{"name": "f", "parameters": {', ["no JSON at its character 29"]),
        (f"a <tool_call>{_F}</tool_call> b <tool_call>{_F}", [ToolCall("f", {})] * 2),
        (f"<think>a</think><tool_call>{_F}</tool_call></think>", [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', [ToolCall("f", {"x": 1})]),
        ('<tool_call>{"name": "f", "arguments": "x"}', ["lacks a name or arguments"]),
        ('<tool_call>{"name": 5, "arguments": {}}', ["lacks a name or arguments"]),
        (f"<tool_call>{{'name'}}</tool_call>\n<tool_call>{_F}", ["no JSON", ToolCall("f", {})]),
        (f"<tool_call>{_F} and</tool_call>", ["text follows"]),
        ("<tool_call>" + "9" * 5000, ["no JSON"]),
        ("<tool_call>" + "[" * 100_000, ["no JSON"]),
        (f"[TOOL_CALLS][{_F}, 5]", [ToolCall("f", {}), "lacks a name or arguments"]),
        (f"[TOOL_CALLS]{_F}", ["no list"]),
        ('<|python_tag|>search.call(query="x")', ["no JSON"]),
        ("[TOOL_CALLS]f {}[TOOL_CALLS] g[ARGS] {}", [ToolCall("f", {}), ToolCall("g", {})]),
        ("[TOOL_CALLS]f[ARGS]5", ["no arguments by name"]),
        ("[TOOL_CALLS]f[ARGS]{x", ["no JSON at its character 1"]),
        ("[TOOL_CALLS]", ["does not begin with a name"]),
        ("<|tool_call_begin|>f:1:2 <|tool_call_argument_begin|>{}", [ToolCall("f:1", {})]),
        ("<|tool_call_begin|>{}<|tool_call_end|>", ["does not begin with a name"]),
        (f"<|python_start|>a plan<|python_end|>{_F}", [ToolCall("f", {})]),
        (f"<|python_start|>{_F}<|python_end|>", [ToolCall("f", {})]),
        ("[a.f(x=true, y=[null, (1, -2)])]", [ToolCall("a.f", {"x": True, "y": [None, [1, -2]]})]),
        ("[f(x=1)] is a call.", ["no list in Python"]),
        (f"[{'a.' * 900}b()]", [ToolCall("a." * 900 + "b", {})]),
        ("[f(x=1).g()]", ["more than tool calls"]),
        ("[f(x=1), 5]", [ToolCall("f", {"x": 1}), "more than tool calls"]),
        ("[f(), f(5)]", [ToolCall("f", {}), "lacks its name"]),
        ("[f(x=1, **y)]", ["lacks its name"]),
        ("[f(x=g(y=1))]", ["no plain value"]),
        ("[f(x={1: 2})]", ["no plain value"]),
        ("[f(x), sqrt(2)]", []),
        ("[f(x == 1)]", []),
        ("<tool_call><function=f></function></tool_call>", [ToolCall("f", {}, texts=True)]),
        ("<tool_call><function=f><parameter=a>1</parameter></tool_call>", ["not end with"]),
        ("<tool_call><function=f>a</parameter></function></tool_call>", ["is malformed"]),
    ],
)
def test_what_is_a_call(reply, expected):
    """Texts stand for errors that contain them."""
    found = parse_tool_calls(reply)
    assert len(found) == len(expected)
    for one, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, str):
            assert isinstance(one, str) and wanted in one and one.startswith("Error: ")
        else:
            assert one == wanted


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "{",
        "<think>",
        "<tool_call>{",
        '<tool_call>{"a":',
        '<tool_call>{"a":"',
        "<tool_call><function=f><parameter=a>",
        "[TOOL_CALLS][",
        '</think>{"name":"',
        '</think>{"name":"f","arguments":',
        '<|python_tag|>{"name":"f","arguments":{}};',
        "<tool_call>" + _F,
        "<tool_call>" + " " * 99,
        "[TOOL_CALLS]f[CALL_ID]",
        "[TOOL_CALLS]" + "f" * 99,
        "<|tool_call_begin|>" + ":1" * 99,
        "<|tool_call_begin|>f" + " " * 99,
        "<｜tool▁call▁begin｜>f" + "\n" * 99,
        "<|python_start|>[f(a=",
        "<|python_start|>[f(a=1)]",
        "[f(a=",
        "[f(a=-",
        "[" + "a." * 400 + "b(x=1)",
        "[f(a='",
        "[f(a=1),",
        "</think>[f(a=1",
    ],
)
def test_hostile_replies_take_little_time(unit):
    reply = unit * (100_000 // len(unit))
    begin = time.process_time()
    assert len(parse_tool_calls(reply)) <= 65
    assert time.process_time() - begin < 1
