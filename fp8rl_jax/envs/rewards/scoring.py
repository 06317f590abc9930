"""Scores responses, and counts the calls that fail.

Rewards that only compare texts (`terms.PLAIN`) are called in this process. User functions and the
other built-in rewards, which may loop, end the process or take all memory, are called in worker
processes (`pool`). A response with a failed call is not scored: its reward is nan. If all calls of
a reward in a step or an evaluation fail, the step or evaluation fails.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from fp8rl_jax.base.errors import RewardError
from fp8rl_jax.envs.question import Question
from fp8rl_jax.envs.rewards.call import Failure, failure_of
from fp8rl_jax.envs.rewards.form import Response
from fp8rl_jax.envs.rewards.pool import TIME_LIMIT, shared_pool
from fp8rl_jax.envs.rewards.terms import PLAIN, Term, weighted_sum

_log = logging.getLogger(__name__)
_GIVE_UP_AFTER = 8  # first calls in a row that take too long
_named: set[tuple[str, str]] = set()  # (name, kind) of failures that were logged


class Tally:
    """Counts the calls of an RL step or an evaluation, and those that failed."""

    def __init__(self, where: str):
        """Begins at zero. `where` begins error messages: 'RL step 3'."""
        self._where = where
        # Keys: what is counted ('calls', 'failed', 'too long'), and the name of the function.
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._first: dict[str, Failure] = {}

    @property
    def errors(self) -> int:
        """Number of failed calls of all rewards."""
        return sum(count for (what, _), count in self._counts.items() if what == "failed")

    def value(self, name: str, result: Any) -> Any:
        """Counts a call of `name`; returns its result, or None for a Failure.

        Raises:
          RewardError: the first calls all took too long, so that the rest would take hours.
        """
        self._counts["calls", name] += 1
        if not isinstance(result, Failure):
            return result
        if (name, result.kind) not in _named:
            _named.add((name, result.kind))
            counts = "such a call counts as an error, and more of this kind are not named"
            _log.warning("%s failed: %s; %s", name, result, counts)
        self._counts["failed", name] += 1
        self._counts["too long", name] += result.kind == TIME_LIMIT
        self._first.setdefault(name, result)
        if self._counts["too long", name] == self._counts["calls", name] == _GIVE_UP_AFTER:
            raise self._error(name, f"the first {_GIVE_UP_AFTER} calls", " or raise the limit")
        return None

    def everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """Runs `work`, which counts in this tally, in each process; returns the results, and adds
        up the counts, of all processes.

        Raises:
          RewardError: `work` raised it in some process.
        """
        from fp8rl_jax.base import processes  # imports JAX, which workers do not need

        if processes.count() == 1:
            return [work()]
        before = self._counts.copy()
        found = processes.everywhere(lambda: (work(), self._counts - before, self._first))
        self._counts = sum((added for _, added, _ in found), before)
        for _, _, first in reversed(found):  # a failure in an earlier process takes precedence
            self._first = self._first | first
        return [result for result, _, _ in found]

    def check(self) -> None:
        """Raises RewardError if all calls of a reward failed."""
        for (what, name), count in self._counts.items():
            if what == "calls" and self._counts["failed", name] == count:
                raise self._error(name, f"all {count} calls" if count > 1 else "the only call")

    def nothing_scored(self, what: str) -> RewardError:
        """Returns the error that nothing was scored; `what` is its subject: 'no response'."""
        first = next(iter(self._first.values()), None)
        reason = (
            "every reward was None or nan" if first is None else f"{first.text} ({first.place})"
        )
        return RewardError(f"{self._where}: {what} was scored ({reason}); correct reward or data")

    def _error(self, name: str, calls: str, remedy: str = "") -> RewardError:
        first = self._first[name]
        return RewardError(
            f"{self._where}: {calls} of {name} failed; correct it{remedy}. The first failure: "
            f"{first}\n{first.traceback}".rstrip()
        )


class Scoring:
    """The rewards of responses, in progress; the calls begin when the object is made."""

    def __init__(
        self,
        terms: Sequence[Term],
        questions: Sequence[Question],
        responses: Sequence[str],
        said: Sequence[Sequence[Mapping[str, str]]] | None = None,
    ):
        """Begins the calls; `questions` has one for each response, `said` the messages of each
        conversation after its prompt, whose last reply is the response, and which its environment
        rewards as well."""
        self._none = math.nan if said is None else 0.0  # the sum if no reward applies
        self._terms, self._calls = terms, list[list[Future]]()
        messages = said or [()] * len(responses)
        for term in terms:
            with_row = term.form.takes_row
            calls = [
                Response(q.text, response, q.answer, q.row if with_row else {}, [*own])
                for q, response, own in zip(questions, responses, messages, strict=True)
            ]
            self._calls.append(begin_calls(term, calls))

    def result(self, tally: Tally) -> tuple[list[float], dict[str, list[float]]]:
        """Waits for the scores.

        Returns:
          The weighted sums of the rewards that apply (did not return None), and each reward by its
          name, without its weight; nan where a call failed or no reward applies. The sum is 0 for a
          conversation to which no reward applies: its environment's reward is added to it.

        Raises:
          RewardError: as `Tally.value`, or no worker process can call the reward.
        """
        results: list[list] = []  # of each term: of each response
        with _cancelled_by_errors(itertools.chain(*self._calls)):
            for term, calls in zip(self._terms, self._calls, strict=True):
                results.append([])
                for call in calls:
                    results[-1].append(term.checked(call.result()))
                    tally.value(term.said, results[-1][-1])
        rows = zip(*results, strict=True)
        sums = [weighted_sum(self._terms, values, self._none) for values in rows]
        by_name = {
            term.name: [value if isinstance(value, float) else math.nan for value in values]
            for term, values in zip(self._terms, results, strict=True)
        }
        return sums, by_name


def extract_answers(term: Term, responses: Sequence[str], tally: Tally) -> list | None:
    """Returns what the reward's `extract` finds in each response, None for a call that fails or
    finds nothing; returns None instead of a list if the reward has no `extract`.

    Raises:
      RewardError: as `Scoring.result`.
    """
    if getattr(term.function, "extract", None) is None:
        return None
    calls = begin_calls(term, [(response,) for response in responses], extract=True)
    with _cancelled_by_errors(calls):
        name = f"extract of {term.said}"
        return [tally.value(name, call.result()) for call in calls]


def begin_calls(term: Term, calls: Sequence[tuple], extract: bool = False) -> list[Future]:
    """Begins calls of a term (each with a `Response` or `StepCall`) or of its `extract`; returns
    futures."""
    function: Any = term.function
    if term.name in PLAIN:
        function = function.extract if extract else function
        return [_call_here(function, call[:3]) for call in calls]
    unsent = "its row cannot be sent to a process: "
    pickled = [_call_here(pickle.dumps, (call,), unsent) for call in calls]
    sent = [call.result() for call in pickled if isinstance(call.result(), bytes)]
    futures = iter(shared_pool().submit(term, extract, sent))
    return [next(futures) if isinstance(call.result(), bytes) else call for call in pickled]


def _call_here(function: Callable, arguments: tuple, failing: str = "") -> Future:
    """Calls a function in this process; returns its result, or a Failure whose text begins with
    `failing`, as a future that is done."""
    future: Future = Future()
    try:
        future.set_result(function(*arguments))
    except Exception as error:  # wrong data for this reward
        failure = failure_of(error, "")
        future.set_result(failure._replace(text=failing + failure.text))
    return future


@contextlib.contextmanager
def _cancelled_by_errors(calls: Iterable[Future]) -> Iterator[None]:
    """Cancels the calls that have not begun if this context ends with an exception."""
    try:
        yield
    except BaseException:
        for call in calls:
            call.cancel()
        raise
