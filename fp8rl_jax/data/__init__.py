"""Tokenizers, resumable streams and padding."""

from fp8rl_jax.data.batching import encode_prompt, join, pad_prompts, pad_responses
from fp8rl_jax.data.pipeline import Stream
from fp8rl_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "Stream",
    "Tokenizer",
    "encode_prompt",
    "join",
    "load_tokenizer",
    "pad_prompts",
    "pad_responses",
]
