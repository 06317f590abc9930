"""The form of an environment: a pure function from what the policy replied to what happens next.

    step(state, reply, row) -> Step(state, observation, reward, done)

The first call of an episode has the state None, each later one the state that the call before it
returned. A function keeps nothing else from call to call: one that is called again with the same
arguments returns the same.

A question with a reward is the environment of one reply, `one_reply`. That is all that a run asks
today: it scores the replies of a step together (`rewards.scoring`), and no run calls a function of
this form yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fp8rl_jax.envs.question import Question
from fp8rl_jax.envs.rewards.form import Response
from fp8rl_jax.envs.rewards.terms import Term, module_file, weighted_sum


class Step(NamedTuple):
    """What an environment answers to a reply of the policy.

    Attributes:
      state: what the next call is given; of any type that can be pickled, since calls are made in
        worker processes. It is a new value, and the one that was given is not changed.
      observation: text that the policy reads next; '' for nothing. It is not read if `done`.
      reward: of this reply, a finite number of float32; an episode's reward is the sum over its
        replies. nan: the episode is not scored, as where a reward function fails.
      done: whether the episode ends with this reply.
    """

    state: Any
    observation: str = ""
    reward: float = 0.0
    done: bool = False


StepFunction = Callable[[Any, str, Mapping[str, Any]], Step]  # (state, reply, row) -> step


def one_reply(question: Question, terms: Sequence[Term]) -> StepFunction:
    """A question with rewards as an environment: done after the first reply, without observation.

    The step's reward is that of `Scoring`: the weighted sum of the terms, and nan where a call
    fails or none applies. The functions are called in the process that calls the step.
    """

    def step(state: Any, reply: str, row: Mapping[str, Any]) -> Step:
        about = Response(question.text, reply, question.answer, row)
        values = [
            term.checked(term.form.call(term.function, about, module_file(term.name)))
            for term in terms
        ]
        return Step(state, reward=weighted_sum(terms, values), done=True)

    return step
