r"""The reward of GSM8K and data sets like it: does a response end with the right number?

The number is what is marked as the answer: the line after the last `####`, else what is in the last
`\boxed{}`, else in the last `<answer>`, if that is a number and nothing else (`whole_number`). A
response with marks and no such number has none; one without marks has its last number. The strict
form takes the line after `#### ` alone, within the last 300 characters, as verl's does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8rl_jax.envs.rewards.written_number import Number, last_number, whole_number

_STRICT_CHARACTERS = 300
_MARK = "####"
_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|[{}]")


def gsm8k(prompt: str, response: str, answer: str) -> float:
    """1 if the response's final number is the answer's; else 0.

    Raises:
      ValueError: the answer is no number, nor marks one.
    """
    return _score(final_number(response), answer)


def gsm8k_strict(prompt: str, response: str, answer: str) -> float:
    """The same, where a response counts only with its number after '#### '."""
    return _score(strict_number(response), answer)


def _score(given: Number | None, answer: str) -> float:
    right = whole_number(answer) or _first_number(marked(answer))
    if right is None:
        raise ValueError(
            f"the answer {answer[:60]!r} is not a number; take another env.reward, or "
            "env.answer_pattern to find the number in it"
        )
    return float(given is not None and right.equals(given))


def number_text(number: Number | None) -> str | None:
    """A number as text, equal for all ways to write it; None for none."""
    return None if number is None else str(number.value)


def strict_number(response: str) -> Number | None:
    """The number on the line after the last '#### ', within the last 300 characters."""
    _, mark, rest = response[-_STRICT_CHARACTERS:].rpartition(f"{_MARK} ")
    return whole_number(rest.partition("\n")[0]) if mark else None


def final_number(text: str) -> Number | None:
    """The number that a text ends with, marked or not; None if it has none. What is behind a last
    </think> counts first."""
    for part in behind_reasoning(text):
        parts = list(marked(part))
        found = _first_number(parts) if parts else last_number(part)
        if found is not None or parts:
            return found
    return None


def behind_reasoning(text: str) -> list[str]:
    """What is behind the last </think>, if there is one, and the whole text."""
    _, thought, rest = text.rpartition("</think>")
    return [rest, text] if thought and rest.strip() else [text]


def _first_number(parts: Iterator[str] | list[str]) -> Number | None:
    return next((n for part in parts if (n := whole_number(part)) is not None), None)


def marked(text: str) -> Iterator[str]:
    """What a text marks as its answer: the line after the last '####', what is in the last box,
    and in the last <answer>."""
    _, mark, rest = text.rpartition(_MARK)
    if mark:
        yield rest.lstrip().partition("\n")[0].partition("<")[0]
    if found := boxes(text):
        yield found[-1][2]
    if (tagged := last_tagged(text)) is not None:
        yield tagged


def last_tagged(text: str) -> str | None:
    """What is in the last <answer> of a text; None without one."""
    before, end, _ = text.rpartition("</answer>")
    _, begin, inside = before.rpartition("<answer>")
    return inside if end and begin else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(begin, end, what is inside) of each complete \boxed{} or \fbox{} of a text, in order; of
    nested ones the innermost, with the place of the outermost."""
    found: list[tuple[int, int, str]] = []
    open_: list[re.Match] = []
    inner: list[str | None] = []  # of each open brace: what a box within it holds
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_.append(brace)
            inner.append(None)
        elif open_:
            begin, inside = open_.pop(), inner.pop()
            if begin[0] != "{":
                inside = inside or text[begin.end() : brace.start()]
                if not any(b[0] != "{" for b in open_):
                    found.append((begin.start(), brace.end(), inside))
            if inner and inside is not None:
                inner[-1] = inside
    return found
