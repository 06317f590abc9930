"""Shape of a decoder. Field names follow Hugging Face's Qwen3 configuration."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3-style decoder: RMSNorm, QK-norm, grouped-query attention, RoPE, SwiGLU.

    Attributes:
      vocab_size: tokens, special ones included.
      hidden_size: width D of the residual stream.
      intermediate_size: width of the gated MLP.
      num_hidden_layers: decoder layers.
      num_attention_heads, num_key_value_heads: H and Hkv; H is a multiple of Hkv.
      head_dim: Dh; even.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: epsilon of every RMSNorm.
      tie_word_embeddings: the output head is the transposed embedding.
      embedding_init_std: standard deviation of the initial embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    embedding_init_std: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value <= 0:
                raise UserError(f"model.{field.name} is {value}; write a number above 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"model.num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"model.num_key_value_heads = {self.num_key_value_heads}; change one of them"
            )
        if self.head_dim % 2 or self.head_dim > 128:
            raise UserError(
                f"model.head_dim is {self.head_dim}; rotary embeddings need an even number, and "
                "the exact attention takes at most 128"
            )
