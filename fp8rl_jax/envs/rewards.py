"""Rewards: a built-in rule, or a user's own Python function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fp8rl_jax import user_code
from fp8rl_jax.envs.tasks import Question
from fp8rl_jax.errors import UserError

RewardFunction = Callable[[str, str, str], float]
_log = logging.getLogger(__name__)


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer, surrounding white space aside; else 0."""
    del prompt
    return float(response.strip() == answer.strip())


def math_equal(prompt: str, response: str, answer: str) -> float:
    """1 if math-verify finds response and answer mathematically equal; else 0.

    Where the answer is a number, the response must give a number: "7 + 8 =" is equal to 15, and a
    policy that is rewarded for it learns to repeat the question (docs/smollm2.md).
    """
    import math_verify  # pulls in sympy: only when asked for

    del prompt
    gold, given = math_verify.parse(answer), math_verify.parse(response)
    if not gold or not given or _is_number(gold[0]) > _is_number(given[0]):
        return 0.0
    return float(math_verify.verify(gold, given))


def _is_number(parsed: Any) -> bool:
    """Whether math-verify read a number, and not an expression that has its value.

    A fraction such as 1/2 or 50% is a number, and 8/2 is not: it is a sum that is not done.
    """
    if getattr(parsed, "is_Number", False):
        return True
    if not getattr(parsed, "is_Mul", False):
        return False
    numbers = [x for x in parsed.args if x.is_Number]
    divisors = [x for x in parsed.args if not x.is_Number]  # 1/n of a fraction or a percentage
    plain = all(len(x.atoms()) <= 2 and x.doit().is_Rational for x in divisors)
    return len(numbers) == len(divisors) == 1 and plain and not parsed.doit().is_Integer


_BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match, "math_equal": math_equal}


def load_reward(name: str) -> RewardFunction:
    """A built-in reward by name, or ``"module:function"``.

    The function takes (prompt, response, answer) as text and returns a number. Modules are looked
    for in the current directory too.

    Raises:
      UserError: the name is no built-in one and cannot be imported.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if not all(name.partition(":")):
        raise UserError(
            f"env.reward is {name!r}; write one of {', '.join(_BUILT_IN)}, or 'module:function'"
        )
    function = user_code.load(name, "env.reward:")
    if not callable(function):
        raise UserError(f"env.reward: {name!r} is not a function; name one")
    return function


def score(
    reward: RewardFunction, questions: Sequence[Question], responses: Sequence[str]
) -> tuple[list[float], int]:
    """Rewards of responses, and how many calls raised (those score 0 and are logged).

    A value that is no finite number counts as a raise.
    """
    values, errors = [], 0
    for question, response in zip(questions, responses, strict=True):
        try:
            value = float(reward(question.text, response, question.answer))
            if value != value or value in (float("inf"), float("-inf")):
                raise ValueError(f"the reward is {value}")
        except Exception as error:  # a user's function may raise anything; the run goes on
            errors += 1
            value = 0.0
            _log.warning("reward raised %s: %s", type(error).__name__, error)
        values.append(value)
    return values, errors
