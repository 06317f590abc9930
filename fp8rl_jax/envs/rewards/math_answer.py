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
# Dates and telephone numbers, which would be differences.
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
_LONGEST_TEXT = 40  # characters of what is neither number, formula nor words


class Answer(NamedTuple):
    """An answer that has been read.

    Attributes:
      number: that it is; None if it is another formula, or words.
      words: in lower case without punctuation; '' if it has none that count as an answer.
      parsed: what math-verify read: a value and its text, or less.
      text: that was read.
    """

    number: Number | None
    words: str
    parsed: list
    text: str

    @property
    def value(self) -> Any:
        """The value that math-verify read; None without one."""
        return next((x for x in self.parsed if not isinstance(x, str)), None)

    @property
    def plain(self) -> str:
        """The text without spaces, in lower case: two that are equal are one answer."""
        text = re.sub(r"\\[,;:! ]|\\(?:left|right)(?![a-z])|[\s$]", "", self.text)
        return text.rstrip(".").casefold()


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
        return 0.0  # the right side of an equation is no answer; that of a name is
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
    """The answer of a response, behind its last </think> if there is one: in its boxes, else in its
    last <answer> or after its last '####', else after 'answer is', else where math-verify finds
    one, else all of it."""
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
    """The answer that a marked part is."""
    return _answer(*_parsed(part)) if _DELIMITER.search(part) else _bare(part)


def _bare(text: str) -> Answer | None:
    """The answer that a text is as a whole, without LaTeX's marks; None if it is prose."""
    text = text.strip()
    if not text or len(text) > _LONGEST or _DELIMITER.search(text):
        return None
    return _boxed(text, prose=_is_prose(text))


def _boxed(text: str, prose: bool = False) -> Answer | None:
    """The answer that a text is; words and `prose` are not read as formulas."""
    found = _plainly(text)
    if found.words or (prose and not found.number):
        return _readable(found)
    return _readable(found._replace(parsed=_parsed(rf"\boxed{{{text}}}")[0]))


def _answer(parsed: list, text: str) -> Answer | None:
    return _readable(_plainly(text)._replace(parsed=parsed))


def _plainly(text: str) -> Answer:
    """A text as a number or as words, before math-verify reads it."""
    number = whole_number(text)
    return Answer(number, "" if number else _words(text), [], text)


def _readable(answer: Answer) -> Answer | None:
    """The answer, or None if there is nothing in it that could be compared."""
    if _RELATION.search(answer.text) and getattr(answer.value, "is_number", False):
        answer = answer._replace(parsed=[])  # it has lost the relation
    if answer.number or answer.words or answer.value is not None:
        return answer
    plain = " ".join(answer.text.split())
    if not plain.strip(_EDGES) or len(plain) > _LONGEST_TEXT:
        return None
    return answer._replace(words=plain.casefold())  # two that are equal are one answer


def _parsed(text: str) -> tuple[list, str]:
    """What math-verify reads in a text, and the part that it read."""
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
    """A few words, or one letter, as they are compared; '' of anything else."""
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
    """Whether a token has a word of three letters, which is no function, or of no Latin ones."""
    found = re.findall(r"[^\W\d_]{3,}|[^\W\d_a-zA-Zα-ωΑ-Ω]{2,}", token)
    return any(not _FUNCTION.fullmatch(word) for word in found)


def _is_prose(text: str) -> bool:
    """Whether a text has words that are neither LaTeX's commands nor in LaTeX's text."""
    formula = re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+", " ", _TEXT.sub(" ", text))
    return any(map(_is_word, formula.split()))


def _value(answer: Answer) -> Any:
    """What math-verify read; of an equation its right side, as it compares them."""
    return answer.value.rhs if _is_equation(answer) else answer.value


def _names(answer: Answer) -> bool:
    """Whether the left side of an equation is a name: x, y_1, f(x)."""
    left = answer.value.lhs
    return bool(left.is_Symbol or getattr(left, "is_Function", False))


def _is_equation(answer: Answer) -> bool:
    return getattr(answer.value, "is_Equality", False)


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
    """Whether a calculation might take for ever: powers of powers, factorials, long sums."""
    import sympy

    if not hasattr(value, "atoms"):
        return True
    products = (sympy.factorial, sympy.binomial, sympy.gamma, sympy.Product, sympy.Mod)
    if value.atoms(*products, sympy.Sum, sympy.Integral, sympy.Limit, sympy.Derivative):
        return True
    powers = value.atoms(sympy.Pow)
    return any(p.exp.is_number and not (p.exp.is_Rational and abs(p.exp) <= 32) for p in powers)
