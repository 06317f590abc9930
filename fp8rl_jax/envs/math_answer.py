r"""The reward `math_equal`: is a response's answer mathematically the right one?

math-verify reads and compares formulas. Here it is decided what it is given: which part of a
response is its answer, and that an answer may be bare LaTeX (`2\sqrt{5}`, as MATH-500 has it), a
number as people write it (`whole_number`), or words ('Monday', 'A', `\text{east}`), which
math-verify would read as products of letters.

Not done: numbers in words; units (5 m is 5 cm, as for math-verify); bases (12_7 is 12).
"""

from __future__ import annotations

import decimal
import re
from typing import Any, NamedTuple

from fp8rl_jax.envs.final_number import marked
from fp8rl_jax.envs.written_number import Number, whole_number

_LONGEST = 400  # characters of a bare answer
_DELIMITER = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(|\\\[|\\f?box(?:ed)?\b")
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_ANCHOR = re.compile(r"answer\s*(?:is|:|=)\s*:?\s*([^\n]{1,400})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_MIXED = re.compile(r"(?<![\w./^,{}])(\d{1,9})\s+(?:and\s+)?(\d{1,9})\s?/\s?(\d{1,9})(?![\d/.])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,30}(?:\.\d{1,30})?)[eE]([-+]?\d{1,2})(?![\w.])")
_SIGN_APART = re.compile(r"((?:^|[=:(,{]|\bis)\s*)([-−])\s+(?=[\d.\\])")
_IN_LATEX = {
    "−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm ", "°": r"^\circ ",
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", " percent": r"\%",
}  # fmt: skip
_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,9}")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_ROOT = re.compile(r"√\s*(?:\(([^()]{1,80})\)|(\d+|[a-z]))")

_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|textit|mathit)\s*\{([^{}]*)\}")
_WRAPPED = re.compile(r"(?:\\(?:text|mathrm|mbox|textbf|mathbf|textit|mathit)\s*\{[^{}]*\}\s*)+")
_OPERATOR = re.compile(r"[=+*^_\\{}<>|√π∞±×·÷∪∩≤≥]|\d\s*/|/\s*\d")
_FUNCTION = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|max|min|gcd|lcm|det|abs|pi|inf|mod|and|"
    r"or|for|all",
    re.IGNORECASE,
)
_EDGES = " \t\n.,;:!?()[]\"'“”$*`"
_MOST_WORDS = 8


class Answer(NamedTuple):
    """An answer that has been read.

    Attributes:
      number: that it is; None if it is another formula, or words.
      words: in lower case without punctuation; '' if it has none that count as an answer.
      parsed: what math-verify read: a value and its text, or less.
    """

    number: Number | None
    words: str
    parsed: list


def math_equal(prompt: str, response: str, answer: str) -> float:
    """1 if math-verify finds the answers of response and row mathematically equal; else 0.

    A percentage is equal to its value and to that without the sign: 50% to 0.5 and to 50. Where the
    right answer is a number, the response must give a number: "7 + 8 =" is equal to 15, and a
    policy that is rewarded for it learns to repeat the question (docs/smollm2.md). Words are
    compared without case, punctuation and LaTeX around them.

    Raises:
      ValueError: the row's answer can be read neither as a formula nor as a few words.
    """
    import math_verify  # pulls in sympy: only when asked for

    gold = _given(answer) if _DELIMITER.search(answer) else _bare(answer)
    if gold is None:
        raise ValueError(
            f"the answer {answer[:60]!r} is neither mathematics nor a few words; name another "
            "env.answer_key or env.answer_pattern"
        )
    given = _given(response)
    if given is None:
        return 0.0
    if gold.words:
        return float(gold.words == given.words)
    same = gold.number and given.number and gold.number.equals(given.number)
    if same and not (_is_equation(gold) and _is_equation(given)):  # x = 5 is not y = 5
        return 1.0
    right, found = _value(gold), _value(given)
    if right is None or found is None or given.words:
        return 0.0
    if (gold.number or _is_number(right)) and not (given.number or _is_number(found)):
        return 0.0
    return float(math_verify.verify(gold.parsed, given.parsed))


def math_answer(response: str) -> str | None:
    """The answer of a response as text, the same for many ways to write it: 5, x=5 and 5.0 are one
    vote, so are 50% and 0.5. None if it has none."""
    given = _given(response)
    if given is None:
        return None
    if given.number:
        return str(given.number.plain)
    value = _value(given)
    return given.words or (None if value is None else _canonical(value))


def _given(response: str) -> Answer | None:
    """The answer of a response: in its boxes, else in its last <answer> or after its last '####',
    else after 'answer is', else where math-verify finds one, else all of it."""
    if not _BOX.search(response):
        for part in marked(response):
            if (found := _of_part(part)) is not None:
                return found
        if anchors := _ANCHOR.findall(response):
            part = _SENTENCE_END.split(anchors[-1], maxsplit=1)[0]
            if (found := _of_part(part)) is not None:
                return found
    whole = _bare(response)
    if whole is not None and not whole.words:
        return whole
    return _answer(*_parsed(response)) or whole


