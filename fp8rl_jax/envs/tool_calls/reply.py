"""Finds the tool calls in a reply: its tags in one pass, and what follows each by its reader."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from fp8rl_jax.envs.reasoning import FINAL, THOUGHTS
from fp8rl_jax.envs.tool_calls import in_json, in_python, in_tags
from fp8rl_jax.envs.tool_calls.call import Found, Refusal, ToolCall

_MOST_CALLS = 64  # of one reply
_FENCE = re.compile(r"```(?:json)?\s*")
_BARE_JSON = re.compile(  # a call of Llama begins so, and hardly any other JSON does
    r"""\{ \s* (?:"type" \s* : \s* "function" \s* , \s*)? (?:"function" \s* : \s* \{ \s*)?
    "name" \s* : \s* "[^"]*" \s* , \s* "(?:parameters|arguments)" \s* : \s* \{""",
    re.VERBOSE,
)
_BARE_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(\s*(?:[A-Za-z_]\w*\s*=(?!=)|\))")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_UNENDED = "Error: the tool call stands in a thought that does not end; end it before the call"


def _bare(text: str, start: int) -> Found:
    """Reads the calls of a text without a tag; none if it is an answer, perhaps in JSON."""
    first = in_json.after_space(text, start)
    if fence := _FENCE.match(text, first):
        first = fence.end()
    if found := in_json.bare(text, first):
        return found
    if _BARE_JSON.match(text, first):
        return in_json.llama(text, first)
    return in_python.listed(text, first) if _BARE_PYTHON.match(text, first) else ([], start)


def _tagged(text: str, start: int) -> Found:
    """Reads what follows '<tool_call>'."""
    if text.startswith("<function=", in_json.after_space(text, start)):
        return [], start  # the next tag
    return in_tags.keyed(text, start) or in_json.hermes(text, start)


class _Form(NamedTuple):
    """What a tag begins.

    Attributes:
      tag: pattern of the tag.
      reader: reads what follows it.
      end: pattern of where a call ends that is refused, so that nothing in it is read.
      special: whether the tag is one token, which no thought writes by chance.
    """

    tag: str
    reader: Callable[[str, int], Found]
    end: str
    special: bool = False


_FORMS = {
    "begin": _Form(r"\A", _bare, r"\Z"),  # the empty match is the place of a call without a tag
    # The header of a message of gpt-oss, whose recipient may stand before its channel.
    "recipient": _Form(
        r"(?:\A\s*|<\|start\|>\s*assistant\s*|<\|channel\|>\s*\w+\s*)to=(?=[^\s<]{1,256}"
        r"[^<\n]{0,64}(?:<\|(?:channel|constrain)\|>[^<\n]{0,64}){0,2}<\|message\|>)",
        in_json.harmony,
        r"<\|(?:call|end|start)\|>|\Z",
    ),
    "tool_call": _Form("<tool_call>", _tagged, "</tool_call>"),
    "function": _Form("<function=", in_tags.function, "</function>|</tool_call>"),
    "mistral": _Form(r"\[TOOL_CALLS\]", in_json.mistral, r"(?=\[TOOL_CALLS\])|\Z", True),
    "llama": _Form(r"<\|python_tag\|>", in_json.llama, r"(?=<\|python_tag\|>)|\Z", True),
    "python": _Form(r"<\|python_(?:start|end)\|>", _bare, r"<\|python_end\|>|\Z", True),
    "gemma": _Form("```tool_code", in_python.block, "```"),
    "kimi": _Form(
        r"<\|tool_call_begin\|>",
        functools.partial(in_json.named, head=in_json.KIMI_HEAD),
        r"<\|tool_call_end\|>|(?=<\|tool_call_begin\|>)|\Z",
        True,
    ),
    "deepseek": _Form(
        "<｜tool▁call▁begin｜>",
        functools.partial(in_json.named, head=in_json.DEEPSEEK_HEAD),
        "<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|\\Z",
        True,
    ),
}
# The channels of gpt-oss have tags of their own, since calls stand between them.
_THOUGHTS = [marks for marks in THOUGHTS if marks.end != FINAL]
_OTHER_TAGS = {
    "thought": "|".join(re.escape(marks.begin) for marks in _THOUGHTS),
    "answer": "|".join(re.escape(marks.end) for marks in _THOUGHTS),
    "analysis": r"<\|channel\|>\s*analysis",
    "message": r"<\|(?:start|channel|end)\|>",
    "tool_call_end": "</tool_call>",
}
_PATTERNS = {kind: form.tag for kind, form in _FORMS.items()} | _OTHER_TAGS
_TAG = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()))


