r"""The rewards of GSM8K and similar data sets, which compare a response's final number.

The final number is the first of these marked parts behind the reasoning that is a number and
nothing else (`whole_number`): the content of the last `<answer>`, the line after the last `####`,
the content of the last `\boxed{}`. Without any mark it is the bold number of the last line, else
the last number. The strict form takes only the line after the last `#### `, within the last 300
characters, as verl does.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8rl_jax.envs.reasoning import behind_reasoning
from fp8rl_jax.envs.rewards.answer_part import bold_number, marked, without_denied
from fp8rl_jax.envs.rewards.written_number import Number, last_number, whole_number

_STRICT_CHARACTERS = 300
_MARK = "#### "


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
    right = whole_number(answer, right=True) or _first_number(marked(answer))
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
    last = behind_reasoning(response)[-_STRICT_CHARACTERS:]
    _, mark, rest = last.rpartition(_MARK)
    return whole_number(rest.partition("\n")[0]) if mark else None


def final_number(response: str) -> Number | None:
    """Returns a response's final number; None without one."""
    answer = behind_reasoning(response)
    parts = list(marked(answer))
    if parts:
        return _first_number(parts)
    return last_number(bold_number(answer) or without_denied(answer))


def _first_number(parts: Iterable[str]) -> Number | None:
    return next((n for part in parts if (n := whole_number(part)) is not None), None)
