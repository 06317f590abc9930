"""Loads what `env.step` and `env.tools` name, for the workers that call rewards.

A step's state stays pickled outside of the workers: the run's process never makes the user's
objects.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import resource
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from fp8rl_jax.base import user_code
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs.rewards.call import Failure, as_number, attempt, definition
from fp8rl_jax.envs.rewards.terms import FLOAT32_MAX, Limits, Term, source_digest
from fp8rl_jax.envs.step import Step
from fp8rl_jax.envs.tool_calls import calls_in
from fp8rl_jax.envs.tools import tool_schema, tool_step

_FORM = (
    "a function of (state, reply, row), or of (state, reply, row, cut), that returns "
    "fp8rl_jax.envs.Step(state, ...)"
)


_STATE = "env.reward_memory_gb / 256"  # most bytes of a state
_LARGEST_STATE = 2**28  # bytes, where the worker's memory has no limit


def _most_state() -> int:
    """Returns the most bytes of a pickled state in this process, a worker: the run keeps that of
    each conversation."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return min(_LARGEST_STATE, limit // 256) if limit >= 0 else _LARGEST_STATE


class StepCall(NamedTuple):
    """The arguments of a step.

    Attributes:
      reply: text of the policy's reply.
      state: the pickled state; b"" for None.
      row: all columns of the data set's row.
      cut: whether the reply was cut at a limit, and does not end with an end token.
    """

    reply: str
    state: bytes
    row: Mapping[str, Any]
    cut: bool = False


class Answered(NamedTuple):
    """A checked `Step`, as a worker returns it.

    Attributes:
      state: the pickled state; b"" for None.
      texts: texts of the observation, at least one, which may be ''.
      reward, done: as in `Step`.
      called: name and identifier of each call of a tool in the reply, '' if unknown.
    """

    state: bytes
    texts: list[str]
    reward: float
    done: bool
    called: list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class StepForm:
    """Calls a step function, and checks its result; the counterpart of `rewards.form.Form`.

    Attributes:
      takes_cut: whether the function takes the keyword `cut`.
    """

    takes_cut: bool = False
    takes_row: ClassVar[bool] = True

    def call(self, function: Callable, about: StepCall, file: str) -> Answered | Failure:
        """Returns the checked step; a Failure if the function raised an exception, or returned no
        right Step. `file`: as for `Form.call`."""
        answered = self._called(function, about, file)
        if isinstance(answered, Failure) and not answered.place:
            return answered._replace(place=definition(function))
        return answered

    def _called(self, function: Callable, about: StepCall, file: str) -> Answered | Failure:
        state = None
        if about.state:
            state = attempt(pickle.loads, (about.state,), {}, file)
            if isinstance(state, Failure):
                return state._replace(text=f"its state cannot be read back: {state.text}")
        result = attempt(
            function,
            arguments=(state, about.reply, about.row),
            named={"cut": about.cut} if self.takes_cut else {},
            file=file,
        )
        if isinstance(result, Failure):
            return result
        if not isinstance(result, tuple) or len(result) != len(Step._fields):
            return Failure(
                "no Step", f"it returned {type(result).__name__}, and not Step(state, ...)"
            )
        step = Step._make(result)
        said = step.observation
        texts = [said] if isinstance(said, str) else said
        if not (isinstance(texts, list | tuple) and all(isinstance(t, str) for t in texts)):
            return Failure(
                "no text",
                f"it returned an observation of type {type(said).__name__}, and not a text or list "
                "of texts",
            )
        reward = as_number(step.reward)
        done = attempt(bool, (step.done,), {}, file)
        if isinstance(reward, Failure):
            return reward
        if isinstance(done, Failure):
            return done
        if isinstance(step.done, str | bytes):  # bool("false") is True
            return Failure("no bool", f"it returned done={step.done[:20]!r}, and not True or False")
        if not abs(reward) <= FLOAT32_MAX:  # nan is not either
            return Failure("no finite number", f"it returned the reward {reward}")
        kept = attempt(pickle.dumps, (step.state,), {}, file)
        if isinstance(kept, Failure):
            return kept._replace(text=f"its state cannot be pickled: {kept.text}")
        if len(kept) > (most := _most_state()):
            return Failure(
                "large state",
                f"its state takes {len(kept) / 2**20:,.1f} MiB pickled, more than "
                f"{most / 2**20:,.1f} ({_STATE}): keep less in it",
            )
        kept = b"" if step.state is None else kept
        texts = [each.encode(errors="replace").decode() for each in texts or [""]]
        return Answered(kept, texts, reward, done, calls_in(about.reply))


def load_step(name: str, role: str, seconds: float = 30.0, memory_gb: float = 4.0) -> Term:
    """Loads the step of an environment.

    Args:
      name: 'module:function' of a step; for the role 'tools', 'module:NAME' of a list of functions,
        for `tool_step`.
      role: 'step' or 'tools', the field of `env` that names it.
      seconds, memory_gb: limits of a call in a worker.

    Raises:
      UserError: it cannot be imported, or has another form.
    """
    function: Any
    if role == "tools":
        function = tool_step(tool_functions(name))
    else:
        function = user_code.load(name, "env.step:")
    return Term(
        name,
        1.0,
        function,
        _form_of(function, name),
        Limits(seconds, int(memory_gb * 2**30)),
        source_digest(name),
        role,
    )


def _form_of(function: Callable, name: str) -> StepForm:
    """Determines whether a step takes `cut`; raises UserError if it takes other arguments."""
    for named in ({"cut": False}, {}):
        try:
            inspect.signature(function).bind(None, "", {}, **named)
        except (TypeError, ValueError):
            continue
        return StepForm(takes_cut=bool(named))
    raise UserError(f"env.step: {name!r} takes other arguments; write {_FORM}")


def tool_schemas(tools: str) -> list[dict[str, Any]]:
    """Returns the schemas of the functions that `env.tools` names, for a chat template."""
    return [tool_schema(function) for function in tool_functions(tools)] if tools else []


def tool_functions(tools: str) -> list[Callable]:
    """Returns the functions that `env.tools` names; raises UserError if it names no list."""
    functions = user_code.find(tools, "env.tools:")
    if not isinstance(functions, list | tuple) or not functions:
        raise UserError(
            f"env.tools: {tools!r} is {type(functions).__name__}; name a list of functions, such "
            "as TOOLS = [search, calculate]"
        )
    return list(functions)
