"""Finds the tool calls in a reply: its tags in one pass, and what follows each by its reader."""

from __future__ import annotations

import re
from collections.abc import Callable

from fp8rl_jax.envs.reasoning import FINAL, THOUGHTS
from fp8rl_jax.envs.tool_calls import in_json, in_python, in_tags
from fp8rl_jax.envs.tool_calls.call import Found, Refusal, ToolCall

# A call may stand between the channels of gpt-oss, so those have tags of their own.
_THOUGHTS = [marks for marks in THOUGHTS if marks.end != FINAL]

_MOST_CALLS = 64  # of one reply
_BARE_JSON = re.compile(  # a call of Llama begins so, and hardly any other JSON does
    r"""(?:```(?:json)?\s*)?(?=\{ \s* (?:"type" \s* : \s* "function" \s* , \s*)?
    (?:"function" \s* : \s* \{ \s*)?
    "name" \s* : \s* "[^"]*" \s* , \s* "(?:parameters|arguments)")""",
    re.VERBOSE,
)
_BARE_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(\s*(?:[A-Za-z_]\w*\s*=(?!=)|\))")


def _bare(text: str, start: int, end: int) -> Found:
    """Reads the calls of a text without a tag; none if it is an answer, perhaps in JSON."""
    first = in_json.after_space(text, start)
    if found := _BARE_JSON.match(text, first):
        return in_json.llama(text, found.end(), end)
    if _BARE_PYTHON.match(text, first):
        return in_python.listed(text, start, end)
    return [], start


def _tagged(text: str, start: int, end: int) -> Found:
    """Reads what follows '<tool_call>'."""
    if text.startswith("<function=", in_json.after_space(text, start)):
        return [], start  # the next tag
    return in_tags.keyed(text, start, end) or in_json.hermes(text, start, end)


_Reader = Callable[[str, int, int], Found]
# Kind of a tag, its pattern, and the reader of what follows it.
_TAGS: list[tuple[str, str, _Reader | None]] = [
    ("begin", r"\A", _bare),  # the empty match is the place of a call without a tag
    ("thought", "|".join(re.escape(marks.begin) for marks in _THOUGHTS), None),
    ("answer", "|".join(re.escape(marks.end) for marks in _THOUGHTS), _bare),
    # The header of a message of gpt-oss, whose recipient may stand before its channel.
    (
        "recipient",
        r"(?:\A\s*|<\|start\|>\s*assistant\s*|<\|channel\|>\s*\w+\s*)to=(?=[^\s<]{1,256}[^<\n]{0,64}"
        r"(?:<\|(?:channel|constrain)\|>[^<\n]{0,64}){0,2}<\|message\|>)",
        in_json.harmony,
    ),
    ("analysis", r"<\|channel\|>\s*analysis", None),
    ("message", r"<\|(?:start|channel|end)\|>", None),
    ("tool_call", "<tool_call>", _tagged),
    ("tool_call_end", "</tool_call>", None),
    ("function", "<function=", in_tags.function),
    ("mistral", r"\[TOOL_CALLS\]", in_json.mistral),
    ("llama", r"<\|python_tag\|>", in_json.llama),
    ("python", r"<\|python_(?:start|end)\|>", _bare),
    ("gemma", "```tool_code", in_python.block),
    ("kimi", r"<\|tool_call_begin\|>", in_json.kimi),
    ("deepseek", "<｜tool▁call▁begin｜>", in_json.deepseek),
]
_TAG = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern, _ in _TAGS))
_READERS = {kind: reader for kind, _, reader in _TAGS if reader is not None}


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
    thinking = None  # the kind of the tag that began a thought; '' behind one, None before any
    read = 0  # where the calls end that were read
    tags = list(_TAG.finditer(reply))
    ends = [tag.start() for tag in tags[1:]] + [len(reply)]
    for tag, end in zip(tags, ends, strict=True):
        kind = tag.lastgroup
        assert kind
        if tag.start() < read:
            continue
        if kind in ("thought", "analysis"):
            thinking = thinking or kind
        elif kind == "answer":
            if thinking is None:  # the prompt began the thought
                calls.clear()
            thinking = ""
        elif thinking == "analysis" and kind in ("message", "recipient"):
            thinking = ""
        if kind in _READERS and not thinking and len(calls) <= _MOST_CALLS:
            try:
                found, read = _READERS[kind](reply, tag.end(), end)
            except Refusal as refusal:
                found, read = [f"Error: {refusal}"], tag.end()
            calls += found
    if len(calls) > _MOST_CALLS:
        calls[_MOST_CALLS:] = [f"Error: only the first {_MOST_CALLS} calls of a reply are made"]
    return calls


def calls_in(reply: str) -> list[tuple[str, str]]:
    """Returns name and identifier of each call in a reply, '' where they are unknown."""
    found = parse_tool_calls(reply)
    return [(c.name, c.id) if isinstance(c, ToolCall) else ("", "") for c in found]
