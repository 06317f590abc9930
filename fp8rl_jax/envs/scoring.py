"""Rewards of responses, whichever process calls them, and what becomes of calls that fail.

Rewards that compare texts (`rewards.PLAIN`) are called here; a user's own, `math_equal` and
`task_score`, which may loop, end the process or take all memory, in worker processes
(`reward_pool`). A response with a call that fails is not scored: its reward is nan. Where all calls
of a step or an evaluation fail, so does that.
"""

from __future__ import annotations

import collections
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from fp8rl_jax.base.errors import RewardError
from fp8rl_jax.envs.question import Question
from fp8rl_jax.envs.reward_call import (
    BEYOND_FLOAT32,
    Failure,
    as_number,
    definition,
    failure_of,
)
from fp8rl_jax.envs.reward_form import Response, takes_row
from fp8rl_jax.envs.reward_pool import Task, shared_pool
from fp8rl_jax.envs.reward_process import TIME_LIMIT
from fp8rl_jax.envs.reward_worker import Limits
from fp8rl_jax.envs.rewards import FLOAT32_MAX, PLAIN, Term

_log = logging.getLogger(__name__)
_HOPELESS = 8  # calls that take too long, before one that does not
_named: set[tuple[str, str]] = set()  # (what failed, kind), of this process


class Tally:
    """The calls of an RL step or of an evaluation, and those that failed."""

    def __init__(self, where: str):
        """`where` begins a sentence: 'RL step 3'."""
        self._where = where
        self._calls: collections.Counter[str] = collections.Counter()
        self._failed: collections.Counter[str] = collections.Counter()
        self._too_long: collections.Counter[str] = collections.Counter()
        self._first: dict[str, Failure] = {}

    @property
    def errors(self) -> int:
        """Calls that failed, of all rewards."""
        return self._failed.total()

    def value(self, name: str, result: Any) -> Any:
        """Counts a call of `name`: its result, or None if that is a Failure.

        Raises:
          RewardError: the first calls all took too long, so that the others would take hours.
        """
        self._calls[name] += 1
        if not isinstance(result, Failure):
            return result
        if (name, result.kind) not in _named:
            _named.add((name, result.kind))
            place = f" ({result.place})" if result.place else ""
            _log.warning(
                "%s failed: %s%s; such a call counts as an error, and more of this kind are not "
                "named", name, result.text, place,
            )  # fmt: skip
        self._failed[name] += 1
        self._too_long[name] += result.kind == TIME_LIMIT
        self._first.setdefault(name, result)
        if self._too_long[name] == self._calls[name] == _HOPELESS:
            raise self._error(name, f"the first {_HOPELESS} calls", " or raise the limit")
        return None

    def everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """What `work`, which counts here, returns in each process; afterwards the calls of all are
        counted.

        Raises:
          RewardError: of `work` in any process.
        """
        from fp8rl_jax.base import (
            processes,  # with JAX, which the workers that import this do without
        )

        if processes.count() == 1:
            return [work()]
        counters = (self._calls, self._failed, self._too_long)
        before = [counter.copy() for counter in counters]

        def count() -> tuple:
            result = work()
            added = [now - was for now, was in zip(counters, before, strict=True)]
            return result, added, self._first

        found = processes.everywhere(count)
        for index, (counter, was) in enumerate(zip(counters, before, strict=True)):
            counter.clear()
            counter.update(sum((added[index] for _, added, _ in found), was))
        for _, _, first in reversed(found):  # where several have one, the first process's
            self._first = self._first | first
        return [result for result, _, _ in found]

    def check(self) -> None:
        """Raises RewardError if all calls of a reward failed."""
        for name, count in self._calls.items():
            if self._failed[name] == count:
                raise self._error(name, f"all {count} calls" if count > 1 else "the only call")

    def nothing_scored(self, what: str) -> RewardError:
        """The error for `what`, of which no response was scored."""
        first = next(iter(self._first.values()), None)
        reason = "every reward returned None" if first is None else f"{first.text} ({first.place})"
        return RewardError(f"{self._where}: {what} was scored ({reason}); correct reward or data")

    def _error(self, name: str, calls: str, remedy: str = "") -> RewardError:
        first = self._first[name]
        place = f" ({first.place})" if first.place else ""
        return RewardError(
            f"{self._where}: {calls} of {name} failed; correct it{remedy}. The first failure: "
            f"{first.text}{place}\n{first.traceback}".rstrip()
        )


