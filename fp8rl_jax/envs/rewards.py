"""Rewards: built-in rules and a user's own Python functions, one or a weighted sum of several.

A reward may have an attribute `extract`, a function from a response to its answer as text (None if
it has none): equal texts are one vote when the majority of several responses is evaluated.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fp8rl_jax import user_code
from fp8rl_jax.envs.final_number import gsm8k, gsm8k_answer, gsm8k_strict, gsm8k_strict_answer
from fp8rl_jax.envs.question import Question
from fp8rl_jax.errors import UserError

RewardFunction = Callable[..., float]
Extract = Callable[[str], str | None]
_log = logging.getLogger(__name__)


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer, surrounding white space aside; else 0."""
    del prompt
    return float(response.strip() == answer.strip())


def _stripped(response: str) -> str | None:
    return response.strip() or None


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


def _first_parsed(response: str) -> str | None:
    """The text of math-verify's first parsed value."""
    import math_verify

    parsed = math_verify.parse(response)
    return str(parsed[0]) if parsed else None


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


_BUILT_IN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math_equal": math_equal,
    "gsm8k": gsm8k,
    "gsm8k_strict": gsm8k_strict,
}
for _reward, _extract in (
    (exact_match, _stripped), (math_equal, _first_parsed), (gsm8k, gsm8k_answer),
    (gsm8k_strict, gsm8k_strict_answer),
):  # fmt: skip
    vars(_reward)["extract"] = _extract


def extract_of(reward: RewardFunction) -> Extract | None:
    """The reward's `extract`, for which a response that makes it raise has no answer; None if the
    reward has none."""
    function = getattr(reward, "extract", None)
    if function is None:
        return None

    def extract(response: str) -> str | None:
        try:
            return function(response)
        except Exception as error:  # a user's function may raise anything; the run goes on
            _log.warning("extract raised %s: %s", type(error).__name__, error)
            return None

    return extract


class Term(NamedTuple):
    """One reward of `env.reward`: its name as written there, its weight, and the function."""

    name: str
    weight: float
    function: RewardFunction


def load_rewards(text: str) -> tuple[Term, ...]:
    """The rewards of `env.reward`: 'NAME' or 'WEIGHT*NAME', separated by commas.

    Raises:
      UserError: of `load_reward`, or a weight is no number, or a name is there twice.
    """
    terms: list[Term] = []
    for weight, name in _parts(text):
        if any(term.name == name for term in terms):
            raise UserError(f"env.reward is {text!r}, with {name!r} twice: leave one out")
        value = 1.0 if weight is None else _weight(weight, text)
        terms.append(Term(name, value, load_reward(name)))
    return tuple(terms)


def reward_names(text: str) -> list[str]:
    """The names in `env.reward`, without weights."""
    return [name for _, name in _parts(text)]


def _parts(text: str) -> list[tuple[str | None, str]]:
    """(weight as written, None without one; name) of each reward in `env.reward`."""
    found = (part.strip().rpartition("*") for part in text.split(","))
    return [(weight if times else None, name.strip()) for weight, times, name in found]


def _weight(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not value:
        raise UserError(
            f"env.reward is {whole!r}, and {text.strip()!r} is no weight: write a number other "
            "than 0, as in 'exact_match, 0.5*module:function'"
        )
    return value


def load_reward(name: str) -> RewardFunction:
    """A built-in reward by name, or ``"module:function"``.

    The function takes (prompt, response, answer) as text, and `row` if its fourth argument has
    that name: the row of the data set, or the item of reasoning_gym, as a mapping. It returns a
    number. Modules are looked for in the current directory too.

    Raises:
      UserError: the name is no built-in one and cannot be imported, or takes other arguments.
    """
    name = name.strip()
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if not all(name.partition(":")):
        raise UserError(
            f"env.reward is {name!r}; write one of {', '.join(_BUILT_IN)}, or 'module:function'"
        )
    function = user_code.load(name, "env.reward:")
    if not callable(function):
        raise UserError(f"env.reward: {name!r} is not a function; name one")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some written in C
        return function
    try:
        signature.bind("", "", "", **({"row": {}} if _takes_row(function) else {}))
    except TypeError:
        raise UserError(
            f"env.reward: {name!r} takes {signature}; write a function of (prompt, response, "
            "answer), or of (prompt, response, answer, row)"
        ) from None
    return function


def _takes_row(function: RewardFunction) -> bool:
    """Whether a function's fourth argument is called `row`."""
    try:
        return list(inspect.signature(function).parameters)[3:4] == ["row"]
    except (TypeError, ValueError):
        return False


def score(
    reward: RewardFunction, questions: Sequence[Question], responses: Sequence[str]
) -> tuple[list[float], int]:
    """Rewards of responses, and how many calls raised (those score 0 and are logged).

    A value that is no finite number counts as a raise.
    """
    values, errors = [], 0
    takes_row = _takes_row(reward)
    for question, response in zip(questions, responses, strict=True):
        more = {"row": question.row} if takes_row else {}
        try:
            value = float(reward(question.text, response, question.answer, **more))
            if not math.isfinite(value):
                raise ValueError(f"the reward is {value}")
        except Exception as error:  # a user's function may raise anything; the run goes on
            errors += 1
            value = 0.0
            _log.warning("reward raised %s: %s", type(error).__name__, error)
        values.append(value)
    return values, errors


def score_terms(
    terms: Sequence[Term], questions: Sequence[Question], responses: Sequence[str]
) -> tuple[list[float], dict[str, list[float]], int]:
    """Weighted sums of the rewards, each reward by its name without its weight, and how many calls
    raised."""
    by_name, errors = {}, 0
    for term in terms:
        by_name[term.name], raised = score(term.function, questions, responses)
        errors += raised
    weighted = [[term.weight * value for value in by_name[term.name]] for term in terms]
    return [sum(rest, first) for first, *rest in zip(*weighted, strict=True)], by_name, errors
