"""Batches: the order of examples, and text as padded arrays for sampler and learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grain
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data.chat import ChatFormat, Prompt
from fp8rl_jax.data.tokenizer import Tokenizer

_END = "\n"  # behind a question


class Stream:
    """Endless shuffled batches of a sequence, exactly resumable.

    Every epoch has its own order, drawn from (seed, epoch). The position is the number of
    batches taken: a resumed stream gives the batch that would have come next.
    """

    def __init__(self, items: Sequence, batch_size: int, seed: int):
        self._data = (
            grain.MapDataset.source(items)
            .seed(seed)
            .shuffle()
            .repeat()
            .batch(batch_size, batch_fn=list)
        )
        self.position = 0

    def next(self) -> list:
        """The next batch."""
        batch = self._data[self.position]
        self.position += 1
        return batch


def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokenizer's begin-of-sequence, if prompts begin with one, and the text.

    Raises:
      UserError: there is no token at all.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return _not_empty([*begin, *tokenizer.encode(text)], text)


def encode_prompt(
    question: Prompt, tokenizer: Tokenizer, chat: ChatFormat | None = None, answer: str = ""
) -> list[int]:
    """Begin-of-sequence, the question, a line feed; or the question as a conversation. Then
    `answer`, encoded with them as one text.

    A chat template writes the special tokens itself, so nothing is put before it.

    Raises:
      UserError: there is no token at all, or a conversation of several messages without a chat
        template.
    """
    if chat is not None:
        return _not_empty(tokenizer.encode(chat.render(question) + answer), question)
    if not isinstance(question, str):
        raise UserError(
            f"env.task: a prompt is a conversation {_of(question)}, and data.chat is False: set "
            "data.chat=True, with a tokenizer that has a chat template"
        )
    return encode_text(question + _END + answer, tokenizer)


def _of(question: Prompt) -> str:
    if isinstance(question, Mapping):
        return f"with tools ({len(question['tools'])})"
    return f"of {len(question)} messages"


def _not_empty(ids: list[int], prompt: Prompt) -> list[int]:
    if not ids:
        raise UserError(
            f"data.tokenizer: the prompt {str(prompt).removesuffix(_END)[:60]!r} has no token "
            "under this tokenizer: write another prompt, or take another tokenizer"
        )
    return ids


def pad_prompts(
    questions: Sequence[Prompt], tokenizer: Tokenizer, slots: int, chat: ChatFormat | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Questions -> right-padded (P, slots) int32 and lengths (P,) int32.

    Raises:
      UserError: a question needs more slots, or has no token at all.
    """
    rows = [encode_prompt(question, tokenizer, chat) for question in questions]
    check_prompts(rows, questions, slots)
    return pad_rows(rows, slots, tokenizer.pad_id)


def check_prompts(rows: Sequence[list[int]], questions: Sequence[Prompt], slots: int) -> None:
    """Raises UserError if the prompt of a question takes more than `slots` tokens."""
    longest = max(rows, key=len)
    if len(longest) > slots:
        question = questions[rows.index(longest)]
        raise UserError(
            f"a prompt takes {len(longest)} tokens and rollout.max_prompt_tokens is {slots}: "
            f"raise it to {len(longest)}, or choose shorter questions ({str(question)[:60]!r})"
        )


def pad_rows(rows: Sequence[list[int]], slots: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded (rows, slots) int32 and lengths (rows,) int32."""
    tokens = np.full((len(rows), slots), pad_id, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, np.array([len(ids) for ids in rows], np.int32)


def join(
    prompts: np.ndarray, lengths: np.ndarray, responses: np.ndarray, pad_id: int
) -> np.ndarray:
    """Puts each response right behind its prompt: (B, Tp), (B,), (B, R) -> (B, Tp + R) int32."""
    rows, slots = responses.shape
    tokens = np.concatenate([prompts, np.full((rows, slots), pad_id, np.int32)], axis=1)
    index = lengths[:, None] + np.arange(slots)
    np.put_along_axis(tokens, index, responses, axis=1)
    return tokens
