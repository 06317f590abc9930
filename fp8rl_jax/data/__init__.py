"""Tokenizers, chat templates, resumable streams and padding."""

from fp8rl_jax.data.batching import (
    encode_prompt,
    encode_text,
    join,
    pad_prompts,
    pad_responses,
    pad_rows,
)
from fp8rl_jax.data.chat import ChatFormat, ChatTemplate, Prompt
from fp8rl_jax.data.detokenize import Detokenizer
from fp8rl_jax.data.pipeline import Stream
from fp8rl_jax.data.pretrained import PretrainedTokenizer
from fp8rl_jax.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_files,
    tokenizer_path,
)

__all__ = [
    "ByteTokenizer",
    "ChatFormat",
    "ChatTemplate",
    "Detokenizer",
    "PretrainedTokenizer",
    "Prompt",
    "Stream",
    "Tokenizer",
    "encode_prompt",
    "encode_text",
    "join",
    "load_tokenizer",
    "pad_prompts",
    "pad_responses",
    "pad_rows",
    "tokenizer_files",
    "tokenizer_path",
]
