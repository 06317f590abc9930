r"""Finds the part of a response that is its answer, as it is written.

In the text behind the reasoning (`envs.reasoning`) these are looked for, in this order: the last
closed <answer>, the last box, the line after the last '####', the sentence after the last "answer
is", the bold number of the last line, the time of day at the end, the last formula between LaTeX's
marks. Boxes, or formulas, with nothing but separators between them (`\boxed{1} and \boxed{2}`) are
one answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from fp8rl_jax.envs.reasoning import last_tagged
from fp8rl_jax.envs.rewards.written_number import last_number, whole_number

_MARK = "####"
_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|[{}]")
_LONGEST = 400  # characters of the line behind "answer is"
_ANCHOR = re.compile(
    r"\b(?:answer|option|choice)(?:\*\*)?(?:\s+is\b|\s*[:=])\s*:?|(?:答案|結果|结果)(?:是|为|為|：|:)+"
    r"|\brespuesta(?:\s+final)?(?:\s+es|:)|\bréponse(?:\s+finale)?(?:\s+est|\s*:)"
    r"|\bantwort(?:\s+(?:ist|lautet)|:)|\bответ(?:\s*[:—-])",
    re.IGNORECASE,
)
# A period behind one of these ends no sentence.
_ABBREVIATIONS = (
    "Mr",
    "Mrs",
    "Ms",
    "Dr",
    "St",
    "Mt",
    "Prof",
    "Jr",
    "Sr",
    "vs",
    "approx",
    "Rs",
    "No",
)
_SENTENCE_END = re.compile(
    "".join(rf"(?<!\b{word})" for word in _ABBREVIATIONS)
    + r"(?<!\b[A-Za-z]\.[a-z])[.!?](?=\s|$)|。"
)
_JSON = re.compile(
    r"\"(?:final[_ ]?)?(?:answer|result|solution)\"\s*:\s*(\"[^\"]{0,400}\"|[^\s,}\[{\"]+)",
    re.IGNORECASE,
)
# A formula that is no more than the unit of the number before it.
_UNIT = re.compile(r"\s*(?:\\%|\^\{?\\circ\}?|\\text\w*\{[^{}]*\}|[a-z]{1,2})(?:\^\{?[23]\}?)?\s*")
# What explains an answer, in its box: 10 \text{ (since } 5 \cdot 2 = 10).
_REMARK = re.compile(
    r"(?:[\s,;(]|\\text\w*\s*\{[\s,;(]*|\\q?quad)(?:since|because|where|using|i\.e\.)(?![a-z]).*\Z",
    re.DOTALL,
)
_PICKED = re.compile(
    r"\b(?:option|choice)\s+\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right)", re.IGNORECASE
)
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")
_TIME = re.compile(r"(?<![\d:])\d{1,2}:[0-5]\d(?:\s?[ap]\.?m\b\.?)?(?=\D*\Z)", re.IGNORECASE)
_DENIED = re.compile(r",?\s(?:and\s|but\s)?not\s+\\?\$?\d[\d,./]*")
_WORD = r"(?:and|or)(?:\s+(?:maybe|perhaps|possibly|else|also|then))?"
_SPACE = r"(?:[\s$*]|\\[()\[\],;: ])*"
_BETWEEN = re.compile(
    rf"{_SPACE}(?:(?:[,;]|\\\\|\\q?quad|\\text\w*\s*\{{\s*{_WORD}\s*\}}|{_WORD}(?![a-z])){_SPACE})+"
    r"(?P<name>[A-Za-z](?:_\w)?\s*=\s*)?"
)
_NAMED = re.compile(r"(?<![\w\\}])[A-Za-z](?:_\w)?\s*=\s*\Z")
_FORMULA = re.compile(r"\\\\|\\\$|\$\$?|\\[()\[\]]")
_CLOSES = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}

Place = tuple[int, int, str]  # begin, end, content


def answer_parts(text: str) -> Iterator[str]:
    """Yields the parts of a text that may be its answer, the most probable first."""
    tagged = last_tagged(text)
    if tagged is not None:
        yield from answer_parts(tagged)
        yield tagged
    if places := boxes(text):
        yield without_remark(_joined(text, places))
        return
    if (line := marked_line(text)) is not None:
        yield line
    for value in _JSON.findall(text)[-1:]:
        yield value.strip('"')
    text = without_denied(text)
    for anchor in list(_ANCHOR.finditer(text))[-1:]:
        line = text[anchor.end() :].strip().partition("\n")[0][:_LONGEST]
        sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
        if places := formulas(sentence):
            yield _joined(sentence, places[: _run(sentence, places)])
        yield sentence
        if number := last_number(sentence):
            yield str(number.value)
    yield from _PICKED.findall(text)[-1:]
    if (bold := bold_number(text)) is not None:
        yield bold
    yield from _TIME.findall(text)
    if places := formulas(text):
        yield _joined(text, places)


def marked(text: str) -> Iterator[str]:
    """Yields the marked parts of a text: the content of the last <answer>, the line after the last
    '####', the content of the last box."""
    tagged = last_tagged(text)
    if tagged is not None:
        yield from marked(tagged)
        yield tagged
    if (line := marked_line(text)) is not None:
        yield line
    if places := boxes(text):
        yield without_remark(_joined(text, places))


def bold_number(text: str) -> str | None:
    """Returns the last bold number of the last line of a text; None without one. That of a list's
    item is none."""
    line = text.rstrip().rpartition("\n")[2]
    numbers = [bold for bold in _BOLD.finditer(line) if whole_number(bold[1])]
    if not numbers or (numbers[-1].start() == 0 and numbers[-1][1].endswith((".", ":", ")"))):
        return None
    return numbers[-1][1]


def without_denied(text: str) -> str:
    """Returns a text without the numbers that it says the answer is not: 88, not 80."""
    return _DENIED.sub("", text)


def is_marked(text: str) -> bool:
    """Returns whether a text marks its answer, other than as a formula."""
    return next(marked(text), None) is not None or _ANCHOR.search(text) is not None


def without_remark(text: str) -> str:
    """Returns an answer without the explanation behind it, which begins with 'since' or 'where'."""
    return _REMARK.sub("", text)


def without_marks(text: str) -> str:
    """Returns a text without the marks of its formulas."""
    for begin, end, inside in reversed(formulas(text)):
        text = text[:begin] + inside + text[end:]
    return text


def marked_line(text: str) -> str | None:
    """Returns the line after the last '####' of a text; None without one."""
    _, mark, rest = text.rpartition(_MARK)
    return rest.lstrip(": \t\r\n").partition("\n")[0].partition("<")[0] if mark else None


def boxes(text: str) -> list[Place]:
    r"""Returns the complete \boxed{} and \fbox{} of a text in order; for nested boxes, the place of
    the outermost and the content of the innermost."""
    places: list[Place] = []
    open_: list[re.Match] = []
    inner: list[str | None] = []  # for each open brace, the content of a box in it
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_.append(brace)
            inner.append(None)
        elif open_:
            begin = open_.pop()
            inside = inner.pop()
            if begin[0] != "{":
                inside = inside or text[begin.end() : brace.start()]
                if not any(b[0] != "{" for b in open_):
                    places.append((begin.start(), brace.end(), inside))
            if inner and inside is not None:
                inner[-1] = inside
    return places


def formulas(text: str) -> list[Place]:
    r"""Returns the formulas of a text between $, $$, \( \) and \[ \] in order. A $ is a currency if
    a number follows it, and a space stands before the next $."""
    places: list[Place] = []
    opened: re.Match | None = None
    for mark in _FORMULA.finditer(text):
        if opened is None or mark[0] in (r"\(", r"\["):
            opened = mark if mark[0] in _CLOSES else None
        elif mark[0] == _CLOSES[opened[0]]:
            inside = text[opened.end() : mark.start()]
            if mark[0] == "$" and inside[:1].isdigit() and inside[-1:].isspace():
                opened = mark
                continue
            unit = _UNIT.fullmatch(inside) and re.search(
                r"\d\s?\Z", text[max(opened.start() - 2, 0) : opened.start()]
            )
            if inside.strip() and not unit:
                places.append((opened.start(), mark.end(), inside))
            opened = None
    return places


def _run(text: str, places: list[Place]) -> int:
    """Returns how many places from the first one on have only separators between them."""
    for number, (before, after) in enumerate(itertools.pairwise(places), start=1):
        if not _BETWEEN.fullmatch(text, before[1], after[0]):
            return number
    return len(places)


def _joined(text: str, places: list[Place]) -> str:
    """Returns the content of the last place; with commas, that of those that are joined to it."""
    inside = [places[-1][2]]
    for before, after in zip(places[-2::-1], places[::-1], strict=False):
        between = _BETWEEN.fullmatch(text, before[1], after[0])
        if not between:
            break
        inside[0] = (between["name"] or "") + inside[0]
        inside.insert(0, before[2])
    begin = places[-len(inside)][0]
    if len(inside) > 1 and (name := _NAMED.search(text[max(begin - 20, 0) : begin])):
        inside[0] = name[0] + inside[0]
    return ", ".join(inside)
