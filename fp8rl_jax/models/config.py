"""Shape of a decoder. Field names follow Hugging Face's configurations of the same families."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.errors import UserError

ROPE_TYPES = ("default", "llama3", "yarn")
SCORING = ("softmax", "sigmoid")
# Fields that may be 0, and what that stands for.
_ZERO = {
    "num_experts": "a dense model",
    "n_shared_experts": "none",
    "first_k_dense_replace": "experts in every layer",
    "q_lora_rank": "none",
    "kv_lora_rank": "grouped-query attention",
    "rope_mscale": "none",
    "rope_mscale_all_dim": "none",
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with RMSNorm, RoPE and SwiGLU: Qwen3, Qwen3-MoE, Llama 3 or DeepSeek-V3.

    What tells the families apart are fields, so one forward pass runs them all. `models.presets`
    has the published sizes by name.

    Attributes:
      vocab_size: tokens, special ones included.
      hidden_size: width D of the residual stream.
      intermediate_size: width of the gated MLP of a dense layer.
      num_hidden_layers: decoder layers.
      num_attention_heads, num_key_value_heads: H and Hkv; H is a multiple of Hkv.
      head_dim: Dh; even.
      qk_norm: RMSNorm of every query and key head (Qwen3).
      rope_theta: base of the rotary frequencies.
      rope_interleave: rotary pairs are neighbours (0, 1), (2, 3), ... and not (0, Dh/2), ...
      rope_type: 'default'; 'llama3' (Llama 3.1's bands); 'yarn' (Peng et al., arXiv:2309.00071).
      rope_factor: of llama3 and yarn: how much longer than the original context.
      rope_original_max_position_embeddings: of both: the original context, in tokens.
      rope_low_freq_factor, rope_high_freq_factor: of llama3: turns within the original context
        below which a frequency is divided by the factor, and above which it stays.
      rope_beta_fast, rope_beta_slow: of yarn, likewise the other way round.
      rope_mscale, rope_mscale_all_dim: of yarn: temperature of attention, 0 for none.
      rms_norm_eps: epsilon of every RMSNorm.
      tie_word_embeddings: the output head is the transposed embedding.
      embedding_init_std: standard deviation of the initial embedding.
      num_experts: routed experts of a sparse layer; 0 for a dense model.
      num_experts_per_tok: experts of a token, k.
      moe_intermediate_size: width F of one expert's gated MLP.
      norm_topk_prob: the weights of a token's k experts are divided by their sum.
      scoring_func: how router logits become probabilities: 'softmax', or 'sigmoid' of each with a
        correction bias that enters the choice alone (DeepSeek-V3, arXiv:2412.19437, 2.1.2).
      n_group, topk_group: groups of experts, and how many of them a token may choose from.
      routed_scaling_factor: multiplies the weights of the routed experts.
      n_shared_experts: experts that every token uses, as one MLP of n * moe_intermediate_size.
      first_k_dense_replace: so many first layers of a model with experts are dense.
      kv_lora_rank: width of the latent that keys and values come from (multi-head latent
        attention, arXiv:2412.19437, 2.1.1); 0 for grouped-query attention.
      q_lora_rank: width of the latent that queries come from; 0 for none.
      qk_nope_head_dim, qk_rope_head_dim, v_head_dim: of latent attention: features of a query's
        and key's head without and with rotation, and of a value's head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool = True
    rope_theta: float = 10_000.0
    rope_interleave: bool = False
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_original_max_position_embeddings: int = 8192
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_mscale: float = 0.0
    rope_mscale_all_dim: float = 0.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    embedding_init_std: float = 1.0
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    norm_topk_prob: bool = True
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool | str):
                continue
            if field.name in _ZERO:
                if value < 0:
                    raise UserError(
                        f"model.{field.name} is {value}; write 0 for {_ZERO[field.name]}, or a "
                        "number above 0"
                    )
            elif value <= 0:
                raise UserError(f"model.{field.name} is {value}; write a number above 0")
        for name, choices in (("rope_type", ROPE_TYPES), ("scoring_func", SCORING)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"model.{name} is {getattr(self, name)!r}; write one of {', '.join(choices)}"
                )
        self._check_attention()
        if self.num_experts:
            self._check_experts()

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def rope_dim(self) -> int:
        """Features of a head that are rotated."""
        return self.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def dense_layers(self) -> int:
        """First layers that are dense although others have experts."""
        return self.first_k_dense_replace if self.num_experts else 0

    def _check_attention(self):
        if self.latent:
            if self.qk_rope_head_dim % 2:
                raise UserError(
                    f"model.qk_rope_head_dim is {self.qk_rope_head_dim}; rotary embeddings need an "
                    "even number"
                )
            return
        if self.q_lora_rank:
            raise UserError(
                f"model.q_lora_rank is {self.q_lora_rank} and model.kv_lora_rank 0: latent "
                "attention needs both, or the second alone"
            )
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
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise UserError(
                f"model.first_k_dense_replace = {self.first_k_dense_replace} leaves none of the "
                f"{self.num_hidden_layers} layers for experts: lower it, or set "
                "model.num_experts=0"
            )
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise UserError(
                f"model.n_group = {self.n_group} must divide model.num_experts = "
                f"{self.num_experts}, and model.topk_group = {self.topk_group} be at most n_group"
            )
        if self.num_experts_per_tok > self.topk_group * (self.num_experts // self.n_group):
            raise UserError(
                f"model.topk_group = {self.topk_group} groups hold "
                f"{self.topk_group * (self.num_experts // self.n_group)} experts, fewer than "
                f"model.num_experts_per_tok = {self.num_experts_per_tok}; raise it"
            )
        if self.n_group > 1 and self.scoring_func == "softmax":
            raise UserError(
                "model.n_group above 1 goes with model.scoring_func='sigmoid' (DeepSeek-V3); with "
                "'softmax' write 1"
            )
