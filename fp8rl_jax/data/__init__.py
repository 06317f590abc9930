"""Turns text into padded arrays of tokens, and tokens into text.

::

    data.tokenizer -> load -> tokenizer.Tokenizer   byte, a tokenizer.json, or `pretrained`
                                 |
    question -> batching.encode_prompt, demonstrations -> batching.pad_rows -> sampler, learner
                                 |
    what an environment says -> turns -> tokens between two replies
    sampled tokens -> Tokenizer.decode, or detokenize piece by piece -> text

`pretrained` reads a Hugging Face directory with its `chat` template, which `chat_trial` tries out.
Read `tokenizer` and `batching` first. Not done: packing of several sequences into a row, code that
comes with a model, SentencePiece's tokenizer.model.
"""

from fp8rl_jax.data.batching import Stream, encode_prompt, encode_text, join, pad_prompts, pad_rows
from fp8rl_jax.data.chat import ChatFormat, ChatTemplate, Prompt
from fp8rl_jax.data.demonstrations import (
    encode_conversation,
    encode_demonstration,
    merges,
    pad_demonstrations,
    with_turn_end,
)
from fp8rl_jax.data.load import load_tokenizer, tokenizer_files, tokenizer_path
from fp8rl_jax.data.pretrained import PretrainedTokenizer
from fp8rl_jax.data.tokenizer import ByteTokenizer, Tokenizer
from fp8rl_jax.data.turns import Turns