def parse_tool_calls(reply: str) -> list[ToolCall | str]:
    """Returns the tool calls of a reply in order: a ToolCall, or a line 'Error: ...' for the policy
    if a call is malformed. Empty if the reply calls nothing.

    A thought lies between two marks of one kind, or before the first mark that ends one (then the
    prompt began it). A mark without the other is a mention, but at the begin of the reply: what
    such a thought calls gets an error. At most 64 calls are read, and an error says so if there are
    more. The time is linear in the reply's length, whatever it contains: tags are found in one
    pass, and behind each of those that are read the text is read once.

    Example:
      >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>')
      [ToolCall(name='add', arguments={'x': 1}, texts=False)]
    """
    return _Reply(reply).calls()


class _Reply:
    """A reply while it is read."""

    def __init__(self, text: str):
        self._text = text
        self._calls: list[ToolCall | str] = []
        self._read = 0  # where what was read ends
        self._harmony = "<|channel|>" in text  # which has no other marks of thoughts
        self._missing: set[str] = set()  # marks that no thought ends with any more

    def calls(self) -> list[ToolCall | str]:
        thought = False  # whether one has ended
        unended = False  # whether the reply began with one that does not end
        analysis = False  # whether the message is a thought of gpt-oss
        for tag in _TAG.finditer(self._text):
            kind = tag.lastgroup
            assert kind
            quoted = self._text[tag.start() - 1 : tag.start()] == "`" and not tag[0].startswith("`")
            if tag.start() < self._read or quoted:
                continue
            if kind == "thought" and not self._harmony:
                behind = self._behind_thought(tag)
                unended |= not behind and not self._text[: tag.start()].strip()
                if behind:
                    thought = True
                    self._attempt("begin", behind)
            elif kind == "answer" and not (self._harmony or thought or unended):
                self._calls.clear()
                thought = True
                self._attempt("begin", tag.end())
            analysis = kind == "analysis" or (analysis and kind not in ("message", "recipient"))
            if kind in _FORMS and not analysis:
                if unended and not _FORMS[kind].special:
                    if kind != "begin":
                        return [_UNENDED]
                    continue
                unended = False
                self._attempt(kind, tag.end())
        if len(self._calls) > _MOST_CALLS:
            self._calls[_MOST_CALLS:] = [
                f"Error: only the first {_MOST_CALLS} calls of a reply are made"
            ]
        return self._calls

    def _behind_thought(self, begin: re.Match) -> int:
        """Returns where a thought ends; 0 if it does not."""
        (mark,) = (marks.end for marks in _THOUGHTS if marks.begin == begin[0])
        end = -1 if mark in self._missing else self._text.find(mark, begin.end())
        if end < 0:
            self._missing.add(mark)
            return 0
        return end + len(mark)

    def _attempt(self, kind: str, start: int) -> None:
        """Reads the calls that begin at `start`."""
        self._read = max(self._read, start)
        if len(self._calls) > _MOST_CALLS:
            return
        try:
            calls, behind = _FORMS[kind].reader(self._text, start)
        except Refusal as refusal:
            calls = [f"Error: {refusal}"]
            behind = self._refused(kind, start)
        self._calls += calls
        self._read = max(self._read, behind)

    def _refused(self, kind: str, start: int) -> int:
        """Returns where a call ends that was refused: at its own end, unless another call begins
        before."""
        end = re.compile(_FORMS[kind].end).search(self._text, start)
        if end is None:
            return start
        another = re.compile(_FORMS[kind].tag).search(self._text, start, end.start())
        return start if another else end.end()


def calls_in(reply: str) -> list[tuple[str, str]]:
    """Returns name and identifier of each call in a reply, '' where they are unknown or have other
    characters than letters of ASCII, digits and "_.:/-"."""
    calls = parse_tool_calls(reply)
    named = [(c.name, c.id) if isinstance(c, ToolCall) else ("", "") for c in calls]
    return [(name * _plain(name), identifier * _plain(identifier)) for name, identifier in named]


def _plain(text: str) -> bool:
    return _NAME.fullmatch(text) is not None
