"""Loads the terms of `env.reward`: built-in rules and a user's functions, summed with weights.

A reward may have an attribute `extract`, a function from a response to its answer (a text or None):
equal texts vote for the same answer when the majority of several responses is evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fp8rl_jax.base import user_code
from fp8rl_jax.base.bounds import TINY
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs.reasoning import behind_reasoning, last_tagged
from fp8rl_jax.envs.rewards.call import BEYOND_FLOAT32, Failure, definition
from fp8rl_jax.envs.rewards.final_number import (
    final_number,
    gsm8k,
    gsm8k_strict,
    number_text,
    strict_number,
)
from fp8rl_jax.envs.rewards.form import Form, form_of
from fp8rl_jax.envs.rewards.math_answer import math_answer, math_equal
from fp8rl_jax.envs.tasks import has_scorer

RewardFunction = Callable[..., float]


def exact_match(prompt: str, response: str, answer: str) -> float:
    """Returns 1 if the response is the answer, ignoring white space around both; else 0."""
    return float(response.strip() == answer.strip())


def task_score(prompt: str, response: str, answer: str, row: Mapping[str, Any]) -> float:
    """Scores the last <answer> behind the response's reasoning, or else all that is behind it, from
    0 to 1 by the task's scorer in reasoning_gym; without such a scorer, by `exact_match`."""
    task = row.get("metadata", {}).get("source_dataset", "")
    if not has_scorer(task):
        return exact_match(prompt, response, answer)
    given = behind_reasoning(response)
    tagged = last_tagged(given)
    return _scorer(task)((given if tagged is None else tagged).strip(), row)


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _stripped(response: str) -> str | None:
    return response.strip() or None


class BuiltIn(NamedTuple):
    """A built-in reward.

    Attributes:
      function: the reward, whose name is that of the function.
      extract: its attribute of this name.
      plain: whether it only compares texts: it can neither end a process nor run for ever, so it is
        called in the run's process.
      imports: a package that a worker imports before the first call's time begins; '' for none.
    """

    function: RewardFunction
    extract: Callable[[str], str | None]
    plain: bool = False
    imports: str = ""


_ROWS = (
    BuiltIn(exact_match, _stripped, plain=True),
    BuiltIn(task_score, _stripped, imports="reasoning_gym"),
    BuiltIn(math_equal, math_answer, imports="math_verify"),
    BuiltIn(gsm8k, lambda response: number_text(final_number(response)), plain=True),
    BuiltIn(gsm8k_strict, lambda response: number_text(strict_number(response)), plain=True),
)
BUILT_IN = {row.function.__name__: row for row in _ROWS}
for _row in _ROWS:
    vars(_row.function)["extract"] = _row.extract
PLAIN = [name for name, row in BUILT_IN.items() if row.plain]
IN_WORKERS = [name for name, row in BUILT_IN.items() if not row.plain]
FLOAT32_MAX = float.fromhex("0x1.fffffep127")


class Limits(NamedTuple):
    """The limits of a worker: seconds of a call, bytes of memory (0: no limit)."""

    seconds: float
    memory: int


@dataclasses.dataclass(frozen=True)
class Term:
    """A function that workers call: a reward of `env.reward`, or an environment's step
    (`envs.step_calls`).

    Attributes:
      name: its name, as written in the field.
      weight: factor of its value in the sum.
      function: the function; called in the run's process only if it is one of `PLAIN`.
      form: form of the function's arguments; it calls the function.
      limits: limits of calls in workers.
      digest: hash of the source of the function's module.
      role: 'reward'; 'step' or 'tools' for what `env.step` or `env.tools` names.
    """

    name: str
    weight: float
    function: RewardFunction
    form: Any
    limits: Limits
    digest: str
    role: str = "reward"

    @functools.cached_property
    def said(self) -> str:
        """What messages call it."""
        return f"the reward {self.name!r}" if self.role == "reward" else f"env.{self.role}"

    def checked(self, value: float | Failure | None) -> float | Failure | None:
        """Returns the value, or a Failure if it or its weighted value is not finite in float32."""
        if value is None:
            return None
        if not isinstance(value, Failure):
            if max(1.0, abs(self.weight)) * abs(value) <= FLOAT32_MAX:
                return value
            kind = BEYOND_FLOAT32 if math.isfinite(value) else "no finite number"
            value = Failure(kind, f"it returned {value}, which is {kind}")
        return value if value.place else value._replace(place=definition(self.function))


