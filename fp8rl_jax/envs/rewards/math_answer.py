r"""The reward `math_equal`: is a response's answer mathematically the right one?

`answer_part` finds the answer in the response. One rule reads it and the row's answer, whatever
marks they stand between, and math-verify parses and compares them. `RULES` are the cases that
math-verify gets wrong or cannot read; docs/rewards_of_pairs.md counts the pairs that need each.

Not done: numbers in words, units of another size (3 hours are not 180 minutes), other bases,
degrees against radians, decimal commas, ]1;3[ for an open interval.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fp8rl_jax.envs.reasoning import behind_reasoning
from fp8rl_jax.envs.rewards.answer_form import (
    RELATION,
    WRAPPED,
    Sides,
    has_equals,
    items,
    same,
    sides,
)
from fp8rl_jax.envs.rewards.answer_part import (
    answer_parts,
    formulas,
    is_marked,
    without_denied,
    without_marks,
    without_remark,
)
from fp8rl_jax.envs.rewards.written_number import Number, in_ascii, last_number, whole_number

_LONGEST = 400  # characters of an answer that is parsed
_MOST_ITEMS = 8  # of a list that is compared item by item
_BOX = re.compile(r"\\f?box(?:ed)?\b")
_CHOICE = re.compile(
    r"\s*(?:(?:option|choice|letter)\s+)?"
    r"(?:\(([A-Z])\)(?![-+*/^_=(])|([A-Z])(?:[).:](?=\s|$)|(?=,\s[a-z])|(?=\s*$)))(.*)",
    re.DOTALL,
)
_CHOICES = re.compile(r"\(?[A-Za-z]\)?(?:\s*,\s*\(?[A-Za-z]\)?)+")
# Dates, telephone numbers, rows of digits, and numbers in another base.
_CODE = re.compile(
    r"\d+[-/]\d+[-/]\d[\d/-]*|\d{3}-\d{4}|0[xob][\da-f]+|-?[\d.]+(?:\s+-?[\d.]+)+|"
    r"\(?(?:\d[\dA-F]*|[A-F][\dA-F]+)\)?_(?:\{[^{}]*\}|\d+)"
)
_TIME = re.compile(r"(\d{1,2}:[0-5]\d)\s*([ap]\.?\s?m\b\.?)?", re.IGNORECASE)
_RELATION = re.compile(RELATION)
_YES_OR_NO = re.compile(r"(yes|no|true|false)\s*[,.;:—]")
_SET_BUILDER = re.compile(r"\\\{\s*[a-z]\s*(?:\\mid(?![a-z])|\||:)\s*([^{}|]*)\\\}")
_UNIT_BEHIND = re.compile(r"(?<=[\w}\])°])[\s~]*" + WRAPPED.pattern + r"(?:\s*\^\{?[23]\}?)?\s*\Z")
_SPELLINGS = {
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
}
_ROOT = re.compile(r"√\s*(?:\(([^()]{1,80})\)|(\d+|[a-z]))")

_OPERATOR = re.compile(r"[=+*^_\\{}<>|√π∞±×·÷∪∩≤≥]|\d\s*/|/\s*\d")
_FUNCTION = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|max|min|gcd|lcm|det|abs|pi|inf|mod|and|"
    r"or|for|all",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z]?[a-z']{2,}[.,;:!?]?|.*[^\W\d_a-zA-Zα-ωΑ-Ω]{2,}.*")
_EDGES = " \t\n.,;:!?()[]\"'“”$*`"
_MOST_WORDS = 8


class Answer(NamedTuple):
    """An answer, read as far as that needs no parser.

    Attributes:
      text: the answer as written.
      number: its value if it is a number; else None.
      words: its text if it is words, in lower case without punctuation; else ''.
      sides: name and value if it is an equation; else None.
      letter, content: of a choice such as '(C) 42'; else ''.
    """

    text: str
    number: Number | None
    words: str
    sides: Sides | None
    letter: str
    content: str

    @property
    def value(self) -> str:
        """The text without a name."""
        return self.sides.value if self.sides else self.text

    @property
    def name(self) -> str:
        return self.sides.name if self.sides else ""


def math_equal(prompt: str, response: str, answer: str) -> float:
    """Returns 1 if the answers of response and row are mathematically equal; else 0.

    A percentage equals its value with and without the sign: 50% is 0.5 and 50. If the right answer
    is a number, the response's must be one too: "7 + 8 =" equals 15, and a policy rewarded for it
    learns to repeat the question (docs/smollm2.md). Words are compared without case, punctuation
    and surrounding LaTeX. Equal texts are equal answers.

    Raises:
      ValueError: the row's answer is neither a formula nor a few words.
    """
    visible = behind_reasoning(response)
    if _equal_as_written(answer, visible):
        return 1.0
    gold = _right(answer)
    if gold is None:
        raise ValueError(
            f"the answer {answer[:60]!r} is neither mathematics nor a few words; name another "
            "env.answer_key or env.answer_pattern"
        )
    given = _found(visible)
    return float(given is not None and _equal(gold, given))


def _equal_as_written(answer: str, visible: str) -> bool:
    right = same(answer)
    return right != "" and right in map(same, (visible, next(answer_parts(visible), "")))


def math_answer(response: str) -> str | None:
    """Returns the answer of a response as a canonical text for votes, or None. 5, x=5 and 5.0 have
    the same text, and so have 50% and 0.5."""
    given = _found(behind_reasoning(response))
    if given is None:
        return None
    if given.number:
        return str(given.number.plain)
    if given.letter or given.words:
        return given.letter or given.words
    value = None if _CODE.fullmatch(given.value) else _parsed(given.value)
    return same(given.text) if value is None else _canonical(value)


def _right(answer: str) -> Answer | None:
    """Reads the row's answer: the last formula of prose, but all of a few words with formulas."""
    text = answer if is_marked(answer) else without_remark(answer)
    places = formulas(text)
    outside = functools.reduce(lambda rest, place: rest.replace(place[2], " "), places, text)
    several = len(places) > 1 or (places and re.search(r"\d", outside))
    if several and not is_marked(text) and len(outside.split()) <= 2 * _MOST_WORDS:
        plain = without_marks(text)
        return _read(plain, right=True) or Answer(plain, None, "", None, "", "")
    return _found(text, right=True)


