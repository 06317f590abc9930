"""The form of an environment: a pure function from the policy's reply to the next step.

::

    step(state, reply, row) -> Step(state, observation, reward, done)
    step(state, reply, row, cut) -> Step(...)       with a parameter of this name

`cut` says, by keyword, that the reply did not end by itself: it reached `rollout.max_turn_tokens`,
or the response is full. The policy can go on after the former, if the step is not `done`.

The first call of an episode gets the state None, each later call the state that the previous one
returned. The result depends on the arguments alone.

Workers call it (`step_calls`), with the limits of rewards. `tools` makes such a function of a list
of tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Step(NamedTuple):
    """The environment's answer to a reply.

    Attributes:
      state: value for the next call, of any picklable type, so that worker processes can make the
        calls. It is a new value; the given state is not changed.
      observation: text that the policy reads next, '' for nothing; or a list of texts, which are a
        message each in the roles of tools, and else its lines. Ignored if `done`.
      reward: reward of this reply, finite in float32; an episode's is the sum over its replies. nan
        counts as an error of the step, so that the episode is not scored.
      done: whether the episode ends with this reply.
    """

    state: Any
    observation: str | Sequence[str] = ""
    reward: float = 0.0
    done: bool = False


StepFunction = Callable[..., Step]  # (state, reply, row) or (state, reply, row, *, cut) -> step