def _of_part(part: str) -> Answer | None:
    """The answer that a marked part is."""
    return _answer(*_parsed(part)) if _DELIMITER.search(part) else _bare(part)


def _bare(text: str) -> Answer | None:
    """The answer that a text is as a whole, without LaTeX's marks; None if it is prose."""
    text = text.strip()
    if not text or len(text) > _LONGEST or _DELIMITER.search(text):
        return None
    number, words = whole_number(text), _words(text)
    if not number and not words and _is_prose(text):
        return None
    return _answer(_parsed(rf"\boxed{{{text}}}")[0], text)


def _answer(parsed: list, text: str) -> Answer | None:
    number = whole_number(text)
    words = "" if number else _words(text)
    if not number and not words and not any(not isinstance(x, str) for x in parsed):
        return None
    return Answer(number, words, parsed)


def _parsed(text: str) -> tuple[list, str]:
    """What math-verify reads in a text, and the part that it read."""
    import math_verify

    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    for written, latex in _IN_LATEX.items():
        text = text.replace(written, latex)
    text = _SIGN_APART.sub(r"\1\2", _SCIENTIFIC.sub(_without_exponent, text))
    parsed = math_verify.parse(_MIXED.sub(_as_fraction, text))
    texts = [x for x in parsed if isinstance(x, str)]
    return parsed, texts[-1] if texts else ""


def _as_fraction(match: re.Match) -> str:
    whole, top, bottom = map(int, match.groups())
    return f"{whole * bottom + top}/{bottom}" if 0 < top < bottom else match[0]


def _without_exponent(match: re.Match) -> str:
    return f"{decimal.Decimal(match[0]):f}"


def _words(text: str) -> str:
    """A few words, or one letter, as they are compared; '' of anything else."""
    plain = " ".join(_TEXT.sub(r"\1", text).split()).strip(_EDGES)
    if len(plain) == 1 and plain.isalpha():
        return plain.casefold()
    tokens = plain.split(" ")
    if not plain or len(tokens) > _MOST_WORDS or _OPERATOR.search(plain):
        return ""
    wrapped = _WRAPPED.fullmatch(text.strip(_EDGES)) and any(c.isalpha() for c in plain)
    if wrapped or plain.casefold() == "no" or any(map(_is_word, tokens)):
        return plain.casefold()
    return ""


def _is_word(token: str) -> bool:
    """Whether a token has a word of three letters, which is no function, or of no Latin ones."""
    found = re.findall(r"[^\W\d_]{3,}|[^\W\d_a-zA-Zα-ωΑ-Ω]{2,}", token)
    return any(not _FUNCTION.fullmatch(word) for word in found)


def _is_prose(text: str) -> bool:
    """Whether a text has words that are neither LaTeX's commands nor in LaTeX's text."""
    formula = re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+", " ", _TEXT.sub(" ", text))
    return any(map(_is_word, formula.split()))


def _value(answer: Answer) -> Any:
    """What math-verify read; of an equation its right side, as it compares them."""
    value: Any = next((x for x in answer.parsed if not isinstance(x, str)), None)
    return value.rhs if _is_equation(answer) else value


def _is_equation(answer: Answer) -> bool:
    return any(getattr(x, "is_Equality", False) for x in answer.parsed[:1])


def _is_number(value: Any) -> bool:
    """Whether math-verify read a number, and not a calculation that has its value.

    A fraction such as 1/2 or 50% is a number, and 8/2 is not: it is a division that is not done.
    """
    if getattr(value, "is_Number", False):
        return True
    if not getattr(value, "is_Mul", False):
        return False
    numbers = [x for x in value.args if x.is_Number]
    divisors = [x for x in value.args if not x.is_Number]  # 1/n of a fraction or a percentage
    plain = all(len(x.atoms()) <= 2 and x.doit().is_Rational for x in divisors)
    return len(numbers) == len(divisors) == 1 and plain and not value.doit().is_Integer


def _canonical(value: Any) -> str:
    """The text of a value in one form: calculations done, decimals as fractions, sets in order."""
    import sympy

    if isinstance(value, sympy.FiniteSet):
        parts = (x.rhs if getattr(x, "is_Equality", False) else x for x in value.args)
        return "{" + ", ".join(sorted(map(_canonical, parts))) + "}"
    if isinstance(value, sympy.Tuple):
        return "(" + ", ".join(map(_canonical, value.args)) + ")"
    if isinstance(value, sympy.Expr):
        value = sympy.expand(sympy.nsimplify(sympy.simplify(value.doit()), rational=True))
    return str(value)
