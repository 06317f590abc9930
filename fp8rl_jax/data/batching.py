"""Text to padded arrays and back: prompts for the sampler, sequences for the learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8rl_jax.data.chat import ChatFormat, Prompt
from fp8rl_jax.data.tokenizer import Tokenizer
from fp8rl_jax.errors import UserError


def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokenizer's begin-of-sequence, if prompts begin with one, and the text."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [*begin, *tokenizer.encode(text)]


def encode_prompt(
    question: Prompt, tokenizer: Tokenizer, chat: ChatFormat | None = None
) -> list[int]:
    """Begin-of-sequence, the question, a line feed; or the question as a conversation.

    A chat template writes the special tokens itself, so nothing is put before it.

    Raises:
      UserError: a conversation of several messages without a chat template.
    """
    if chat is not None:
        return tokenizer.encode(chat.render(question))
    if not isinstance(question, str):
        raise UserError(
            f"env.task: a prompt is a conversation of {len(question)} messages, and data.chat is "
            "False: set data.chat=True, with a tokenizer that has a chat template"
        )
    return encode_text(question + "\n", tokenizer)


def pad_prompts(
    questions: Sequence[Prompt], tokenizer: Tokenizer, slots: int, chat: ChatFormat | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Questions -> right-padded (P, slots) int32 and lengths (P,) int32.

    Raises:
      UserError: a question needs more slots, or has no token at all.
    """
    rows = [encode_prompt(question, tokenizer, chat) for question in questions]
    if not all(rows):
        question = questions[next(i for i, row in enumerate(rows) if not row)]
        raise UserError(
            f"data.tokenizer: the prompt {str(question)[:60]!r} has no token under this tokenizer: "
            "write another prompt, or take another tokenizer"
        )
    longest = max(rows, key=len)
    if len(longest) > slots:
        question = questions[rows.index(longest)]
        raise UserError(
            f"a prompt takes {len(longest)} tokens and rollout.max_prompt_tokens is {slots}: "
            f"raise it to {len(longest)}, or choose shorter questions ({str(question)[:60]!r})"
        )
    return pad_rows(rows, slots, tokenizer.pad_id)


def pad_rows(rows: Sequence[list[int]], slots: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded (rows, slots) int32 and lengths (rows,) int32."""
    tokens = np.full((len(rows), slots), pad_id, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, np.array([len(ids) for ids in rows], np.int32)


def pad_responses(
    answers: Sequence[str], tokenizer: Tokenizer, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Answers with end-of-sequence -> (B, slots) int32 and mask (B, slots) bool."""
    rows = [[*tokenizer.encode(answer), tokenizer.eos_id] for answer in answers]
    longest = max(rows, key=len, default=[])
    if len(longest) > slots:
        answer = answers[rows.index(longest)]
        raise UserError(
            f"a demonstration takes {len(longest)} tokens and rollout.max_new_tokens is {slots}: "
            f"raise it to {len(longest)} ({answer[:60]!r})"
        )
    tokens, lengths = pad_rows(rows, slots, tokenizer.pad_id)
    return tokens, np.arange(slots) < lengths[:, None]


def join(
    prompts: np.ndarray, lengths: np.ndarray, responses: np.ndarray, pad_id: int
) -> np.ndarray:
    """Puts each response right behind its prompt: (B, Tp), (B,), (B, R) -> (B, Tp + R) int32."""
    rows, slots = responses.shape
    tokens = np.concatenate([prompts, np.full((rows, slots), pad_id, np.int32)], axis=1)
    index = lengths[:, None] + np.arange(slots)
    np.put_along_axis(tokens, index, responses, axis=1)
    return tokens
