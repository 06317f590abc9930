"""Encodes what an environment says between two replies of the policy, and nothing anew.

Tokens that were drawn are kept as they are: a text that is encoded again may give other tokens, and
with them other log-probabilities. So an observation is encoded alone, with what the chat template
writes around it: the end of the reply, the observation in its role, and the beginning of the next
reply. What a template writes behind a reply must depend on the observation alone, and contain it:
`Turns.check` refuses others. How it would write earlier replies again does not matter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data.chat import ChatFormat
from fp8rl_jax.data.tokenizer import Tokenizer

_REPLY = "a reply like no other"
_OBSERVATION = "an observation like no other"
# Llama draws the first of these after a call of a tool, where its template writes the second.
_END_OF_MESSAGE = "<|eom_id|>"
_END_OF_TURN = "<|eot_id|>"
_ASKED: tuple[Mapping[str, str], ...] = ({"role": "user", "content": "?"},)


@dataclasses.dataclass(frozen=True)
class Turns:
    """The form of a conversation.

    Attributes:
      tokenizer: tokenizer of prompts and replies.
      chat: format of conversations; None for plain text, where an observation is a line.
      role: role of the observations in a chat.
      most: most tokens of an observation.
      tools: function schemas that the template gets, or ().
    """

    tokenizer: Tokenizer
    chat: ChatFormat | None
    role: str
    most: int
    tools: Sequence[Mapping[str, Any]] = ()

    @functools.cached_property
    def slots(self) -> int:
        """Most tokens that `encode` returns."""
        return self.most + len(self.tokenizer.encode(self._between("")))

    def encode(self, observation: str, last: int) -> tuple[list[int], str]:
        """Encodes an observation with what stands between two replies.

        Args:
          observation: text that the environment says.
          last: the last token of the reply before it. If it is the end token that the template
            writes there, it is not repeated; the template's end follows any other.

        Returns:
          The tokens, `slots` at most, and the observation, which may have been cut.
        """
        said = self.tokenizer.encode(observation)
        if len(said) > self.most:
            observation = self.tokenizer.decode(said[: self.most])
        tokens = self.tokenizer.encode(self._between(observation))
        while len(tokens) > self.slots:  # a cut text may be encoded otherwise
            observation = observation[:-1]
            tokens = self.tokenizer.encode(self._between(observation))
        ends = [i for i, token in enumerate(tokens) if token in self.tokenizer.eos_ids][:1]
        if ends and not self.tokenizer.decode(tokens[: ends[0]]).strip():
            written = tokens[ends[0]]
            if last == written or (last, written) == self._alike:
                tokens = tokens[ends[0] + 1 :]  # the reply has its end already
        return tokens, observation

    @functools.cached_property
    def _alike(self) -> tuple[int, int] | None:
        """The ids of _END_OF_MESSAGE and _END_OF_TURN; None if the tokenizer lacks one."""
        message = self.tokenizer.first_added(_END_OF_MESSAGE)
        turn = self.tokenizer.first_added(_END_OF_TURN)
        if message is None or turn is None:
            return None
        return message[0], turn[0]

    def _between(self, observation: str) -> str:
        """Returns the text between the content of a reply and that of the next."""
        if self.chat is None:
            return f"{observation}\n"
        said = [
            {"role": "assistant", "content": _REPLY},
            {"role": self.role, "content": observation},
        ]
        return self._render([*_ASKED, *said]).partition(_REPLY)[2]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        assert self.chat is not None
        return self.chat.render({"messages": messages, "tools": self.tools or None})

    def check(self) -> None:
        """Raises UserError if the chat template does not write an observation behind a reply, or
        writes something else there when turns came before."""
        if self.chat is None:
            return
        messages = list(_ASKED)
        for number in range(3):
            reply = f"{_REPLY} {number}"
            observation = f"{_OBSERVATION} {number}"
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": self.role, "content": observation})
            try:
                text = self._render(messages)
            except UserError as error:
                if self.role == "user":
                    raise
                raise UserError(f"{error}, or set env.observation_role to 'user'") from None
            _, written, behind = text.partition(reply)
            if not written:
                self._refuse("leaves out a reply that is not the last message")
            if observation not in behind:
                self._refuse("leaves out what the environment says")
            if behind != self._between(observation):
                self._refuse("writes something else behind the second reply than behind the first")

    def _refuse(self, problem: str) -> NoReturn:
        remedy = "take another template"
        if self.role != "user":
            remedy = f"set env.observation_role to 'user', or {remedy}"
        raise UserError(
            f"data.chat: with observations in the role {self.role!r} the chat template {problem}: "
            f"{remedy}"
        )


def transcript(said: Sequence[Mapping[str, str]]) -> str:
    """Returns the messages after a prompt as text for a reader."""
    lines = [
        message["content"] if index % 2 == 0 else f"[{message['role']}] {message['content']}"
        for index, message in enumerate(said)
    ]
    return "\n".join(lines)
