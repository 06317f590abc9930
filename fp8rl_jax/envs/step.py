"""The form of an environment: a pure function from the policy's reply to the next step.

::

    step(state, reply, row) -> Step(state, observation, reward, done)

The first call of an episode gets the state None, each later call the state that the previous one
returned. The result depends on the arguments alone.

A question with a reward is an environment of one reply (`one_reply`). No run calls a function of
this form yet: runs have one reply, and score the replies of a step together (`rewards.scoring`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fp8rl_jax.envs.question import Question
from fp8rl_jax.envs.rewards.form import Response
from fp8rl_jax.envs.rewards.terms import Term, module_file, weighted_sum


class Step(NamedTuple):
    """The environment's answer to a reply.

    Attributes:
      state: value for the next call, of any picklable type, so that worker processes can make the
        calls. It is a new value; the given state is not changed.
      observation: text that the policy reads next; '' for nothing. Ignored if `done`.
      reward: reward of this reply, finite in float32; an episode's is the sum over its replies. If
        it is nan, the episode is not scored, as when a reward function fails.
      done: whether the episode ends with this reply.
    """

    state: Any
    observation: str = ""
    reward: float = 0.0
    done: bool = False


StepFunction = Callable[[Any, str, Mapping[str, Any]], Step]  # (state, reply, row) -> step


def one_reply(question: Question, terms: Sequence[Term]) -> StepFunction:
    """Turns a question with rewards into an environment of one reply, without observation.

    The reward is that of `Scoring`: the weighted sum of the terms; nan if a call fails or no term
    applies. The reward functions are called in the process that calls the step.
    """

    def step(state: Any, reply: str, row: Mapping[str, Any]) -> Step:
        about = Response(question.text, reply, question.answer, row)
        values = [
            term.checked(term.form.call(term.function, about, module_file(term.name)))
            for term in terms
        ]
        return Step(state, reward=weighted_sum(terms, values), done=True)

    return step
