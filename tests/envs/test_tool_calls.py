"""Tool calls in replies: every known form, as templates write it, and what is malformed."""

from __future__ import annotations

import keyword
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_forms import FORMS, IN_TAGS, written

from fp8rl_jax.envs.tool_calls import ToolCall, calls_in, parse_tool_calls

_THOUGHTS = [
    "",
    "<think>\n<tool_call>{}</tool_call> or {\n</think>\n\n",
    'begun in the prompt <tool_call>{"name": "f", "arguments": {}}</tool_call></think>',
]
_JSON_FORMS = [name for name in FORMS if name not in IN_TAGS]
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
    if form.startswith("gpt-oss"):  # whose thoughts have a channel
        thought = ""
    found = parse_tool_calls(thought + written(form, calls))
    assert found == [ToolCall(name, arguments) for name, arguments in calls]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(IN_TAGS), _calls(st.text(st.characters(codec="utf-8", exclude_characters="<")))
)
@example("Qwen3-Coder", [("run", {"code": "\n\nif a <b> c:\n  return {'d'}\n"})])
@example("GLM-4.5", [("run", {"code": "\n\nif a <b> c:\n  return {'d'}\n"})])
def test_calls_as_templates_write_them_in_tags(form, calls):
    found = parse_tool_calls(_THOUGHTS[1] + written(form, calls))
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
    if "```" not in code:
        lines[0] = f"print({lines[0]})"
        reply = thought + "I look.\n```tool_code\n" + "\n".join(lines) + "\n```\n"
        assert parse_tool_calls(reply) == [ToolCall(name, given) for name, given in calls]


_F = '{"name": "f", "arguments": {}}'
_CHANNEL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
_FINAL = "<|channel|>final<|message|>"
_HEAD = "<|channel|>commentary<|message|>"
_TAGGED = f"<tool_call>{_F}</tool_call>"


