r"""The rewards of GSM8K and similar data sets, which compare a response's final number.

The final number is the first of these marked parts that is a number and nothing else
(`whole_number`): the line after the last `####`, the content of the last `\boxed{}`, the content of
the last `<answer>`. Without any mark it is the last number of the response. The strict form takes
only the line after the last `#### `, within the last 300 characters, as verl does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8rl_jax.envs.rewards.written_number import Number, last_number, whole_number

_STRICT_CHARACTERS = 300
_MARK = "####"
_BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|[{}]")


def gsm8k(prompt: str, response: str, answer: str) -> float:
    """Returns 1 if the response's final number is the answer's; else 0.

    Raises:
      ValueError: the answer is no number, and no marked part of it is one.
    """
    return _score(final_number(response), answer)


def gsm8k_strict(prompt: str, response: str, answer: str) -> float:
    """Returns `gsm8k`'s reward for the strict form of the final number."""
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
    """Returns a number's value as text; None if `number` is None."""
    return None if number is None else str(number.value)


def strict_number(response: str) -> Number | None:
    """Returns the number on the line after the last '#### ', within the last 300 characters."""
    _, mark, rest = response[-_STRICT_CHARACTERS:].rpartition(f"{_MARK} ")
    return whole_number(rest.partition("\n")[0]) if mark else None


def final_number(text: str) -> Number | None:
    """Returns a text's final number, looked for after the last </think> first; None without one."""
    for part in behind_reasoning(text):
        parts = list(marked(part))
        found = _first_number(parts) if parts else last_number(part)
        if found is not None or parts:
            return found
    return None


def behind_reasoning(text: str) -> list[str]:
    """Returns the texts in which to look for an answer: what follows the last </think>, unless
    blank, then the full text."""
    _, thought, rest = text.rpartition("</think>")
    return [rest, text] if thought and rest.strip() else [text]


def _first_number(parts: Iterator[str] | list[str]) -> Number | None:
    return next((n for part in parts if (n := whole_number(part)) is not None), None)


def marked(text: str) -> Iterator[str]:
    """Yields the marked parts of a text: the line after the last '####', the content of the last
    box, the content of the last <answer>."""
    _, mark, rest = text.rpartition(_MARK)
    if mark:
        yield rest.lstrip().partition("\n")[0].partition("<")[0]
    if found := boxes(text):
        yield found[-1][2]
    if (tagged := last_tagged(text)) is not None:
        yield tagged


def last_tagged(text: str) -> str | None:
    """Returns the content of the last <answer> of a text; None without one."""
    before, end, _ = text.rpartition("</answer>")
    _, begin, inside = before.rpartition("<answer>")
    return inside if end and begin else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Returns (begin, end, content) of each complete \boxed{} or \fbox{} in a text, in order; for
    nested boxes, the place of the outermost and the content of the innermost."""
    found: list[tuple[int, int, str]] = []
    open_: list[re.Match] = []
    inner: list[str | None] = []  # for each open brace, the content of a box in it
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
