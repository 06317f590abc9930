"""Encodes what an environment says between two replies of the policy, and nothing anew.

Tokens that were drawn are kept as they are: a text that is encoded again may give other tokens, and
with them other log-probabilities. So an observation is encoded alone, with what the chat template
writes around it: the end of the reply, the observation in its role, and the beginning of the next
reply. What a template writes behind a reply must depend on the observation alone, and contain it:
`Turns.check` refuses others. How it would write earlier replies again does not matter.

Some templates write a tool's answer behind a call alone (gpt-oss, Mistral). For them the reply is
rendered as a call, and what follows begins with its end token.

An observation is text: special tokens, and the marks that the template writes around a turn, are
encoded by their characters where they stand in it, so that what an environment quotes cannot end
its turn and begin another.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data.chat import ChatFormat
from fp8rl_jax.data.tokenizer import Tokenizer

_REPLY = "a reply like no other"
_OBSERVATION = "an observation like no other"
# End tokens of Llama and gpt-oss: the policy may draw one where the template writes another.
_ALIKE = (("<|eom_id|>", "<|eot_id|>"), ("<|return|>", "<|call|>", "<|end|>"))
_ASKED: tuple[Mapping[str, str], ...] = ({"role": "user", "content": "?"},)
_HIDDEN = 0xF0000  # first of the private characters that stand for special tokens
_MOST_HIDDEN = 0xFFFE
_PRIVATE = re.compile(f"([{chr(_HIDDEN)}-{chr(_HIDDEN + _MOST_HIDDEN - 1)}])")
_LONGEST_TOKEN = 64  # characters
Called = Sequence[tuple[str, str]]  # (name, identifier) of each call of a reply, '' if unknown
# Identifiers of calls that the policy did not write, of the tool's name and the call's index:
# Kimi's, and Mistral's for templates that refuse those.
_IDENTIFIERS = ("functions.{}:{}", "{1:09}")


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
        names = [tool.get("function", {}).get("name", "") for tool in self.tools]
        around = [self._tokens([""], [(name, "")]) for name in names or [""]]
        return self.most + max(map(len, around))

    def encode(
        self, observations: Sequence[str], last: int, called: Called = ()
    ) -> tuple[list[int], list[str]]:
        """Encodes what the environment says with what stands between two replies.

        Args:
          observations: texts that the environment says, each a message of its own in the role of a
            tool, and a line in the role 'user' and in plain text.
          last: the last token of the reply before it. If it is the end token that the template
            writes there, it is not repeated; the template's end follows any other.
          called: the calls in the reply, of which each text answers one.

        Returns:
          The tokens, `slots` at most, and the texts of the messages, which may have been cut.
        """
        texts = list(observations)
        if self.chat is None or self.role == "user":
            texts = ["\n".join(texts)]
        room = self.most
        for index, text in enumerate(texts):
            texts[index] = self._beginning(text, room)
            room -= len(self._encoded(texts[index]))
        tokens = self._tokens(texts, called)
        while (excess := len(tokens) - self.slots) > 0:
            if called:  # identifiers may be longer than those that `slots` counts
                called = [(name, "") for name, _ in called] if any(i for _, i in called) else ()
            elif texts[-1]:  # a cut text may be encoded otherwise
                texts[-1] = texts[-1][: -max(1, excess // 4)]
            else:
                texts.pop()
            tokens = self._tokens(texts, called)
        ends = [i for i, token in enumerate(tokens) if token in self._ends][:1]
        if ends and not self.tokenizer.decode(tokens[: ends[0]]).strip():
            written = tokens[ends[0]]
            if last == written or any(last in group and written in group for group in self._alike):
                tokens = tokens[ends[0] + 1 :]  # the reply has its end already
        return tokens, texts

    def ending(self) -> Tokenizer:
        """Returns the tokenizer with the token that the template writes behind a reply among its
        `eos_ids`: there the turn of the policy ends (GLM's '<|observation|>', gpt-oss's '<|call|>')
        unless it ends with one that is as good."""
        if self.chat is None:
            return self.tokenizer
        if self._behind_call:
            return self.tokenizer.ending_also(self._tokens([""], ())[0])
        end = self.tokenizer.first_added(self._between([""]))
        ends = self.tokenizer.eos_ids
        if end is None or any(end[0] in group and {*ends} & {*group} for group in self._alike):
            return self.tokenizer
        return self.tokenizer.ending_also(end[0])

    def _beginning(self, text: str, room: int) -> str:
        """Returns the longest beginning of a text that takes `room` tokens."""
        if len(self._encoded(text)) <= room:
            return text
        text = text[: room * _LONGEST_TOKEN]
        size = bisect.bisect(
            range(1, len(text) + 1), room, key=lambda n: len(self._encoded(text[:n]))
        )
        return text[:size]

    @functools.cached_property
    def _alike(self) -> list[list[int]]:
        """The ids of _ALIKE that the tokenizer has."""
        groups = [[self.tokenizer.first_added(text) for text in group] for group in _ALIKE]
        return [[token[0] for token in group if token] for group in groups]

    @functools.cached_property
    def _ends(self) -> set[int]:
        """The tokens that may end a reply."""
        return {*self.tokenizer.eos_ids, *(token for group in self._alike for token in group)}

    def _tokens(self, texts: Sequence[str], called: Called) -> list[int]:
        """Returns the tokens between two replies, their end token included."""
        if self.chat is None:
            return self.tokenizer.encode(self._between(texts))
        whole = self._between([self._hidden(text) for text in texts], called)
        tokens = [token for piece in self._pieces(whole) for token in piece]
        if self._behind_call:
            ends = [i for i, token in enumerate(tokens) if token in self._ends]
            if not ends:
                raise self._refusal("ends a call with no token that ends a reply")
            tokens = tokens[ends[0] :]
        return tokens

    @functools.cached_property
    def _places(self) -> dict[str, str]:
        """For each special token and each token of the template, the private character that stands
        for its text in an observation until the template has written around it."""
        source = self.chat.template.source if self.chat else ""
        added = self.tokenizer.added_tokens
        controls = [t for t, special in added.items() if special or (t.strip() and t in source)]
        controls = sorted(filter(None, controls), key=len, reverse=True)[:_MOST_HIDDEN]
        return {text: chr(_HIDDEN + index) for index, text in enumerate(controls)}

    @functools.cached_property
    def _controls(self) -> re.Pattern:
        return re.compile("|".join(map(re.escape, self._places)) or r"(?!)")

    def _hidden(self, text: str) -> str:
        """Returns an observation with private characters for the texts of `_places`."""
        text = _PRIVATE.sub("\ufffd", text)
        return self._controls.sub(lambda found: self._places[found[0]], text)

    def _pieces(self, text: str) -> Iterator[list[int]]:
        """Encodes a text in which private characters stand for the texts of `_places`."""
        shown = {place: text for text, place in self._places.items()}
        for piece in _PRIVATE.split(text):
            if (control := shown.get(piece)) is None:
                yield self.tokenizer.encode(piece)
            else:  # in two parts, of which none is the special token
                yield self.tokenizer.encode(control[:1]) + self.tokenizer.encode(control[1:])

    def _encoded(self, text: str) -> list[int]:
        """Returns the tokens of an observation alone."""
        if self.chat is None:
            return self.tokenizer.encode(text)
        return [token for piece in self._pieces(self._hidden(text)) for token in piece]

    def _between(self, texts: Sequence[str], called: Called = ()) -> str:
        """Returns the text between the content of a reply, or the last argument of its call, and
        the content of the next reply."""
        if self.chat is None:
            return "".join(f"{text}\n" for text in texts)
        return self._conversation([(_REPLY, texts, called)], self._behind_call).partition(_REPLY)[2]

    def _conversation(
        self, turns: Sequence[tuple[str, Sequence[str], Called]], behind_call: bool
    ) -> str:
        """Renders turns (reply, observations, calls) behind a question; without the policy's
        identifiers of calls if the template refuses those."""
        unknown = [(reply, texts, [(n, "") for n, _ in called]) for reply, texts, called in turns]
        forms = [(turns, form) for form in _IDENTIFIERS] + [(unknown, _IDENTIFIERS[-1])]
        return self._first_rendered([self._messages(t, behind_call, form) for t, form in forms])

    def _messages(
        self, turns: Sequence[tuple[str, Sequence[str], Called]], behind_call: bool, form: str
    ) -> list[Mapping[str, Any]]:
        messages: list[Mapping[str, Any]] = list(_ASKED)
        tools = [tool.get("function", {}).get("name", "") for tool in self.tools] or ["tool"]
        for reply, texts, called in turns:
            known = [*called, *[("", "")] * len(texts)]
            names = [name if name in tools else tools[0] for name, _ in known]
            ids = [
                identifier or form.format(name, index)
                for index, (name, (_, identifier)) in enumerate(zip(names, known, strict=True))
            ]
            if behind_call:
                messages.append(_with_call(names[0], {"text": reply}, ids[0]))
            else:
                messages.append({"role": "assistant", "content": reply})
            for text, name, identifier in zip(texts, names, ids, strict=False):
                about = {} if self.role == "user" else {"name": name, "tool_call_id": identifier}
                messages.append({"role": self.role, **about, "content": text})
        return messages

    def _render(self, messages: Sequence[Mapping[str, Any]], begin_answer: bool = True) -> str:
        assert self.chat is not None
        return self.chat.render({"messages": messages, "tools": self.tools or None}, begin_answer)

    def _first_rendered(
        self, attempts: Sequence[Sequence[Mapping[str, Any]]], begin_answer: bool = True
    ) -> str:
        """Renders the first of several lists of messages that the template does not refuse; raises
        UserError as for the first if it refuses all."""
        for messages in attempts:
            with contextlib.suppress(UserError):
                return self._render(messages, begin_answer)
        return self._render(attempts[0], begin_answer)

    def reply_with_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns a reply that calls a tool, as the template writes it and the policy would."""
        prompt = self._render(_ASKED)
        calls = [_with_call(name, arguments, form.format(name, 0)) for form in _IDENTIFIERS]
        text = self._first_rendered([[*_ASKED, call] for call in calls], begin_answer=False)
        pairs = enumerate(zip(prompt, text, strict=False))
        begun = next((place for place, (one, other) in pairs if one != other), len(prompt))
        return self.tokenizer.decode(self.tokenizer.encode(text[begun:]))

    @functools.cached_property
    def _behind_call(self) -> bool:
        """Whether the template writes observations behind a call of a tool alone."""
        if self.chat is None or self.role == "user" or "tool_calls" in self.chat.template.unwritten:
            return False
        return self._problem(False) is not None and self._problem(True) is None

    def check(self) -> None:
        """Raises UserError if the chat template does not write the tools or an observation behind a
        reply, or writes something else there when turns came before."""
        if self.chat is None:
            return
        template = self.chat.template
        if self.tools and "tools" in template.unwritten:
            raise UserError(
                f"env.tools: the chat template of {template.where} writes no tools: take a model "
                "whose template does, or describe them in data.system_prompt and answer their "
                "calls by env.step"
            )
        if not self._behind_call and (problem := self._problem(False)):
            raise problem

    def _problem(self, behind_call: bool) -> UserError | None:
        """Returns what is wrong with the way that the template continues a conversation."""
        turns: list[tuple[str, Sequence[str], Called]] = []
        between: list[str] = []
        for number in range(3):
            reply = f"{_REPLY} {number}"
            observation = f"{_OBSERVATION} {number}"
            turns.append((reply, [observation], ()))
            try:
                text = self._conversation(turns, behind_call)
            except UserError as error:
                if self.role == "user":
                    return error
                return UserError(f"{error}, or set env.observation_role to 'user'")
            _, written, behind = text.partition(reply)
            between.append(behind.replace(observation, _OBSERVATION))
            if not written:
                return self._refusal("leaves out a reply that is not the last message")
            if observation not in behind:
                return self._refusal("leaves out what the environment says")
            if between[-1] != between[0]:
                return self._refusal(
                    "writes something else behind the second reply than behind the first"
                )
        return None

    def _refusal(self, problem: str) -> UserError:
        other_role = "set env.observation_role to 'user', or " if self.role != "user" else ""
        return UserError(
            f"data.chat: with observations in the role {self.role!r} the chat template {problem}: "
            f"{other_role}take another template"
        )


def _with_call(name: str, arguments: Mapping[str, Any], identifier: str) -> Mapping[str, Any]:
    """Returns a message that calls a tool."""
    call = {
        "id": identifier,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def transcript(said: Sequence[Mapping[str, str]]) -> str:
    """Returns the messages after a prompt as text for a reader."""
    return "\n".join(
        message["content"]
        if message["role"] == "assistant"
        else f"[{message['role']}] {message['content']}"
        for message in said
    )
