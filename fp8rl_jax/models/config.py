"""Shape of a decoder. Field names follow Hugging Face's Qwen3 configuration."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3-style decoder: RMSNorm, QK-norm, grouped-query attention, RoPE, SwiGLU or experts.

    Attributes:
      vocab_size: tokens, special ones included.
      hidden_size: width D of the residual stream.
      intermediate_size: width of the gated MLP; without effect in a model with experts.
      num_hidden_layers: decoder layers.
      num_attention_heads, num_key_value_heads: H and Hkv; H is a multiple of Hkv.
      head_dim: Dh; even.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: epsilon of every RMSNorm.
      tie_word_embeddings: the output head is the transposed embedding.
      embedding_init_std: standard deviation of the initial embedding.
      num_experts: experts of every layer; 0 for a dense model.
      num_experts_per_tok: experts of a token, k.
      moe_intermediate_size: width F of one expert's gated MLP.
      norm_topk_prob: the weights of a token's k experts are divided by their sum.
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
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    norm_topk_prob: bool = True

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "num_experts":
                if value < 0:
                    raise UserError(
                        f"model.num_experts is {value}; write 0 for a dense model, or the number "
                        "of experts"
                    )
            elif not isinstance(value, bool) and value <= 0:
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
        if self.num_experts:
            self._check_experts()

    def _check_experts(self):
        if self.num_experts_per_tok > self.num_experts:
            raise UserError(
                f"model.num_experts_per_tok = {self.num_experts_per_tok} is more than "
                f"model.num_experts = {self.num_experts}; lower it"
            )
        if self.num_experts_per_tok == 1 and self.norm_topk_prob:
            raise UserError(
                "model.norm_topk_prob with model.num_experts_per_tok = 1 makes every weight 1, so "
                "that the router learns nothing: set model.norm_topk_prob=False, or raise the "
                "number of experts per token"
            )