def _texts(**arguments) -> ToolCall:
    return ToolCall("f", arguments, texts=True)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", []),
        ("The answer is {1, 2}.", []),
        ('{"answer": 5}', []),
        ('{"name": "Ann", "age": 5', []),
        (f"<think>{_F}<tool_call>{_F}</tool_call>", ["a thought that does not end"]),
        (f"<think>{_F}", []),
        ("Write `<tool_call>` and `<function=f>` for it.", []),
        (
            "<|tool_call_begin|>f<|tool_call_argument_begin|><|tool_call_end|>[TOOL_CALLS]g[ARGS]"
            "[TOOL_CALLS]h{}",
            [ToolCall("f", {}), ToolCall("g", {}), ToolCall("h", {})],
        ),
        ("<think>a<|tool_call_begin|>f<|tool_call_argument_begin|>{}", [ToolCall("f", {})]),
        (f"I parse the <think> tag.\n<tool_call>{_F}</tool_call>", [ToolCall("f", {})]),
        (f"<think>It has [/THINK]. <tool_call>{_F}</tool_call></think>No.", []),
        (f"{_HEAD}I parse <think>.<|end|>{_CHANNEL}{{}}", [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {"x": "print("</think>")"}}</tool_call>', ["JSON"]),
        (
            f'<tool_call>{_F}</tool_call><tool_call>{{"name": "f", </reason>}}</tool_call>',
            [ToolCall("f", {}), "no JSON"],
        ),
        ("[f(x='</think>')]", [ToolCall("f", {"x": "</think>"})]),
        (f"[f(x='<tool_call>{_F}</tool_call>')]", [ToolCall("f", {"x": _TAGGED})]),
        (f'<tool_call>{{"name": "f", {_TAGGED}', ["no JSON", ToolCall("f", {})]),
        (f"<tool_call>f: {_F}<function=f>{{}}</function></tool_call>", ["no JSON"]),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}', [ToolCall("f", {"x": "a\nb"})]),
        (f"[{_F}, {_F}]", [ToolCall("f", {})] * 2),
        ('{"parameters": {}, "name": "f"}', [ToolCall("f", {})]),
        ('{"type": "function", "function": "f", "parameters": {}}', [ToolCall("f", {})]),
        ('{"name": "Widget", "parameters": ["a"]}', []),
        ('{"name": "Doe", "arguments": "for and against"}', []),
        (f"[TOOL_CALLS] [{_F}, {{", [ToolCall("f", {}), "no JSON"]),
        (f"[TOOL_CALLS] [{_F}", [ToolCall("f", {})]),
        ("[TOOL_CALLS][]", ["list of tool calls is empty"]),
        (f"<|python_tag|>{_F}; {{", [ToolCall("f", {}), "no JSON"]),
        ("```tool_code\nf(x=1)\nf(x=", [ToolCall("f", {"x": 1}), "no list in Python"]),
        (
            '<function=f>\n<parameter=a>\nprint("<tool_call>")\n</parameter>\n</function>',
            [_texts(a='print("<tool_call>")')],
        ),
        ('<function=f><parameter=a>"</function>"</parameter></function>', ["holds a tag"]),
        (
            '<function=f><parameter=a>"</tool_call>"</parameter></function>',
            [_texts(a='"</tool_call>"')],
        ),
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
        ("<tool_call><function=f><parameter=a>1</parameter></tool_call>", [_texts(a="1")]),
        ("<function=f>\n<parameter=a>\n1\n<parameter=b>2</function>", [_texts(a="1", b="2")]),
        ("<function=f><parameter=a>1</parameter>", ["not end with"]),
        ("<function=f><parameter=a>1", ["not end with"]),
        ("<function=f>{}</function><function=f>{} and</function>", [ToolCall("f", {}), "text"]),
        ("<tool_call>f</tool_call>", [_texts()]),
        ("<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value>", ["not end with"]),
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key></tool_call>",
            ["is malformed"],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": null}', [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": ""}', [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "a": 1}', ["lacks a name or arguments"]),
        (f"<|python_tag|>{_F}<|python_tag|>{_F}\n{_F}", [ToolCall("f", {})] * 3),
        (f"```json\n{_F}\n```", [ToolCall("f", {})]),
        (
            '{"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}',
            [ToolCall("f", {"x": 1})],
        ),
        ("```tool_code\nx = 1\n```", ["more than tool calls"]),
        ("```tool_code\n```", ["no tool is called"]),
        ("```python\nf(x=1)\n```", []),
        (f"[THINK]<tool_call>{_F}</tool_call>[/THINK]", []),
        (f"<seed:think><tool_call>{_F}</tool_call></seed:think>{_F}", [ToolCall("f", {})]),
        (f"<|channel|>analysis<|message|><tool_call>{_F}<|end|>{_CHANNEL}5", ["by name"]),
        (f"<|channel|>analysis<|message|>to=f<|end|><|start|>assistant{_FINAL}to=f 5", []),
        ("<|channel|>analysis to=f code<|message|>{}", [ToolCall("f", {})]),
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


def test_identifiers_of_calls():
    for reply, expected in (
        (written("Kimi-K2", [("f", {}), ("g", {})]), ["functions.f:0", "functions.g:1"]),
        (written("Mistral", [("f", {})]), ["123456789"]),
        (written("Mistral, with identifiers", [("f", {})]), ["123456789"]),
        (written("Hermes", [("f", {})]), [""]),
    ):
        assert [identifier for _, identifier in calls_in(reply)] == expected
    assert calls_in(f"<tool_call>{{</tool_call><tool_call>{_F}") == [("", ""), ("f", "")]
    for odd in ("\\ud800", "<|end|>", "a b", "x" * 65):
        assert calls_in(f'<tool_call>{{"name": "{odd}", "arguments": {{}}}}') == [("", "")]


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
        "<function=f>",
        "<function=f><parameter=a>",
        "<tool_call>f<arg_key>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>",
        "<tool_call>" + "f" * 99,
        "```tool_code",
        '<think></think>["',
        "<think>",
        "<reason><think></reason>",
        "<tool_call>{</tool_call>",
        "[TOOL_CALLS][{},",
        "```tool_code\nf(a=",
        "<|channel|>" + "a" * 99,
        "<|channel|>commentary to=f",
        "<|channel|>commentary to=f <|constrain|>json<|message|>",
        " to=",
    ],
)
def test_hostile_replies_take_little_time(unit):
    reply = unit * (100_000 // len(unit))
    begin = time.process_time()
    assert len(parse_tool_calls(reply)) <= 65
    assert time.process_time() - begin < 1
