"""Converts text to token arrays and back: prompts, demonstrations, responses."""

from __future__ import annotations

import dataclasses

import numpy as np

from fp8rl_jax.batch import Batch, make_batch
from fp8rl_jax.data import ChatFormat, Tokenizer, Turns, join, pad_demonstrations, pad_prompts
from fp8rl_jax.envs import Question


@dataclasses.dataclass(frozen=True)
class Text:
    """A tokenizer and the sizes of a run's sequences.

    Attributes:
      tokenizer: tokenizer of prompts and responses.
      chat: format that makes a question a conversation; None without `data.chat`.
      prompt_slots, response_slots: numbers of slots Tp and R.
      turns: form of conversations with an environment; None for responses of one reply.
    """

    tokenizer: Tokenizer
    chat: ChatFormat | None
    prompt_slots: int
    response_slots: int
    turns: Turns | None = None

    def prompts(self, questions: list[Question]) -> tuple[np.ndarray, np.ndarray]:
        """Returns prompt tokens (P, Tp) int32 and lengths (P,) int32 of questions."""
        texts = [question.prompt for question in questions]
        return pad_prompts(texts, self.tokenizer, self.prompt_slots, self.chat)

    def demonstrations(self, questions: list[Question]) -> Batch:
        """Returns a batch, on the host, of questions with their demonstrations as responses."""
        pairs = [(question.prompt, question.demonstration) for question in questions]
        slots = self.prompt_slots, self.response_slots
        found = pad_demonstrations(pairs, self.tokenizer, *slots, self.chat, self.turns)
        tokens = join(found.prompts, found.lengths, found.targets, self.tokenizer.pad_id)
        ones = np.ones(len(questions), np.float32)
        given = tokens, found.lengths, found.targets, found.mask, ones
        return make_batch(*given, lengths=found.lengths + found.ends)

    def decode(self, tokens: np.ndarray, mask: np.ndarray) -> list[str]:
        """Returns the texts of responses: tokens (B, R) where the mask (B, R) is True."""
        rows = zip(tokens, mask, strict=True)
        return [self.tokenizer.decode(row[keep].tolist()) for row, keep in rows]
