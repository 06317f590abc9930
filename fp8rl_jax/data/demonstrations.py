"""Encodes demonstrations of supervised fine-tuning as tokens.

Prompt and answer are encoded as one text, so that a tokenizer that marks the beginning of a text
(SentencePiece) writes no second mark between them. With n tokens in the prompt alone, the first n
of the joint encoding are the prompt and the rest is trained on. If the prompt's end and the
answer's beginning merge into one token, that token counts as the prompt's, which then differs
slightly from a rollout's; TRL does the same, and warns, as a run does (`merges`).

A demonstration ends with a token at which rollouts stop: in a chat the one that the template writes
after the assistant's content, else the tokenizer's end of sequence.

A demonstration of several replies is a list of messages. Between two replies stands one message of
the environment, or several where these are the answers of several tools. Each reply is encoded as
if it answered the prompt; the messages between two replies are encoded as in a rollout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data.batching import check_prompts, encode_prompt, pad_rows
from fp8rl_jax.data.chat import ChatFormat, Prompt
from fp8rl_jax.data.tokenizer import Tokenizer
from fp8rl_jax.data.turns import Turns

Answer = str | Sequence[Mapping[str, Any]]  # one reply, or the messages after the prompt


def with_turn_end(tokenizer: Tokenizer, chat: ChatFormat) -> Tokenizer:
    """Returns the tokenizer with the token that ends an assistant's turn among its `eos_ids`."""
    try:
        end = tokenizer.first_added(chat.answered("?", "!")[1])
    except UserError:  # the template refuses this conversation
        return tokenizer
    return tokenizer if end is None else tokenizer.ending_also(end[0])


def encode_demonstration(
    question: Prompt, answer: str, tokenizer: Tokenizer, chat: ChatFormat | None = None
) -> tuple[list[int], list[int]]:
    """Returns the token ids of the prompt, and those of the answer with its end.

    Raises:
      UserError: as `encode_prompt`.
    """
    prompt = encode_prompt(question, tokenizer, chat)
    if chat is not None:
        answer, ending = chat.answered(question, answer)
        end = tokenizer.first_added(ending)
        if end is not None:  # a rollout stops here
            before, token, _ = ending.partition(end[1])
            ending = before + token
        answer += ending
    whole = encode_prompt(question, tokenizer, chat, answer)
    response = whole[len(prompt) :]
    if not response or response[-1] not in tokenizer.eos_ids:
        response.append(tokenizer.eos_id)
    while len(response) > 1 and response[-2] in tokenizer.eos_ids:
        response.pop()
    return whole[: len(prompt)], response


def encode_conversation(
    question: Prompt,
    answer: Answer,
    tokenizer: Tokenizer,
    chat: ChatFormat | None = None,
    turns: Turns | None = None,
) -> tuple[list[int], list[int], list[bool]]:
    """Returns the token ids of the prompt, those of the response, and which of the latter the
    policy draws.

    Raises:
      UserError: as `encode_prompt`; several replies without `turns`, or no reply at the end.
    """
    all_messages = _messages(answer)
    if turns is None and len(all_messages) > 1:
        raise UserError(
            f"a demonstration has {len(all_messages)} messages: set env.step or env.tools, which "
            f"say what stands between the replies ({str(answer)[:60]})"
        )
    response: list[int] = []
    drawn: list[bool] = []
    for is_reply, messages in itertools.groupby(all_messages, lambda m: m["role"] == "assistant"):
        group = list(messages)
        contents = [message["content"] for message in group]
        if is_reply:
            prompt, said = encode_demonstration(question, contents[0], tokenizer, chat)
        else:
            assert turns is not None
            said, _ = turns.encode(
                contents,
                response[-1],
                called=[(m.get("name") or "", m.get("tool_call_id") or "") for m in group],
            )
        response += said
        drawn += [is_reply] * len(said)
    return prompt, response, drawn


def _messages(answer: Answer) -> Sequence[Mapping[str, Any]]:
    """Returns the messages of a demonstration.

    Raises:
      UserError: one has no text, two replies follow one another, or none is first or last.
    """
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    before = None
    for index, message in enumerate(answer):
        role = message.get("role")
        if not isinstance(message.get("content"), str):
            problem = f"message {index + 1} has no text as its content (write tool calls there)"
        elif role == before == "assistant" or (index == 0 and role != "assistant"):
            problem = f"message {index + 1} has the role {role!r}"
        else:
            before = role
            continue
        raise UserError(
            "a demonstration begins with a reply of the assistant, and messages of the environment "
            f"stand between two replies, but {problem}: {str(answer)[:60]}"
        )
    if before != "assistant":
        raise UserError(
            f"a demonstration ends with a reply of the assistant, and this one does not: "
            f"{str(answer)[-60:]}"
        )
    return answer


class Padded(NamedTuple):
    """Demonstrations as arrays.

    Attributes:
      prompts: (B, Tp) int32; lengths: (B,) int32, tokens of each prompt.
      targets: (B, R) int32; ends: (B,) int32, tokens of each response.
      mask: (B, R) bool, which tokens are learnt.
    """

    prompts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    ends: np.ndarray
    mask: np.ndarray


def pad_demonstrations(
    examples: Sequence[tuple[Prompt, Answer]],
    tokenizer: Tokenizer,
    prompt_slots: int,
    response_slots: int,
    chat: ChatFormat | None = None,
    turns: Turns | None = None,
) -> Padded:
    """Encodes (question, answer) pairs.

    Raises:
      UserError: a prompt, or an answer with its end, needs more slots.
    """
    parts = [
        encode_conversation(question, answer, tokenizer, chat, turns)
        for question, answer in examples
    ]
    prompts = [prompt for prompt, _, _ in parts]
    responses = [response for _, response, _ in parts]
    check_prompts(prompts, [question for question, _ in examples], prompt_slots)
    longest = max(responses, key=len, default=[])
    if len(longest) > response_slots:
        answer = examples[responses.index(longest)][1]
        raise UserError(
            f"a demonstration takes {len(longest)} tokens and rollout.max_new_tokens is "
            f"{response_slots}: raise it to {len(longest)} ({str(answer)[:60]!r})"
        )
    tokens, lengths = pad_rows(prompts, prompt_slots, tokenizer.pad_id)
    targets, ends = pad_rows(responses, response_slots, tokenizer.pad_id)
    mask, _ = pad_rows([[*map(int, drawn)] for _, _, drawn in parts], response_slots, 0)
    return Padded(tokens, lengths, targets, ends, mask > 0)


def merges(
    examples: Sequence[tuple[Prompt, Answer]], tokenizer: Tokenizer, chat: ChatFormat | None = None
) -> str:
    """Returns a warning if answers merge with the last token of their prompts, else ''."""
    firsts = ((question, _messages(answer)[0]["content"]) for question, answer in examples)
    changed = sum(
        encode_demonstration(question, first, tokenizer, chat)[0]
        != encode_prompt(question, tokenizer, chat)
        for question, first in firsts
    )
    if not changed:
        return ""
    return (
        f"the first letters of the answer merge with the prompt's last token in {changed:,} of "
        f"{len(examples):,} demonstrations"
    )
