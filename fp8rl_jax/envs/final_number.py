r"""The reward of GSM8K and data sets like it: does a response end with the right number?

The number is what is marked as the answer: the line after the last `####`, else what is in the last
`\boxed{}`, else in the last `<answer>`, if that is a number and nothing else (`whole_number`). A
response with marks and no such number has none; one without marks has its last number. The strict
form takes the line after `#### ` alone, within the last 300 characters, as verl's does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8rl_jax.envs.written_number import Number, last_number, whole_number

_STRICT_CHARACTERS = 300
_MARK = "####"
_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|[{}]")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gsm8k(prompt: str, response: str, answer: str) -> float:
    """1 if the response's final number is the answer's; else 0.

    Raises:
      ValueError: the answer is no number, nor marks one.
    """
    return _score(final_number(response), answer)


def gsm8k_strict(prompt: str, response: str, answer: str) -> float:
    """The same, where a response counts only with its number after '#### '."""
    return _score(_strict(response), answer)


def _score(given: Number | None, answer: str) -> float:
    right = whole_number(answer) or _first_number(marked(answer))
    if right is None:
        raise ValueError(
            f"the answer {answer[:60]!r} is not a number; take another env.reward, or "
            "env.answer_pattern to find the number in it"
        )
    return float(given is not None and right.equals(given))


def gsm8k_answer(response: str) -> str | None:
    """The final number as text, the same for all ways to write it; None if there is none."""
    return _text(final_number(response))


def gsm8k_strict_answer(response: str) -> str | None:
    """The same for the strict form."""
    return _text(_strict(response))


def _text(number: Number | None) -> str | None:
    return None if number is None else str(number.value)


def _strict(response: str) -> Number | None:
    _, mark, rest = response[-_STRICT_CHARACTERS:].rpartition(f"{_MARK} ")
    return whole_number(rest.partition("\n")[0]) if mark else None


def final_number(text: str) -> Number | None:
    """The number that a text ends with, marked or not; None if it has none."""
    parts = list(marked(text))
    return _first_number(parts) if parts else last_number(text)


def _first_number(parts: Iterator[str] | list[str]) -> Number | None:
    return next((n for part in parts if (n := whole_number(part)) is not None), None)


def marked(text: str) -> Iterator[str]:
    """What a text marks as its answer: the line after the last '####', what is in the last box,
    and in the last <answer>."""
    _, mark, rest = text.rpartition(_MARK)
    if mark:
        yield rest.lstrip().partition("\n")[0].partition("<")[0]
    if (box := last_boxed(text)) is not None:
        yield box
    if tags := _TAG.findall(text):
        yield tags[-1]


def last_boxed(text: str) -> str | None:
    r"""What is in the last complete \boxed{} or \fbox{} of a text; None without one."""
    last, open_ = (0, 0), []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_.append(brace)
        elif open_ and (begin := open_.pop())[0] != "{" and begin.end() > last[0]:
            last = begin.end(), brace.start()
    return text[slice(*last)] if last[0] else None