def _found(text: str, right: bool = False) -> Answer | None:
    """Finds and reads the answer in a text, or returns None."""
    for part in answer_parts(text):
        if (answer := _read(part, right)) is not None:
            return answer
    if _BOX.search(text) or formulas(text):
        return None
    answer = _read(text, right)
    if right or (answer and not answer.words):
        return answer
    number = last_number(without_denied(text))
    return Answer(str(number.value), number, "", None, "", "") if number else answer


def _read(text: str, right: bool = False) -> Answer | None:
    """Reads the text of an answer; returns None for prose, and for texts without content."""
    text = _trimmed(text)
    choice = _CHOICE.fullmatch(WRAPPED.sub(r"\1", text).replace("\\ ", " "))
    letter, content = ((choice[1] or choice[2]).casefold(), choice[3]) if choice else ("", "")
    number = whole_number(text, right)
    words = "" if number else _words(text)
    equation = sides(text, lambda side: whole_number(side) is not None, right)
    answer = Answer(text, number, words, equation, letter, content.strip(" ,"))
    if number or words or letter:
        return answer
    if not text.strip(_EDGES):
        return None
    outside = re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+", " ", WRAPPED.sub(" ", text))
    tokens = outside.split()
    prose = any(_WORD.fullmatch(token) and _is_word(token) for token in tokens)
    if right:
        return None if prose and len(tokens) > _MOST_WORDS else answer
    return None if prose or len(outside) > _LONGEST else answer


def _trimmed(text: str) -> str:
    """Returns a text without white space, marks and a period around it."""
    text = text.replace("{:}", ":").strip().strip("*").strip()
    return text.rstrip("。").removesuffix(".")


def _equal(gold: Answer, given: Answer) -> bool:
    for rule in RULES.values():
        verdict = rule(gold, given)
        if verdict is not None:
            return verdict
    return _verified(gold.text, given.text)


def _equal_texts(gold: str, given: str) -> bool:
    right = _read(gold, right=True)
    answer = _read(given)
    return right is not None and answer is not None and _equal(right, answer)


