"""The reward of GSM8K and data sets like it: does a response end with the right number?

The number is the one after the last `####`, else in the last `\\boxed{}`, else the last one. The
strict form takes the first of these alone, within the last 300 characters, as verl's does.
Numbers are compared as fractions: 1,072 is 1072.0, 0.5 is 1/2, and -0 is 0. A quotient that comes
out even, such as 8/2, is no number but a sum that is not done.
"""

from __future__ import annotations

import fractions
import re
from collections.abc import Iterator

_STRICT_CHARACTERS = 300
_MOST_DIGITS = 100  # of a number; more are noise, and slow
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:[$€£]\s?)?(?P<top>{_DIGITS}(?:\.\d+)?|\.\d+)"
    rf"(?:\s?/\s?(?P<bottom>{_DIGITS}))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?[\d,.]+)\s*\}\s*\{\s*([\d,.]+)\s*\}")
_SPELLINGS = {"−": "-", "–": "-", "{,}": ",", r"\,": "", r"\!": "", r"\$": "$", " ": " "}
_STRICT = re.compile(r"#### (-?[$]?[0-9.,]+)")


def gsm8k(prompt: str, response: str, answer: str) -> float:
    """1 if the response's final number is the answer's; else 0.

    Raises:
      ValueError: the answer holds no number.
    """
    del prompt
    right = final_number(answer)
    if right is None:
        raise ValueError(f"the answer {answer[:60]!r} holds no number; take another env.reward")
    return float(final_number(response) == right)


def gsm8k_strict(prompt: str, response: str, answer: str) -> float:
    """The same, where a response counts only with its number after '#### '."""
    return gsm8k(prompt, _strict(response), answer)


def _strict(response: str) -> str:
    """What is after the last '#### ' near the end; '' if nothing is."""
    found = _STRICT.findall(_plain(response[-_STRICT_CHARACTERS:]))
    return found[-1] if found else ""


def gsm8k_answer(response: str) -> str | None:
    """The final number as text, the same for all ways to write it; None if there is none."""
    number = final_number(response)
    return None if number is None else str(number)


def gsm8k_strict_answer(response: str) -> str | None:
    """The same for the strict form."""
    return gsm8k_answer(_strict(response))


def final_number(text: str) -> fractions.Fraction | None:
    """The number that a text ends with, marked or not; None if it holds none."""
    text = _plain(text)
    for part in _marked(text):
        match = _NUMBER.search(part)
        if match and (number := _value(match)) is not None:
            return number
    numbers = [n for match in _NUMBER.finditer(text) if (n := _value(match)) is not None]
    return numbers[-1] if numbers else None


def _marked(text: str) -> Iterator[str]:
    """The line after the last '####', then what is in the last \\boxed{}."""
    _, mark, rest = text.rpartition("####")
    if mark:
        yield rest.lstrip().partition("\n")[0]
    _, box, rest = text.rpartition(r"\boxed{")
    if box:
        yield rest.partition("}")[0]


def _plain(text: str) -> str:
    """Minus signs, spaces and fractions of LaTeX and Unicode in ASCII."""
    for written, plain in _SPELLINGS.items():
        text = text.replace(written, plain)
    return _FRACTION.sub(r"\1/\2", text)


def _value(match: re.Match) -> fractions.Fraction | None:
    """The number of a match of _NUMBER; None for a quotient that is not done."""
    top, bottom = match["top"].replace(",", ""), (match["bottom"] or "1").replace(",", "")
    if len(top) + len(bottom) > _MOST_DIGITS or not int(bottom):
        return None
    value = fractions.Fraction(top) / int(bottom)
    if match["bottom"] and value.denominator == 1:
        return None
    return -value if match["sign"] == "-" else value
