"""Tokenizers, chat templates, resumable streams and padding."""

from fp8rl_jax.data.batching import Stream, encode_prompt, encode_text, join, pad_prompts, pad_rows
from fp8rl_jax.data.chat import ChatFormat, ChatTemplate, Prompt
from fp8rl_jax.data.demonstrations import (
    encode_demonstration,
    merges,
    pad_demonstrations,
    with_turn_end,
)
from fp8rl_jax.data.load import load_tokenizer, tokenizer_files, tokenizer_path
from fp8rl_jax.data.pretrained import PretrainedTokenizer
from fp8rl_jax.data.tokenizer import ByteTokenizer, Tokenizer
