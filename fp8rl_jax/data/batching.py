"""Text to padded arrays and back: prompts for the sampler, sequences for the learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8rl_jax.data.tokenizer import Tokenizer
from fp8rl_jax.errors import UserError


def encode_prompt(question: str, tokenizer: Tokenizer) -> list[int]:
    """Begin-of-sequence, the question, a line feed."""
    return [tokenizer.bos_id, *tokenizer.encode(question + "\n")]


def pad_prompts(
    questions: Sequence[str], tokenizer: Tokenizer, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Questions -> right-padded (P, slots) int32 and lengths (P,) int32.

    Raises:
      UserError: a question needs more slots.
    """
    tokens = np.full((len(questions), slots), tokenizer.pad_id, np.int32)
    lengths = np.zeros(len(questions), np.int32)
    for row, question in enumerate(questions):
        ids = encode_prompt(question, tokenizer)
        if len(ids) > slots:
            raise UserError(
                f"a prompt takes {len(ids)} tokens and rollout.max_prompt_tokens is {slots}: "
                f"raise it to {len(ids)}, or choose shorter questions ({question[:60]!r})"
            )
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    return tokens, lengths


def pad_responses(
    answers: Sequence[str], tokenizer: Tokenizer, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Answers with end-of-sequence -> (B, slots) int32 and mask (B, slots) bool."""
    tokens = np.full((len(answers), slots), tokenizer.pad_id, np.int32)
    lengths = np.zeros((len(answers), 1), np.int32)
    for row, answer in enumerate(answers):
        ids = [*tokenizer.encode(answer), tokenizer.eos_id]
        if len(ids) > slots:
            raise UserError(
                f"a demonstration takes {len(ids)} tokens and rollout.max_new_tokens is {slots}: "
                f"raise it to {len(ids)} ({answer[:60]!r})"
            )
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    return tokens, np.arange(slots) < lengths


def join(
    prompts: np.ndarray, lengths: np.ndarray, responses: np.ndarray, pad_id: int
) -> np.ndarray:
    """Puts each response right behind its prompt: (B, Tp), (B,), (B, R) -> (B, Tp + R) int32."""
    rows, slots = responses.shape
    tokens = np.concatenate([prompts, np.full((rows, slots), pad_id, np.int32)], axis=1)
    index = lengths[:, None] + np.arange(slots)
    np.put_along_axis(tokens, index, responses, axis=1)
    return tokens