class Scoring:
    """Responses that are being scored, from the moment it is made."""

    def __init__(
        self, terms: Sequence[Term], questions: Sequence[Question], responses: Sequence[str]
    ):
        """`questions`: one for each response."""
        self._terms = terms
        self._calls = [_begin(term, questions, responses) for term in terms]

    def result(self, tally: Tally) -> tuple[list[float], dict[str, list[float]]]:
        """Waits for the scores.

        Returns:
          The weighted sums of the rewards, and each reward by its name without its weight; nan
          where a response is not scored: a call failed, or no reward applies. In a sum the
          rewards count that apply, those that did not return None.

        Raises:
          RewardError: of `Tally.value`, or no worker process can call the reward.
        """
        by_name: dict[str, list[float]] = {}
        sums: list[float | None] = [None] * len(self._calls[0])
        failed: set[int] = set()
        try:
            for term, calls in zip(self._terms, self._calls, strict=True):
                found = by_name[term.name] = []
                for index, call in enumerate(calls):
                    result = _checked(term, _result(call))
                    value = tally.value(f"the reward {term.name!r}", result)
                    found.append(math.nan if value is None else value)
                    if isinstance(result, Failure):
                        failed.add(index)
                    elif value is not None:
                        before, now = sums[index], term.weight * value
                        sums[index] = now if before is None else before + now
        except BaseException:
            for calls in self._calls:
                _cancel(calls)
            raise
        scored = (None if index in failed else value for index, value in enumerate(sums))
        return [math.nan if value is None else value for value in scored], by_name


def extract_answers(term: Term, responses: Sequence[str], tally: Tally) -> list | None:
    """The answer of each response by the reward's `extract`, None where it has none or the call
    fails; None for all if the reward has no `extract`.

    Raises:
      RewardError: as `Scoring.result`.
    """
    function = getattr(term.function, "extract", None)
    if function is None:
        return None
    name = f"extract of the reward {term.name!r}"
    if term.name in PLAIN:
        return [tally.value(name, _call_here(function, text)) for text in responses]
    calls = shared_pool().submit(_task(term, True), [pickle.dumps((r,)) for r in responses])
    try:
        return [tally.value(name, call.result()) for call in calls]
    except BaseException:
        _cancel(calls)
        raise


def _begin(term: Term, questions: Sequence[Question], responses: Sequence[str]) -> list:
    """A result or a future for each response."""
    with_row = takes_row(term.function)
    calls = [
        Response(question.text, response, question.answer, question.row if with_row else {})
        for question, response in zip(questions, responses, strict=True)
    ]
    if term.name in PLAIN:
        return [_number_here(term, call[:3]) for call in calls]
    pickled = [_pickled(call) for call in calls]
    futures = shared_pool().submit(
        _task(term, False), [content for content in pickled if isinstance(content, bytes)]
    )
    following = iter(futures)
    return [next(following) if isinstance(c, bytes) else c for c in pickled]


def _number_here(term: Term, texts: tuple) -> float | Failure:
    value = _call_here(term.function, *texts)
    return value if isinstance(value, Failure) else as_number(value)


def _call_here(function: Callable, *texts: str) -> Any:
    try:
        return function(*texts)
    except Exception as error:  # the data may be wrong for this reward
        return failure_of(error, "")


def _pickled(call: tuple) -> bytes | Failure:
    try:
        return pickle.dumps(call)
    except Exception as error:  # a row may hold anything
        failure = failure_of(error, "")
        return failure._replace(text=f"its row cannot be sent to a process: {failure.text}")


def _task(term: Term, extract: bool) -> Task:
    limits = Limits(term.seconds, int(term.memory_gb * 2**30))
    return Task(term.name, extract, term.digest, limits)


def _result(call: Any) -> Any:
    return call.result() if isinstance(call, Future) else call


def _cancel(calls: Sequence) -> None:
    for call in calls:
        if isinstance(call, Future):
            call.cancel()


def _checked(term: Term, value: float | Failure | None) -> float | Failure | None:
    """The value, or a Failure if it or its part of the sum is no finite number of float32."""
    if value is None:
        return None
    if not isinstance(value, Failure):
        if max(1.0, abs(term.weight)) * abs(value) <= FLOAT32_MAX:
            return value
        kind = BEYOND_FLOAT32 if math.isfinite(value) else "no finite number"
        value = Failure(kind, f"it returned {value}, which is {kind}")
    return value if value.place else value._replace(place=definition(term.function))