def _same(gold: Answer, given: Answer) -> bool | None:
    """Equal texts are equal, also where math-verify can parse neither."""
    return True if same(gold.text) == same(given.text) else None


def _codes(gold: Answer, given: Answer) -> bool | None:
    """Dates, times, rows of digits and numbers in another base are compared as texts."""
    if any(_CODE.fullmatch(a.value) and not a.number for a in (gold, given)):
        return same(gold.value) == same(given.value)
    right, found = (_TIME.fullmatch(WRAPPED.sub(r"\1", a.value)) for a in (gold, given))
    if not right and not found:
        return None
    halves = {same(t[2]).replace(".", "") for t in (right, found) if t and t[2]}
    return bool(right and found and right[1] == found[1] and len(halves) < 2)


def _letters(gold: Answer, given: Answer) -> bool | None:
    """A letter of a choice counts with and without its content: C, (C) 42."""
    if gold.letter and given.letter:
        contents = gold.content and given.content and len(gold.words) != 1
        equal = not contents or _equal_texts(gold.content, given.content)
        return gold.letter == given.letter and equal
    if gold.letter and gold.content and not gold.words:
        return _equal_texts(gold.content, given.text)
    if given.letter and given.content and not given.words and len(gold.words) != 1:
        return _equal_texts(gold.text, given.content)
    return None


def _numbers(gold: Answer, given: Answer) -> bool | None:
    """A number needs a number: no calculation, and the same value, name and unit."""
    if not gold.number:
        return None
    if not given.number or _names_differ(gold, given):
        return False
    units = {gold.number.unit, given.number.unit} - {""}
    return len(units) < 2 and gold.number.equals(given.number)


def _names_differ(gold: Answer, given: Answer) -> bool:
    """Returns whether both have a name in letters, and another one: x = 5 is not y = 5."""
    names = {same(a.name) for a in (gold, given) if re.search("[A-Za-z]", a.name)}
    words = re.search(r"[A-Za-z]{4}", gold.name + " " + given.name)
    return len(names) > 1 and not words


def _lists(gold: Answer, given: Answer) -> bool | None:
    """Lists are equal item by item: words, units, named values against a tuple."""
    gold_kind, gold_items = items(gold.text)
    given_kind, given_items = items(given.text)
    if len(gold_items) != len(given_items) or not 1 < len(gold_items) <= _MOST_ITEMS:
        return None
    by_name = "(" in (gold_kind, given_kind)
    gold_values = _values(gold_items, by_name)
    given_values = _values(given_items, by_name)
    if bool(gold_values) != bool(given_values):  # named values count in their order
        pairs = zip(gold_values or gold_items, given_values or given_items, strict=True)
        return all(_equal_texts(right, value) for right, value in pairs)
    if not {gold_kind, given_kind} <= {"", "{"}:
        return None
    for item in gold_items:
        match = next((x for x in given_items if _equal_texts(item, x)), None)
        if match is None:
            return None
        given_items = [x for x in given_items if x is not match]
    return True


def _values(listed: list[str], by_name: bool) -> list[str]:
    """Returns the values of items that all have names of their own, perhaps in the order of their
    names; [] of other items."""
    named = [answer for answer in map(_read, listed) if answer and answer.name]
    if len({same(answer.name) for answer in named}) < len(listed):
        return []
    if by_name:
        named.sort(key=lambda answer: same(answer.name))
    return [answer.value for answer in named]


def _as_words(gold: Answer, given: Answer) -> bool | None:
    """Words are compared as words, not as products of letters."""
    if gold.words:
        start = _YES_OR_NO.match(given.words or given.text.casefold())
        return gold.words in (given.words, start and start[1])
    return False if given.words else None


def _equations(gold: Answer, given: Answer) -> bool | None:
    """Of an equation the value counts, on both sides; x + y = 5 is not 5."""
    if gold.sides and given.sides:
        if _names_differ(gold, given):
            return None
        return _equal_texts(gold.value, given.value) or None
    if not gold.sides and not given.sides:
        return False if has_equals(gold.text) != has_equals(given.text) else None
    if has_equals(gold.value) or has_equals(given.value):
        return None
    return _equal_texts(gold.value, given.value)


