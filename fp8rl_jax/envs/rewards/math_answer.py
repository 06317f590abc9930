r"""The reward `math_equal`: is a response's answer mathematically the right one?

math-verify parses and compares formulas. This module selects its input: the part of a response that
is the answer. An answer may also be bare LaTeX (`2\sqrt{5}`, as in MATH-500), a number as people
write it (`whole_number`), or words ('Monday', 'A', `\text{east}`), which math-verify would read as
products of letters.

Not done: numbers in words; units (5 m equals 5 cm, as for math-verify); bases (12_7 equals 12).
"""

from __future__ import annotations

import decimal
import re
from typing import Any, NamedTuple

from fp8rl_jax.envs.rewards.final_number import behind_reasoning, boxes, marked
from fp8rl_jax.envs.rewards.written_number import Number, in_ascii, whole_number

_LONGEST = 400  # characters of a bare answer
_DELIMITER = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(|\\\[|\\f?box(?:ed)?\b")
_LIST = re.compile(r"[\s$]*(?:,|;|and|or|,\s*(?:and|or))[\s$]*")  # between boxes of one answer
_ANCHOR = re.compile(r"answer\s*(?:is|:|=)\s*:?", re.IGNORECASE)
_CHOICE = re.compile(
    r"\s*(?:(?:option|choice|letter)\s+)?(?:\(([A-Z])\)|([A-Z])(?=[).:]|\s*$))(?:[).:]|\s|$).*",
    re.DOTALL,
)
_CHOICES = re.compile(r"\(?[A-Za-z]\)?(?:\s*,\s*\(?[A-Za-z]\)?)+")
# Dates and telephone numbers, which math-verify would read as differences.
_CODE = re.compile(r"\d+[-/]\d+[-/]\d[\d/-]*|\d{3}-\d{4}")
_RELATION = re.compile(
    r"[<>≤≥≠]|\\(?:le|leq|leqslant|ge|geq|geqslant|lt|gt|ne|neq|not)(?![a-zA-Z])"
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_MIXED = re.compile(r"(?<![\w./^,{}])(\d{1,9})\s+(?:and\s+)?(\d{1,9})\s?/\s?(\d{1,9})(?![\d/.])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,30}(?:\.\d{1,30})?)[eE]([-+]?\d{1,2})(?![\w.])")
_SIGN_APART = re.compile(r"((?:^|[=:(,{]|\bis)\s*)([-−])\s+(?=[\d.\\])")
_IN_LATEX = {
    "−": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "∅": r"\emptyset ",
    r"\varnothing": r"\emptyset ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "±": r"\pm ",
    "°": r"^\circ ",
    " percent": r"\%",
}
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
_LONGEST_TEXT = 40  # characters of any other text that is compared


class Answer(NamedTuple):
    """A parsed answer.

    Attributes:
      number: value of an answer that is a number; else None.
      words: text of an answer that is words, in lower case without punctuation; else ''.
      parsed: result of math-verify: [value, text], or fewer items.
      text: the answer as written.
    """

    number: Number | None
    words: str
    parsed: list
    text: str

    @property
    def value(self) -> Any:
        """The value that math-verify parsed, or None if it parsed none."""
        return next((x for x in self.parsed if not isinstance(x, str)), None)

    @property
    def plain(self) -> str:
        """The text in lower case without spaces: equal texts are equal answers."""
        text = re.sub(r"\\[,;:! ]|\\(?:left|right)(?![a-z])|[\s$]", "", self.text)
        return text.rstrip(".").casefold()


def math_equal(prompt: str, response: str, answer: str) -> float:
    """Returns 1 if the answers of response and row are mathematically equal; else 0.

    A percentage equals its value with and without the sign: 50% is 0.5 and 50. If the right answer
    is a number, the response's must be one too: "7 + 8 =" equals 15, and a policy rewarded for it
    learns to repeat the question (docs/smollm2.md). Words are compared without case, punctuation
    and surrounding LaTeX.

    Raises:
      ValueError: the row's answer is neither a formula nor a few words.
    """
    import math_verify  # slow: it imports sympy

    gold = _given(answer) if _DELIMITER.search(answer) else _bare(answer)
    if gold is None:
        raise ValueError(
            f"the answer {answer[:60]!r} is neither mathematics nor a few words; name another "
            "env.answer_key or env.answer_pattern"
        )
    given = _given(response)
    if given is None:
        return 0.0
    if gold.plain == given.plain:
        return 1.0
    if gold.number:
        return float(_equal_numbers(gold, given))
    if gold.words:
        choice = _CHOICE.fullmatch(given.text) if len(gold.words) == 1 else None
        return float(gold.words == ((choice[1] or choice[2]).casefold() if choice else given.words))
    right, found = _value(gold), _value(given)
    if right is None or found is None or given.words:
        return 0.0
    if _is_equation(gold) and not _names(gold) and not _is_equation(given):
        return 0.0  # 5 is an answer for x = 5, but not for x + y = 5
    if _is_number(right) and not (given.number or _is_number(found)):
        return 0.0
    return float(math_verify.verify(gold.parsed, given.parsed))


def _equal_numbers(gold: Answer, given: Answer) -> bool:
    if not gold.number or not given.number:
        return False
    names = [a.text.partition("=")[0].strip() for a in (gold, given) if "=" in a.text]
    if len(set(names)) > 1:  # x = 5 is not y = 5
        return False
    return gold.number.equals(given.number) or gold.number.is_about(given.number)


def math_answer(response: str) -> str | None:
    """Returns the answer of a response as a canonical text for votes, or None. 5, x=5 and 5.0 have
    the same text, and so have 50% and 0.5."""
    given = _given(response)
    if given is None:
        return None
    if given.number:
        return str(given.number.plain)
    value = _value(given)
    return given.words or (None if value is None else _canonical(value))


def _given(response: str) -> Answer | None:
    """Finds the answer of a response, or returns None. Searches the part after the last </think>,
    then the full text. In each, the first of these is taken: the boxes, the line after the last
    '####', the last <answer>, the sentence after 'answer is', anything in the text."""
    found = (_of_response(part) for part in behind_reasoning(response))
    return next((answer for answer in found if answer is not None), None)


def _of_response(response: str) -> Answer | None:
    if found := boxes(response):
        inside = [found[-1][2]]
        for before, after in zip(found[-2::-1], found[::-1], strict=False):
            if not _LIST.fullmatch(response[before[1] : after[0]]):
                break
            inside.insert(0, before[2])
        return _boxed(",".join(inside))
    for part in marked(response):
        if (answer := _of_part(part)) is not None:
            return answer
    if anchors := list(_ANCHOR.finditer(response)):
        line = response[anchors[-1].end() :].strip().partition("\n")[0][:_LONGEST]
        if (answer := _of_part(_SENTENCE_END.split(line, maxsplit=1)[0])) is not None:
            return answer
        if choice := _CHOICE.fullmatch(line):
            return Answer(None, (choice[1] or choice[2]).casefold(), [], line)
    whole = _bare(response)
    if whole is not None and not whole.words:
        return whole
    return _answer(*_parsed(response)) or whole


def _of_part(part: str) -> Answer | None:
    """Reads the answer in a marked part."""
    return _answer(*_parsed(part)) if _DELIMITER.search(part) else _bare(part)


def _bare(text: str) -> Answer | None:
    """Reads a short text without LaTeX delimiters as an answer; None for prose, which has words
    outside LaTeX's commands and \\text{}."""
    text = text.strip()
    if not text or len(text) > _LONGEST or _DELIMITER.search(text):
        return None
    plain = re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+", " ", _TEXT.sub(" ", text))
    return _boxed(text, prose=any(map(_is_word, plain.split())))


def _boxed(text: str, prose: bool = False) -> Answer | None:
    """Reads a text as an answer; words and `prose` are not parsed as formulas."""
    found = _plainly(text)
    if found.words or (prose and not found.number):
        return _readable(found)
    return _readable(found._replace(parsed=_parsed(rf"\boxed{{{text}}}")[0]))


def _answer(parsed: list, text: str) -> Answer | None:
    return _readable(_plainly(text)._replace(parsed=parsed))


def _plainly(text: str) -> Answer:
    """Reads a text as a number or words, without math-verify."""
    number = whole_number(text)
    return Answer(number, "" if number else _words(text), [], text)


def _readable(answer: Answer) -> Answer | None:
    """Returns the answer, or None if nothing in it can be compared."""
    if _RELATION.search(answer.text) and getattr(answer.value, "is_number", False):
        answer = answer._replace(parsed=[])  # math-verify's value lacks the relation
    if answer.number or answer.words or answer.value is not None:
        return answer
    plain = " ".join(answer.text.split())
    if not plain.strip(_EDGES) or len(plain) > _LONGEST_TEXT:
        return None
    return answer._replace(words=plain.casefold())  # compared as text


def _parsed(text: str) -> tuple[list, str]:
    """Parses a text by math-verify; returns its result, and the part of the text that it parsed."""
    import math_verify

    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", in_ascii(text))
    for written, latex in _IN_LATEX.items():
        text = text.replace(written, latex)
    text = _SCIENTIFIC.sub(lambda m: f"{decimal.Decimal(m[0]):f}", text)
    text = _SIGN_APART.sub(r"\1\2", text)
    parsed = math_verify.parse(_MIXED.sub(_as_fraction, text))
    texts = [x for x in parsed if isinstance(x, str)]
    return parsed, texts[-1] if texts else ""


def _as_fraction(match: re.Match) -> str:
    whole, top, bottom = map(int, match.groups())
    return f"{whole * bottom + top}/{bottom}" if 0 < top < bottom else match[0]


def _words(text: str) -> str:
    """Returns a few words, letters or a code (`_CODE`) in canonical form; '' for other texts."""
    plain = " ".join(_TEXT.sub(r"\1", text).split()).strip(_EDGES)
    if len(plain) == 1 and plain.isalpha():
        return plain.casefold()
    if _CODE.fullmatch(plain):
        return plain
    if _CHOICES.fullmatch(plain):
        return ", ".join(sorted(re.findall("[a-z]", plain.casefold())))
    tokens = plain.split(" ")
    if not plain or len(tokens) > _MOST_WORDS or _OPERATOR.search(plain):
        return ""
    wrapped = _WRAPPED.fullmatch(text.strip(_EDGES)) and any(c.isalpha() for c in plain)
    if wrapped or plain.casefold() == "no" or any(map(_is_word, tokens)):
        return plain.casefold()
    return ""


def _is_word(token: str) -> bool:
    """Returns whether a token holds a word: at least three letters that name no function, or two of
    another script than Latin and Greek."""
    found = re.findall(r"[^\W\d_]{3,}|[^\W\d_a-zA-Zα-ωΑ-Ω]{2,}", token)
    return any(not _FUNCTION.fullmatch(word) for word in found)


def _value(answer: Answer) -> Any:
    """Returns the parsed value; for an equation its right side, which math-verify compares."""
    return answer.value.rhs if _is_equation(answer) else answer.value


def _names(answer: Answer) -> bool:
    """Returns whether the left side of an equation is a name: x, y_1, f(x)."""
    left = answer.value.lhs
    return bool(left.is_Symbol or getattr(left, "is_Function", False))


def _is_equation(answer: Answer) -> bool:
    return getattr(answer.value, "is_Equality", False)


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number (1/2, 50%) and not an unfinished calculation (8/2)."""
    if getattr(value, "is_Number", False):
        return True
    if not getattr(value, "is_Mul", False):
        return False
    numbers = [x for x in value.args if x.is_Number]
    divisors = [x for x in value.args if not x.is_Number]  # 1/n of a fraction or a percentage
    plain = all(len(x.atoms()) <= 2 and x.doit().is_Rational for x in divisors)
    return len(numbers) == len(divisors) == 1 and plain and not value.doit().is_Integer


def _canonical(value: Any) -> str:
    """Writes a value as canonical text: simplified, decimals as fractions, sets sorted."""
    import sympy

    if _is_large(value):
        return str(value)
    if isinstance(value, sympy.FiniteSet):
        parts = (x.rhs if getattr(x, "is_Equality", False) else x for x in value.args)
        return "{" + ", ".join(sorted(map(_canonical, parts))) + "}"
    if isinstance(value, sympy.Tuple):
        return "(" + ", ".join(map(_canonical, value.args)) + ")"
    if isinstance(value, sympy.Expr):
        value = sympy.expand(sympy.nsimplify(sympy.simplify(value.doit()), rational=True))
    return str(value)


def _is_large(value: Any) -> bool:
    """Returns whether simplifying may never end: large powers, factorials, sums, integrals."""
    import sympy

    if not hasattr(value, "atoms"):
        return True
    products = (sympy.factorial, sympy.binomial, sympy.gamma, sympy.Product, sympy.Mod)
    if value.atoms(*products, sympy.Sum, sympy.Integral, sympy.Limit, sympy.Derivative):
        return True
    powers = value.atoms(sympy.Pow)
    return any(p.exp.is_number and not (p.exp.is_Rational and abs(p.exp) <= 32) for p in powers)
