"""From text to token arrays and back: prompts, demonstrations, responses."""

from __future__ import annotations

import dataclasses

import numpy as np

from fp8rl_jax import learner
from fp8rl_jax.data import ChatFormat, Tokenizer, join, pad_demonstrations, pad_prompts
from fp8rl_jax.envs import Question


@dataclasses.dataclass(frozen=True)
class Text:
    """A tokenizer and the sizes of a run's sequences.

    Attributes:
      tokenizer: from text to tokens and back.
      chat: how a question becomes a conversation; None without `data.chat`.
      prompt_slots, response_slots: Tp and R.
    """

    tokenizer: Tokenizer
    chat: ChatFormat | None
    prompt_slots: int
    response_slots: int

    def prompts(self, questions: list[Question]) -> tuple[np.ndarray, np.ndarray]:
        """Prompt tokens (P, Tp) int32 and lengths (P,) int32 of questions."""
        texts = [question.prompt for question in questions]
        return pad_prompts(texts, self.tokenizer, self.prompt_slots, self.chat)

    def demonstrations(self, questions: list[Question]) -> learner.Batch:
        """Questions with their demonstrations as responses, as a batch on the host."""
        pairs = [(question.prompt, question.demonstration) for question in questions]
        slots = self.prompt_slots, self.response_slots
        padded = pad_demonstrations(pairs, self.tokenizer, *slots, self.chat)
        prompts, lengths, targets, mask = padded
        tokens = join(prompts, lengths, targets, self.tokenizer.pad_id)
        ones = np.ones(len(questions), np.float32)
        return learner.make_batch(tokens, lengths, targets, mask, ones)

    def decode(self, tokens: np.ndarray, mask: np.ndarray) -> list[str]:
        """Text of responses (B, R) with a mask (B, R)."""
        rows = zip(tokens, mask, strict=True)
        return [self.tokenizer.decode(row[keep].tolist()) for row, keep in rows]
