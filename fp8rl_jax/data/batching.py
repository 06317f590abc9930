"""Orders examples, and encodes text as padded arrays for sampler and learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data.chat import ChatFormat, Prompt
from fp8rl_jax.data.tokenizer import Tokenizer

_END = "\n"  # after a question


class Stream:
    """Endless shuffled batches of a sequence, exactly resumable.

    Each epoch's order is drawn from (seed, epoch). `position` is the number of batches taken: a
    stream whose position is set continues with the next batch.
    """

    def __init__(self, items: Sequence, batch_size: int, seed: int):
        import grain  # not at the top: it takes 0.3 s, and other commands start without it

        self._data = (
            grain.MapDataset.source(items)
            .seed(seed)
            .shuffle()
            .repeat()
            .batch(batch_size, batch_fn=list)
        )
        self.position = 0

    def next(self) -> list:
        """Returns the next batch."""
        batch = self._data[self.position]
        self.position += 1
        return batch


def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encodes a text as token ids, after the begin-of-sequence id if the tokenizer has one.

    Raises:
      UserError: the result would be empty.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return _not_empty([*begin, *tokenizer.encode(text)], text)


def encode_prompt(
    question: Prompt, tokenizer: Tokenizer, chat: ChatFormat | None = None, answer: str = ""
) -> list[int]:
    """Encodes a question as token ids: begin-of-sequence, text, line feed; or, with `chat`, what
    the chat template writes, special tokens included. `answer` is appended before the encoding.

    Raises:
      UserError: the result would be empty, or the question is a conversation and `chat` is None.
    """
    if chat is not None:
        return _not_empty(tokenizer.encode(chat.render(question) + answer), question)
    if not isinstance(question, str):
        of = f"of {len(question)} messages"
        if isinstance(question, Mapping):
            of = f"with tools ({len(question['tools'])})"
        raise UserError(
            f"env.task: a prompt is a conversation {of}, and data.chat is False: set "
            "data.chat=True, with a tokenizer that has a chat template"
        )
    return encode_text(question + _END + answer, tokenizer)


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
    """Encodes questions as right-padded tokens (P, slots) int32 and lengths (P,) int32.

    Raises:
      UserError: a question has more than `slots` tokens, or no token.
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
    """Pads rows of token ids on the right: (rows, slots) int32 and lengths (rows,) int32."""
    tokens = np.full((len(rows), slots), pad_id, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, np.array([len(ids) for ids in rows], np.int32)


def join(
    prompts: np.ndarray, lengths: np.ndarray, responses: np.ndarray, pad_id: int
) -> np.ndarray:
    """Writes each response right after its prompt: (B, Tp), (B,), (B, R) -> (B, Tp + R) int32."""
    rows, slots = responses.shape
    tokens = np.concatenate([prompts, np.full((rows, slots), pad_id, np.int32)], axis=1)
    np.put_along_axis(tokens, lengths[:, None] + np.arange(slots), responses, axis=1)
    return tokens
