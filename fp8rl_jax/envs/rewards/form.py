"""The forms that a user's reward function may have, distinguished by the names of its parameters.

    (prompt, response, answer)                                    this project's
    (prompt, response, answer, row)                               with the row of the data set
    (response, answer, tolerance=0.1)                             some of these, in any order
    (response, messages)                                          with a conversation's messages
    (question, text, gold)                                        three of other names, in order
    (completions, prompts=..., COLUMN=..., **kwargs)              TRL's
    (data_source, solution_str, ground_truth, extra_info=None)    verl's
    (data_sources, solution_strs, ground_truths, extra_infos)     verl's, of a batch

A function written for TRL or verl is called with their argument names, and with lists of one
response if it takes a batch. Not supported: functions that compare the responses of a batch, since
each call gets one response. A function whose names contradict the order of the arguments, as in
(completion, answer, prompt=None), is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs.rewards.call import Failure, as_number, attempt

# Arguments of TRL that no data set or response can supply.
_OF_TRAINERS = {"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
_OURS = ("prompt", "response", "answer", "row", "messages")
# Known names of the first, second and third parameter; unknown names may have any place.
_PLACES = (
    {"prompt", "question", "problem", "query"},
    {"response", "completion", "prediction", "output", "generation"},
    {"answer", "reference", "ground_truth", "gold", "target", "label", "expected"},
)
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_OF_VERL = {*_VERL, *(f"{name}s" for name in _VERL)}


class Response(NamedTuple):
    """The inputs of a reward for one response.

    Attributes:
      prompt, response, answer: texts.
      row: all columns of the data set's row, or the item of reasoning_gym; {} for a function that
        does not take it.
      messages: the messages of a conversation after its prompt, whose last reply is `response`; []
        for a response of one reply.
    """

    prompt: str
    response: str
    answer: str
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, str]] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """The calling convention of a reward function, and how its result is read.

    Attributes:
      convention: 'TRL' or 'verl' for their names and lists; '' for this project's.
      by_place: whether prompt, response and answer are positional.
      names: the parameters that are given by name.
      any_name: whether the function takes all names of its convention (`**kwargs`).
    """

    convention: str
    by_place: bool
    names: tuple[str, ...]
    any_name: bool = False

    @functools.cached_property
    def takes_row(self) -> bool:
        """Whether the function takes the row or its columns."""
        return bool(self.convention) or "row" in self.names

    def call(self, function: Callable, about: Response, file: str) -> float | Failure | None:
        """Calls a function that has this form.

        Args:
          function: the user's function.
          about: inputs of the reward.
          file: file of the user's code, for `Failure.place`.

        Returns:
          The reward; None if the function returned None (the reward does not apply); a Failure if
          it raised an exception, or returned no number.
        """
        positional, named = self.arguments(about)
        value = attempt(function, positional, named, file)
        if isinstance(value, Failure):
            return value
        if self._lists:
            try:
                (value,) = value
            except BaseException:  # a user's class may raise anything
                given = type(value).__name__
                text = f"it returned {given}, and not a list with one reward"
                return Failure("no list of one", text)
        if self.convention == "verl" and isinstance(value, Mapping):
            if "score" not in value:
                return Failure("no score", "it returned a dict without 'score'")
            value = value["score"]
        return None if value is None else as_number(value)

    def arguments(self, about: Response) -> tuple[tuple, dict[str, Any]]:
        """Returns the positional and the named arguments of a call."""
        row = about.row
        if not self.convention:
            named = {name: getattr(about, name) for name in self.names}
            return about[:3] if self.by_place else (), named
        if self.convention == "TRL":
            prompt: Any = about.prompt
            completion: Any = about.response
            if isinstance(row.get("prompt"), (list, tuple)):  # a conversation
                prompt = row["prompt"]
                completion = list(about.messages)
                completion = completion or [{"role": "assistant", "content": about.response}]
            columns = {k: v for k, v in row.items() if k not in ("prompt", "completion")}
            given = {"answer": about.answer, **columns}
            given |= {"prompts": prompt, "completions": completion}
            given = {name: [value] for name, value in given.items()}
        else:
            own = row.get("reward_model")
            right = own.get("ground_truth") if isinstance(own, Mapping) else None
            answer = about.answer if right is None else right
            values = row.get("data_source"), about.response, answer, row.get("extra_info")
            given = dict(zip(_VERL, values, strict=True))
            if self._lists:
                given = {f"{name}s": [value] for name, value in given.items()}
        return (), {k: v for k, v in given.items() if self.any_name or k in self.names}

    @functools.cached_property
    def _lists(self) -> bool:
        """Whether the function takes and returns lists."""
        return self.convention == "TRL" or "solution_strs" in self.names


def form_of(function: Callable, name: str) -> Form:
    """Determines the form of a function; `name` is the reward's, for errors.

    Raises:
      UserError: the function has none of the forms.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object's method
    ):
        raise UserError(f"env.reward: {name!r} is asynchronous; write a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C
        return Form("", True, ())
    parameters = signature.parameters.values()
    names = tuple(signature.parameters)
    single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in single if p.default is p.empty]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    convention, missing = "", list[str]()
    if "completions" in names:
        convention, missing = "TRL", [p for p in needed if p in _OF_TRAINERS]
    elif any({f"solution_str{s}", f"ground_truth{s}"} <= {*names} for s in ("", "s")):
        convention, missing = "verl", [p for p in needed if p not in _OF_VERL]
    if missing:
        raise UserError(
            f"env.reward: {name!r} takes {signature} and is called as {convention} does, without "
            f"{', '.join(missing)}: give it a default value"
        )
    if convention:
        return Form(convention, False, names, any_name)
    own = [p.name for p in single]
    if (
        own[:3] == list(_OURS[:3])
        or "response" not in own
        or not {*needed} <= {*_OURS}
        or any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    ):
        form = Form("", True, names[3:4] if names[3:4] == ("row",) else ())
    else:
        given = {*own, *_OURS[:3]} if any_name else {*own}
        if isinstance(function, functools.partial):
            given -= {*function.keywords}
        form = Form("", False, tuple(n for n in _OURS if n in given))
    try:
        positional, named = form.arguments(Response("", "", "", {}))
        signature.bind(*positional, **named)
        good = not (form.by_place and _contradicts(names))
    except TypeError:
        good = False
    if not good:
        raise UserError(
            f"env.reward: {name!r} takes {signature}; write a function of (prompt, response, "
            "answer), of (prompt, response, answer, row), of some of these names with default "
            "values for all others, or of the parameters of TRL (completions, ...) or verl "
            "(data_source, solution_str, ground_truth, extra_info)"
        )
    return form


def _contradicts(names: Sequence[str]) -> bool:
    """Returns whether a name contradicts the place of its parameter."""
    for place, name in enumerate(names[:3]):
        if name == "row" or any(name in own for i, own in enumerate(_PLACES) if i != place):
            return True
    return any(name in _OURS[:3] for name in names[3:])
