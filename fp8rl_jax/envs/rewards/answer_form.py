r"""Takes the text of an answer apart: equations into name and value, lists into items.

Only the text is read; nothing is computed. Brackets are respected, so `\sum_{k=1}^n k` is no
equation and `(1, 2)` is one item.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_COMMAND_END = "(?![a-zA-Z])"
_BRACKET = rf"(?P<open>\\begin{_COMMAND_END}|[(\[{{])|(?P<close>\\end{_COMMAND_END}|[)\]}}])"
_EQUALS = r"(?<![<>!:=\\])=(?!=)"
_ABOUT = rf"\\approx{_COMMAND_END}|\\simeq{_COMMAND_END}|\\doteq{_COMMAND_END}|≈"
RELATION = (
    r"[<>≤≥≠∈]|\\(?:le|leq|leqslant|ge|geq|geqslant|lt|gt|ne|neq|not|in|equiv|to)(?![a-zA-Z])"
)
_AND = r"(?:\\text\w*\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))"
_SEPARATOR = rf"\s*(?:(?:,(?!\d{{3}}(?!\d))|;|\\q?quad)\s*)+(?:{_AND}\s*)?|\s*{_AND}\s*"
_WRAP = r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|hbox|operatorname)\s*"
WRAPPED = re.compile(_WRAP + r"\{([^{}]*)\}")
_SPACING = re.compile(
    r"\\[,;:! ()\[\]]|\\(?:left|right|displaystyle|limits|big|Big)(?![a-zA-Z])|[\s$]"
)
_BETWEEN_DIGITS = re.compile(r"(?<=\d)\s+(?=\d)|(?<=\d,)\s+(?=\d{3}(?!\d))")
_ONE_LETTER = re.compile(r"\{(\w)\}")
_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\w)")
_ARGUMENT = re.compile(r"(\\?[A-Za-z]+'*)\s*(\([^()]*\))")
# Commands that leave a name a name.
_OF_NAMES = re.compile(
    r"\\(?:angle|triangle|overline|widehat|vec|overrightarrow|hat|bar|cap|cup|mid|circ|prime|left|"
    r"right|measuredangle|sin|cos|tan|cot|sec|csc|max|min|gcd|operatorname|[lr]vert|lvert|rvert|det)"
    r"(?![a-zA-Z])"
)
_NO_VARIABLE = re.compile(
    r"\\(?:[dtc]?frac|d?binom|sqrt|cdot|times|div|b?mod|pmod|pi|log|ln|exp|lg|lcm|circ|left|right|"
    r"sum|prod|int|[lr]?vert|[lr]floor|[lr]ceil|sin|cos|tan|cot|sec|csc|gcd|max|min|angle|infty|"
    r"overline|triangle|operatorname|quad|begin|end|pm|cap|cup|mid)(?![a-zA-Z])"
)
_GREEK = re.compile(r"\\[a-zA-Z]+")
_CALCULATION = re.compile(r"[\d+\-−*/^!=√²³]|\\(?:[dtc]?frac|sqrt|cdot|times|div|binom|b?mod)")
_NO_NAMES = ("", "e", "i", "π", r"\pi", "|x|", "|y|", "∞", r"\infty")
_JOINT = re.compile(r"[+\-−*/:{}\s]|\\(?:[dtc]?frac|cdot|times)(?![a-zA-Z])")
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z']{3,}|is|of|in|to|we|so)(?=\s|$)")
_LONGEST = 2000  # characters of a text that is taken apart


class Sides(NamedTuple):
    """An equation: the name, or the calculation, on one side, and the value that it is given."""

    name: str
    value: str


def split(text: str, separator: str) -> list[str]:
    """Splits a text at the matches of a pattern that are in no brackets."""
    if len(text) > _LONGEST:
        return [text]
    parts = []
    depth = start = 0
    for mark in re.finditer(rf"(?:{separator})|{_BRACKET}", text):
        if mark["open"]:
            depth += 1
        elif mark["close"]:
            depth = max(depth - 1, 0)
        elif depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [*parts, text[start:]]


def has_equals(text: str) -> bool:
    """Returns whether a text that is no list is an equation."""
    return len(split(text, _EQUALS)) > 1 and len(_items(text)) == 1


def items(text: str) -> tuple[str, list[str]]:
    r"""Returns the kind and the items of a list: '(' for a tuple, '[', '{' for a set, '' for items
    without brackets; and 'or' items. A text without separators is one item."""
    text = text.strip()
    bare = re.sub(r"\\(?:left|right)(?![a-zA-Z])\s*", "", text)
    for begin, end in (("(", ")"), ("[", "]"), (r"\{", r"\}")):
        inside = bare[len(begin) : -len(end)]
        if bare.startswith(begin) and bare.endswith(end) and _balanced(inside):
            parts = _items(inside)
            return (begin[-1], parts) if len(parts) > 1 or begin == r"\{" else ("", [text])
    return "", _items(text)


def _items(text: str) -> list[str]:
    return [part for part in map(str.strip, split(text, _SEPARATOR)) if part]


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def sides(text: str, is_number: Callable[[str], bool], right: bool = False) -> Sides | None:
    r"""Returns name and value of an equation or a chain of them: those of `AB = \sqrt{25} = 5` are
    AB and 5. None if the text is no equation, or names no value (`2x = 8`, `x^2 + y^2 = 25`).

    The value is the last side that is a number; without one, what the name on the other side is
    equal to. What follows an approximation sign counts only if a name stands before it. Of several
    equations the last counts, if the others name no value (`x^2 = 4, x = 2`).

    Args:
      text: the answer.
      is_number: returns whether a side is a finished number.
      right: whether it is the row's answer: then `a + b = 5` is a value, but `x + y = 5` and
        `3a + b = 5` are equations; of a response they are values too.
    """
    if len(split(text, RELATION)) > 1:
        return None
    *steps, text = _items(text) or [text]
    if any(not has_equals(step) or sides(step, is_number, right) for step in steps):
        return None
    texts = split(text, _EQUALS)
    if len(texts) == 1:
        texts = split(text, _ABOUT)
        if len(texts) == 1:
            return None
        if _is_name(texts[0]) or not texts[0].strip():
            return Sides(texts[0].strip(), texts[1].strip())
        return Sides("", texts[0].strip())
    texts = [split(side, _ABOUT)[0].strip() for side in texts]
    if not all(texts):
        return None
    numbers = [side for side in texts if is_number(side)]
    unnumbered = [side for side in texts if side not in numbers]
    if numbers:
        quantity = all(_is_quantity(side, right) for side in unnumbered)
        return Sides(unnumbered[0] if unnumbered else "", numbers[-1]) if quantity else None
    if _is_name(texts[-1]) and not _is_name(texts[0]):
        return Sides(texts[-1], texts[0])
    quantity = _is_name(texts[0]) or _is_quantity(texts[0], right)
    return Sides(texts[0], texts[-1]) if quantity else None


def _is_quantity(side: str, right: bool) -> bool:
    """Returns whether a side of an equation is what a question may ask for."""
    letters = _letters(side)
    coordinates = right and len(letters) > 1 and letters <= {*"xyz"}
    if not letters or (_is_name(side) and not coordinates):
        return True
    if right:
        digits = re.search(r"\d|^\s*-", _SUBSCRIPT.sub("", side))
        return not coordinates and not digits and _is_name(_JOINT.sub("", side))
    return len(letters) > 1


def _is_name(side: str) -> bool:
    r"""Returns whether a side is a name (x, AB, \angle ABC, f(2), |A|, (p, q), total cost) and no
    calculation, constant or step (|x|)."""
    if side.strip() in _NO_NAMES:
        return False
    side = _SUBSCRIPT.sub("", WRAPPED.sub("x", side))
    side = _ARGUMENT.sub(_function, side)
    return not _CALCULATION.search(_OF_NAMES.sub("", side))


def _function(match: re.Match) -> str:
    r"""Returns the name of a function without its argument; x(x+1) and \sqrt(x) are none."""
    factor = match[1].casefold() in {*"abckmntxyz"} or match[1] == r"\sqrt"
    return match[0] if factor and re.search(r"[-+*/]", match[2]) else match[1]


def _letters(side: str) -> set[str]:
    """Returns the variables of a text: letters outside words, functions and wrapped text."""
    side = _WORD.sub(" ", _NO_VARIABLE.sub(" ", WRAPPED.sub(" ", side)))
    greek = {*_GREEK.findall(side)}
    letters = greek | {*re.findall(r"[A-Za-z](?:_\w+|_\{\w+\})?", _GREEK.sub(" ", side))}
    return letters - {"e", "i"} if letters <= {"e", "i"} else letters


def same(text: str) -> str:
    r"""Returns a text in lower case without spaces, marks and spellings that change nothing: texts
    that are the same are equal answers."""
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text.replace("{,}", ","))
    text = _SPACING.sub("", _BETWEEN_DIGITS.sub("_", text))
    text = _ONE_LETTER.sub(r"\1", _ONE_LETTER.sub(r"\1", text))
    return text.rstrip(".。").casefold()