# In this order; the first rule that says yes or no counts, and math-verify if none does.
RULES: dict[str, Callable[[Answer, Answer], bool | None]] = {
    "same": _same,
    "codes": _codes,
    "letters": _letters,
    "numbers": _numbers,
    "lists": _lists,
    "words": _as_words,
    "equations": _equations,
}


def _verified(gold: str, given: str) -> bool:
    """Returns whether two answers are equal for math-verify."""
    import math_verify

    right = _parsed(gold)
    value = _parsed(given)
    if right is None or value is None:
        return False
    return math_verify.verify(right, value, allow_set_relation_comp=True)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Returns the value of a text that math-verify parses; None if it cannot."""
    import sympy  # slow

    if len(text) > _LONGEST:
        return None
    value = _parse(_in_latex(_UNIT_BEHIND.sub("", text)))
    if _RELATION.search(text) and getattr(value, "is_number", False):
        return None  # the relation is lost
    if "e^" in text and "i" in text and hasattr(value, "xreplace"):
        return value.xreplace({x: sympy.I for x in value.free_symbols if x.name == "i"})
    if isinstance(value, sympy.FiniteSet) and all(
        isinstance(x, sympy.core.relational.Relational) and not x.is_Equality for x in value.args
    ):
        return _solutions(text, value)
    return value


def _solutions(text: str, relations: Any) -> Any:
    """Returns the numbers that fulfil inequalities joined by 'or' or 'and'."""
    import sympy

    joined = re.search(r"(?<![a-zA-Z])(or|and)(?![a-zA-Z])", text)
    if not joined or len(relations.free_symbols) != 1:
        return relations
    join = sympy.Union if joined[1] == "or" else sympy.Intersection
    return join(*[relation.as_set() for relation in relations.args])


def _parse(latex: str) -> Any:
    import math_verify

    parsed = math_verify.parse(rf"\boxed{{{latex}}}", [_configuration()])
    return next((x for x in parsed if not isinstance(x, str)), None)


@functools.cache
def _configuration() -> Any:
    """Returns math-verify's settings without its list of units, which has t, h, c and d."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    return LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        ),
    )


def _in_latex(text: str) -> str:
    """Writes a text as math-verify reads it."""
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", in_ascii(text))
    for written, latex in _SPELLINGS.items():
        text = text.replace(written, latex)
    text = re.sub(r"(?<![a-zA-Z])oo(?![a-zA-Z])", r"\\infty ", text)
    return _SET_BUILDER.sub(r"\1", text)


def _words(text: str) -> str:
    """Returns a few words or letters in canonical form; '' for other texts."""
    plain = " ".join(WRAPPED.sub(r"\1", text).replace("~", " ").split()).strip(_EDGES)
    if len(plain) == 1 and plain.isalpha():
        return plain.casefold()
    if _CHOICES.fullmatch(plain):
        return ", ".join(sorted(re.findall("[a-z]", plain.casefold())))
    tokens = plain.split(" ")
    if not plain or len(tokens) > _MOST_WORDS or _OPERATOR.search(plain):
        return ""
    wrapped = not WRAPPED.sub("", text).strip(_EDGES) and any(c.isalpha() for c in plain)
    if wrapped or plain.casefold() == "no" or any(map(_is_word, tokens)):
        return plain.casefold()
    return ""


def _is_word(token: str) -> bool:
    """Returns whether a token holds a word: at least three letters that name no function, or two of
    another script than Latin and Greek."""
    words = re.findall(r"[^\W\d_]{3,}|[^\W\d_a-zA-Zα-ωΑ-Ω]{2,}", token)
    return any(not _FUNCTION.fullmatch(word) for word in words)


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
    if value.atoms(
        sympy.factorial,
        sympy.binomial,
        sympy.gamma,
        sympy.Product,
        sympy.Mod,
        sympy.Sum,
        sympy.Integral,
        sympy.Limit,
        sympy.Derivative,
    ):
        return True
    powers = value.atoms(sympy.Pow)
    return any(p.exp.is_number and not (p.exp.is_Rational and abs(p.exp) <= 32) for p in powers)