def weighted_sum(
    terms: Sequence[Term], values: Sequence[float | Failure | None], none: float = math.nan
) -> float:
    """Sums the `Term.checked` values of a response, weighted, over the terms that apply; returns
    nan (not scored) if a call failed, and `none` if no term applies."""
    if any(isinstance(value, Failure) for value in values):
        return math.nan
    parts = [t.weight * v for t, v in zip(terms, values, strict=True) if isinstance(v, float)]
    return functools.reduce(operator.add, parts) if parts else none  # sum() rounds differently


def load_rewards(
    text: str, seconds: float = 30.0, memory_gb: float = 4.0, tasks: Sequence[str] = ()
) -> tuple[Term, ...]:
    """Loads the rewards of `env.reward`: 'NAME' or 'WEIGHT*NAME', separated by commas.

    Args:
      text: the field; the name 'auto' stands for 'task_score' if one of the tasks has its own
        scorer, else for 'exact_match'.
      seconds: time limit of a call.
      memory_gb: memory limit of a worker in GiB; 0 for none.
      tasks: sources of questions, as in `env.task`.

    Raises:
      UserError: a name is not built in and cannot be imported, here or in another process; the
        function takes other arguments; a weight is not a number; or a name is given twice.
    """
    terms: list[Term] = []
    limits = Limits(seconds, int(memory_gb * 2**30))
    for weight, name in _parts(text):
        if name == "auto":
            name = "task_score" if any(map(has_scorer, tasks)) else "exact_match"
        if any(term.name == name for term in terms):
            raise UserError(f"env.reward is {text!r}, with {name!r} twice: leave one out")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not TINY <= abs(value) <= FLOAT32_MAX:
            raise UserError(
                f"env.reward is {text!r}, and {weight.strip()!r} is no weight: write a number "
                "other than 0 in float32, as in 'exact_match, 0.5*module:function'"
            )
        function, form = _load(name)
        terms.append(Term(name, value, function, form, limits, source_digest(name)))
    return tuple(terms)


def reward_names(text: str) -> list[str]:
    """Returns the names in `env.reward`, without weights."""
    return [name for _, name in _parts(text)]


def _parts(text: str) -> list[tuple[str, str]]:
    """Splits `env.reward` into (weight, name) pairs; the weight is as written, by default '1'."""
    found = (part.strip().rpartition("*") for part in text.split(","))
    return [(weight if times else "1", name.strip()) for weight, times, name in found]


def _load(name: str) -> tuple[RewardFunction, Form]:
    """Loads a built-in reward by name, or ``"module:function"``, and returns it with its form.

    The function returns a number, or None if it does not apply to a response. Another process must
    be able to import its module.
    """
    if name in BUILT_IN:
        function = BUILT_IN[name].function
        return function, form_of(function, name)
    if not all(name.partition(":")):
        raise UserError(
            f"env.reward is {name!r}; write one of auto, {', '.join(BUILT_IN)}, or "
            "'module:function'"
        )
    module = name.partition(":")[0]
    loaded = None if module == "__main__" else user_code.load(name, "env.reward:")
    if loaded is None or getattr(sys.modules.get(module), "__spec__", None) is None:
        raise UserError(
            f"env.reward: {name!r} is not in a module that a worker process can import: write the "
            "function in a file of its own, and name it 'FILE_WITHOUT_PY:FUNCTION'"
        )
    return loaded, form_of(loaded, name)


def source_digest(reward: str) -> str:
    """Returns the hash of the present source of a reward's module; '' if there is none."""
    try:
        with open(module_file(reward), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def module_file(reward: str) -> str:
    """Returns the file of a reward's imported module; '' for a built-in reward."""
    module, colon, _ = reward.partition(":")
    return getattr(sys.modules.get(module), "__file__", None) or "" if colon else ""
