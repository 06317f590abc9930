"""The forms that a user's reward function may have, told apart by the names of its parameters.

    (prompt, response, answer)                                    this project's
    (prompt, response, answer, row)                               with the row of the data set
    (response, answer, tolerance=0.1)                             some of these, in any order
    (question, text, gold)                                        three of other names, in order
    (completions, prompts=..., COLUMN=..., **kwargs)              TRL's
    (data_source, solution_str, ground_truth, extra_info=None)    verl's
    (data_sources, solution_strs, ground_truths, extra_infos)     verl's, of a batch

So a function that was written for TRL or verl is called as there: by those names, and with lists of
one response where it takes a batch. A function that compares the responses of a batch is not
supported: each is called by itself. One whose names stand in another order than its arguments
would, as in (completion, answer, prompt=None), is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs.reward_call import Failure, as_number

# What TRL gives, and no data set or response has.
_OF_TRAINERS = (
    "completion_ids", "trainer_state", "log_extra", "log_metric", "environments",
)  # fmt: skip
_OURS = ("prompt", "response", "answer", "row")
# What the first, second and third parameter may be called; other names may stand anywhere.
_PLACES = (
    {"prompt", "question", "problem", "query"},
    {"response", "completion", "prediction", "output", "generation"},
    {"answer", "reference", "ground_truth", "gold", "target", "label", "expected"},
)
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = tuple(f"{name}s" for name in _VERL)


class Response(NamedTuple):
    """What a reward may be told of one response.

    Attributes:
      prompt, response, answer: texts.
      row: of the data set, with all its columns, or the item of reasoning_gym; {} for a function
        that is not given it.
    """

    prompt: str
    response: str
    answer: str
    row: Mapping[str, Any]


def _names(function: Callable) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of some written in C
        return []


def takes_row(function: Callable) -> bool:
    """Whether a function is given the row, by itself or by its columns."""
    names = _names(function)
    if _convention(names) is not None:
        return True
    ours = _by_name(function)
    return names[3:4] == ["row"] if ours is None else "row" in ours


def _needed(signature: inspect.Signature) -> list[str]:
    """The parameters without a default value."""
    return [
        p.name for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip


def _by_name(function: Callable) -> list[str] | None:
    """Which of `_OURS` a function is given by name; None for one that is called by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if (
        names[:3] == list(_OURS[:3])
        or "response" not in names
        or not {*_needed(signature)} <= {*_OURS}
        or any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    ):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names += _OURS[:3]
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    return [name for name in _OURS if name in names and name not in fixed]


def _contradicts(names: Sequence[str]) -> bool:
    """Whether a name says that a function which is called by position means another argument."""
    for place, name in enumerate(names[:3]):
        if name == "row" or any(name in own for i, own in enumerate(_PLACES) if i != place):
            return True
    return any(name in _OURS[:3] for name in names[3:])


def _convention(names: Sequence[str]) -> str | None:
    if "completions" in names:
        return "TRL"
    if {"solution_str", "ground_truth"} <= {*names} or {"solution_strs", "ground_truths"} <= {
        *names
    }:
        return "verl"
    return None


def check_form(function: Callable, name: str) -> None:
    """Raises UserError if a function has none of the forms; `name` is that of the reward."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object's method
    ):
        raise UserError(f"env.reward: {name!r} is asynchronous; write a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    convention = _convention(list(signature.parameters))
    needed = _needed(signature)
    if convention == "TRL":
        missing = [parameter for parameter in needed if parameter in _OF_TRAINERS]
    elif convention == "verl":
        missing = [p for p in needed if p not in (*_VERL, *_VERL_BATCH)]
    else:
        positional, named = call_of(function, Response("", "", "", {}))
        try:
            signature.bind(*positional, **named)
            good = not positional or not _contradicts(list(signature.parameters))
        except TypeError:
            good = False
        if not good:
            raise UserError(
                f"env.reward: {name!r} takes {signature}; write a function of (prompt, response, "
                "answer), of (prompt, response, answer, row), of some of these names with default "
                "values for all others, or of the parameters of TRL (completions, ...) or verl "
                "(data_source, solution_str, ground_truth, extra_info)"
            )
        return
    if missing:
        raise UserError(
            f"env.reward: {name!r} takes {signature} and is called as {convention} does, without "
            f"{', '.join(missing)}: give it a default value"
        )


def call_of(function: Callable, about: Response) -> tuple[tuple, dict[str, Any]]:
    """The positional and the named arguments that a function is called with."""
    names, row = _names(function), about.row
    convention = _convention(names)
    if convention is None:
        if (ours := _by_name(function)) is not None:
            return (), {name: getattr(about, name) for name in ours}
        return about[:3], {"row": row} if takes_row(function) else {}
    any_name = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    if convention == "TRL":
        prompt = row.get("prompt")
        conversation = isinstance(prompt, (list, tuple))
        completion: Any = about.response
        if conversation:
            completion = [{"role": "assistant", "content": about.response}]
        given = {
            "answer": about.answer, **row, "prompts": prompt if conversation else about.prompt,
            "completions": completion,
        }  # fmt: skip
        given = {k: [v] for k, v in given.items() if k not in ("prompt", "completion")}
    else:
        own = row.get("reward_model")
        right = own.get("ground_truth") if isinstance(own, Mapping) else None
        values = (
            row.get("data_source"), about.response, about.answer if right is None else right,
            row.get("extra_info"),
        )  # fmt: skip
        if "solution_strs" in names:
            given = {k: [v] for k, v in zip(_VERL_BATCH, values, strict=True)}
        else:
            given = dict(zip(_VERL, values, strict=True))
    return (), {k: v for k, v in given.items() if any_name or k in names}


def score_of(function: Callable, value: Any) -> float | Failure | None:
    """The reward in what a function returned: None where it returned None, which says that it does
    not apply; a Failure where that is no number."""
    convention = _convention(_names(function))
    if convention == "TRL" or (convention and "solution_strs" in _names(function)):
        try:
            (value,) = value
        except BaseException:  # a user's class may raise anything
            given = type(value).__name__
            return Failure("no list of one", f"it returned {given}, and not a list with one reward")
    if convention == "verl" and isinstance(value, Mapping):
        if "score" not in value:
            return Failure("no score", "it returned a dict without 'score'")
        value = value["score"]
    return None if value is None else as_number(value)
