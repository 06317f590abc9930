"""Encodes demonstrations of supervised fine-tuning as tokens.

Prompt and answer are encoded as one text, so that a tokenizer that marks the beginning of a text
(SentencePiece) writes no second mark between them. With n tokens in the prompt alone, the first n
of the joint encoding are the prompt and the rest is trained on. If the prompt's end and the
answer's beginning merge into one token, that token counts as the prompt's, which then differs
slightly from a rollout's; TRL does the same, and warns, as a run does (`merges`).

A demonstration ends with a token at which rollouts stop: in a chat the one that the template writes
after the assistant's content, else the tokenizer's end of sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data.batching import check_prompts, encode_prompt, pad_rows
from fp8rl_jax.data.chat import ChatFormat, Prompt
from fp8rl_jax.data.tokenizer import Tokenizer


def with_turn_end(tokenizer: Tokenizer, chat: ChatFormat) -> Tokenizer:
    """Returns the tokenizer with the token that ends an assistant's turn among its `eos_ids`."""
    try:
        found = tokenizer.first_added(chat.answered("?", "!")[1])
    except UserError:  # the template refuses this conversation
        return tokenizer
    return tokenizer if found is None else tokenizer.ending_also(found[0])


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
        found = tokenizer.first_added(ending)
        if found is not None:  # a rollout stops here
            before, token, _ = ending.partition(found[1])
            ending = before + token
        answer += ending
    whole = encode_prompt(question, tokenizer, chat, answer)
    response = whole[len(prompt) :]
    if not response or response[-1] not in tokenizer.eos_ids:
        response.append(tokenizer.eos_id)
    while len(response) > 1 and response[-2] in tokenizer.eos_ids:
        response.pop()
    return whole[: len(prompt)], response


def pad_demonstrations(
    examples: Sequence[tuple[Prompt, str]],
    tokenizer: Tokenizer,
    prompt_slots: int,
    response_slots: int,
    chat: ChatFormat | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Encodes (question, answer) pairs.

    Returns:
      prompts (B, prompt_slots) int32, their lengths (B,) int32, targets (B, response_slots) int32
      and their mask bool.

    Raises:
      UserError: a prompt, or an answer with its end, needs more slots.
    """
    pairs = [encode_demonstration(*example, tokenizer, chat) for example in examples]
    prompts, responses = [prompt for prompt, _ in pairs], [response for _, response in pairs]
    check_prompts(prompts, [question for question, _ in examples], prompt_slots)
    longest = max(responses, key=len, default=[])
    if len(longest) > response_slots:
        answer = examples[responses.index(longest)][1]
        raise UserError(
            f"a demonstration takes {len(longest)} tokens and rollout.max_new_tokens is "
            f"{response_slots}: raise it to {len(longest)} ({answer[:60]!r})"
        )
    tokens, lengths = pad_rows(prompts, prompt_slots, tokenizer.pad_id)
    targets, taught = pad_rows(responses, response_slots, tokenizer.pad_id)
    return tokens, lengths, targets, np.arange(response_slots) < taught[:, None]


def merges(
    examples: Sequence[tuple[Prompt, str]], tokenizer: Tokenizer, chat: ChatFormat | None = None
) -> str:
    """Returns a warning if answers merge with the last token of their prompts, else ''."""
    changed = sum(
        encode_demonstration(*example, tokenizer, chat)[0]
        != encode_prompt(example[0], tokenizer, chat)
        for example in examples
    )
    if not changed:
        return ""
    return (
        f"the first letters of the answer merge with the prompt's last token in {changed:,} of "
        f"{len(examples):,} demonstrations"
    )
