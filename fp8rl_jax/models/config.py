"""Shape of a decoder. Field names follow Hugging Face's configurations of the same families."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from fp8rl_jax.base.bounds import BOUNDS, check_number
from fp8rl_jax.base.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_CHOICES = {
    "rope_type": ROPE_TYPES,
    "scoring_func": ("softmax", "sigmoid"),
    "hidden_act": ("silu", "gelu_pytorch_tanh", "clamped_swiglu"),
}
# Fields without effect unless the other is set.
_NEEDS = {
    "sliding_window_pattern": "sliding_window",
    "rope_local_base_freq": "sliding_window",
    "q_lora_rank": "kv_lora_rank",
    "moe_bias": "num_experts",
}
# What latent attention does not have.
_NOT_LATENT = (
    "partial_rotary_factor",
    "sliding_window",
    "query_pre_attn_scalar",
    "qkv_bias",
    "o_bias",
    "attention_sinks",
)


def _field(meaning: str, default: Any = dataclasses.MISSING, is_rule: bool = False) -> Any:
    """Returns a dataclass field with its meaning as metadata, which `--help` shows."""
    metadata = {"meaning": meaning, "is_rule": is_rule}
    return dataclasses.field(default=default, metadata=metadata)


# A field that families differ in: a model belongs to the family whose rules it has.
_rule = functools.partial(_field, is_rule=True)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder with RMSNorm, RoPE and a gated MLP or experts, of one of `models.families`.

    Families differ in these fields alone, so one forward pass runs them all. `models.presets` has
    the published sizes by name.
    """

    vocab_size: int = _field("tokens, special ones included")
    hidden_size: int = _field("width D of the residual stream")
    intermediate_size: int = _field("width of the gated MLP of a dense layer")
    num_hidden_layers: int = _field("decoder layers")
    num_attention_heads: int = _field("query heads")
    num_key_value_heads: int = _field("key and value heads; divides the query heads")
    head_dim: int = _field("width of a head, even, at most 256")
    qk_norm: bool = _rule("RMSNorm of every query and key head (Qwen3)", True)
    qk_norm_by_head: bool = _rule(
        "QK-norm is over each head; False: over all heads of the queries, and of the keys (OLMo 2)",
        True,
    )
    qkv_bias: bool = _rule("query, key and value projections have biases (Qwen2)", False)
    o_bias: bool = _rule("attention's output projection has a bias (gpt-oss)", False)
    attention_sinks: bool = _rule(
        "each query head has a score that its softmax counts beside those of the keys (gpt-oss)",
        False,
    )
    query_pre_attn_scalar: int = _rule(
        "scores are divided by the root of this number; 0 for the width of a head", 0
    )
    sliding_window: int = _rule(
        "most tokens that a query attends to, its own one included; 0 for all", 0
    )
    sliding_window_pattern: int = _rule(
        "with a window: every n-th layer attends to all tokens; 0 for none", 0
    )
    sandwich_norms: bool = _rule(
        "results of attention and MLP are normed, too, before they are added (Gemma)", False
    )
    pre_norms: bool = _rule(
        "attention and MLP read normed values; False, with sandwich_norms: their results alone are "
        "normed (OLMo 2)",
        True,
    )
    unit_offset_norms: bool = _rule("norms multiply by 1 + weight (Gemma)", False)
    hidden_act: str = _rule(
        "activation of the gated MLP: silu, gelu_pytorch_tanh, clamped_swiglu (gpt-oss)", "silu"
    )
    scale_embeddings: bool = _rule(
        "embeddings are multiplied by the root of hidden_size (Gemma)", False
    )
    rope_theta: float = _field("base of the rotary frequencies", 10_000.0)
    rope_local_base_freq: float = _rule(
        "base of the rotary frequencies of layers with a window; 0 for that of all", 0.0
    )
    rope_interleave: bool = _rule(
        "rotary pairs are neighbours (0, 1), (2, 3), ..., not halves of a head apart", False
    )
    partial_rotary_factor: float = _rule(
        "share of a head's features that are rotated, its first ones: 1 or 0.5", 1.0
    )
    rope_type: str = _field(
        "default; linear (positions are divided by rope_factor); llama3 (Llama 3.1's bands); yarn "
        "(Peng et al., arXiv:2309.00071)",
        "default",
    )
    rope_factor: float = _field("context length over the original one", 1.0)
    rope_original_max_position_embeddings: int = _field(
        "llama3 and yarn: the original context, in tokens", 8192
    )
    rope_low_freq_factor: float = _field(
        "llama3: frequencies with fewer rotations than this over the original context are "
        "divided by rope_factor",
        1.0,
    )
    rope_high_freq_factor: float = _field(
        "llama3: frequencies with more rotations than this are kept", 4.0
    )
    rope_beta_fast: float = _field("yarn: frequencies with more rotations than this are kept", 32.0)
    rope_beta_slow: float = _field(
        "yarn: frequencies with fewer rotations than this are divided by rope_factor", 1.0
    )
    rope_truncate: bool = _field(
        "yarn: the ends of the ramp between the two are rounded to whole pairs", True
    )
    rope_mscale: float = _field("yarn: temperature of attention; 0 for none", 0.0)
    rope_mscale_all_dim: float = _field(
        "yarn: the part of the temperature that multiplies the scores; 0 for none", 0.0
    )
    rms_norm_eps: float = _field("epsilon of every RMSNorm", 1e-6)
    tie_word_embeddings: bool = _field("output head = transposed embedding", False)
    embedding_init_std: float = _field("standard deviation of the initial embedding", 1.0)
    num_experts: int = _field(
        "routed experts of a sparse layer, in the place of its MLP; 0 for a dense model", 0
    )
    num_experts_per_tok: int = _field("experts per token, k", 2)
    moe_intermediate_size: int = _field("width of one expert's gated MLP", 128)
    moe_bias: bool = _rule("router and experts have biases (gpt-oss)", False)
    norm_topk_prob: bool = _field("divide the weights of a token's experts by their sum", True)
    scoring_func: str = _rule(
        "router: softmax; sigmoid with a correction bias that enters the selection alone "
        "(DeepSeek-V3, arXiv:2412.19437, 2.1.2)",
        "softmax",
    )
    n_group: int = _field("groups of experts", 1)
    topk_group: int = _field("groups from which a token may select experts", 1)
    routed_scaling_factor: float = _field("multiplies the weights of the routed experts", 1.0)
    n_shared_experts: int = _field(
        "experts that every token uses, as one MLP of n * moe_intermediate_size", 0
    )
    first_k_dense_replace: int = _field("number of leading dense layers in a model with experts", 0)
    kv_lora_rank: int = _field(
        "width of the latent of keys and values (multi-head latent attention, "
        "arXiv:2412.19437, 2.1.1); 0 for grouped-query attention",
        0,
    )
    q_lora_rank: int = _field("width of the latent of queries; 0 for none", 0)
    qk_nope_head_dim: int = _field(
        "latent attention: features of a query's and key's head without rotation", 128
    )
    qk_rope_head_dim: int = _field(
        "latent attention: features of a query's and key's head with rotation", 64
    )
    v_head_dim: int = _field("latent attention: features of a value's head", 128)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (name := f"model.{field.name}") in BOUNDS:
                check_number(name, getattr(self, field.name))
        for name, needed in _NEEDS.items():
            if getattr(self, name) and not getattr(self, needed):
                raise UserError(
                    f"{name} is {getattr(self, name)} and {needed} 0: set {needed}, or leave the "
                    "other out"
                )
        for is_wrong, sentence in (*self._shapes(), *self._experts()):
            if is_wrong:
                raise UserError(sentence)

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def rope_dim(self) -> int:
        """Number of features of a head that RoPE rotates."""
        if self.latent:
            return self.qk_rope_head_dim
        return self.head_dim // 2 if self.partial_rotary_factor == 0.5 else self.head_dim

    @property
    def dense_layers(self) -> int:
        """Number of leading dense layers in a model with experts; 0 in a dense model."""
        return self.first_k_dense_replace if self.num_experts else 0

    def _shapes(self) -> Iterator[tuple[bool, str]]:
        """Yields what the fields of a layer without experts must not be: (whether they are, what is
        wrong and what to write instead)."""
        for name, choices in _CHOICES.items():
            yield (
                getattr(self, name) not in choices,
                f"model.{name} is {getattr(self, name)!r}; write one of {', '.join(choices)}",
            )
        yield (
            self.rope_type == "llama3" and self.rope_low_freq_factor >= self.rope_high_freq_factor,
            f"model.rope_low_freq_factor is {self.rope_low_freq_factor}, not below "
            f"model.rope_high_freq_factor = {self.rope_high_freq_factor}: write a smaller number, "
            "such as 1.0 with 4.0",
        )
        yield (
            self.rope_type == "yarn" and self.rope_beta_fast < self.rope_beta_slow,
            f"model.rope_beta_fast is {self.rope_beta_fast}, below model.rope_beta_slow = "
            f"{self.rope_beta_slow}: write a larger number, such as 32.0 with 1.0",
        )
        yield (
            not self.pre_norms and not self.sandwich_norms,
            "pre_norms is False and sandwich_norms too, so that nothing is normed: set one of them "
            "to True",
        )
        yield (
            self.sliding_window_pattern == 1,
            "sliding_window_pattern is 1, so that every layer attends to all tokens: write 0 or a "
            "number from 2",
        )
        for name in _NOT_LATENT:
            default = getattr(ModelConfig, name)
            yield (
                self.latent and getattr(self, name) != default,
                f"kv_lora_rank is set, and {name} is {getattr(self, name)!r}, which latent "
                f"attention does not have: set kv_lora_rank=0, or {name}={default!r}",
            )
        yield (
            not self.latent and self.num_attention_heads % self.num_key_value_heads > 0,
            f"model.num_attention_heads = {self.num_attention_heads} is not a multiple of "
            f"model.num_key_value_heads = {self.num_key_value_heads}; change one of them",
        )
        yield (
            self.partial_rotary_factor not in (0.5, 1),
            f"model.partial_rotary_factor is {self.partial_rotary_factor}: all features of a head "
            "are rotated, or a half of them; write 1 or 0.5",
        )
        yield (
            self.partial_rotary_factor == 0.5 and self.rope_interleave,
            "partial_rotary_factor is 0.5 and rope_interleave True: a half of a head is rotated by "
            "halves alone; set rope_interleave=False",
        )
        width = "qk_rope_head_dim" if self.latent else "model.head_dim"
        part = "" if self.partial_rotary_factor == 1 else ", of which half are rotated"
        yield (
            self.rope_dim % 2 > 0,
            f"{width} is {self.qk_rope_head_dim if self.latent else self.head_dim}{part}; rotary "
            "embeddings need an even number",
        )

    def _experts(self) -> Iterator[tuple[bool, str]]:
        """Yields what the fields of experts must not be, as `_shapes`."""
        if not self.num_experts:
            return
        yield (
            self.num_experts_per_tok > self.num_experts,
            f"model.num_experts_per_tok = {self.num_experts_per_tok} is more than "
            f"model.num_experts = {self.num_experts}; lower it",
        )
        yield (
            self.num_experts_per_tok == 1 and self.norm_topk_prob,
            "norm_topk_prob with model.num_experts_per_tok = 1 makes every weight 1, so that the "
            "router learns nothing: set norm_topk_prob=False, or raise the number of experts per "
            "token",
        )
        yield (
            self.first_k_dense_replace >= self.num_hidden_layers,
            f"first_k_dense_replace = {self.first_k_dense_replace} leaves none of the "
            f"{self.num_hidden_layers} layers for experts: lower it, or set model.num_experts=0",
        )
        yield (
            self.num_experts % self.n_group > 0 or self.topk_group > self.n_group,
            f"n_group = {self.n_group} must divide model.num_experts = {self.num_experts}, and "
            f"topk_group = {self.topk_group} be at most n_group",
        )
        selectable = self.topk_group * (self.num_experts // self.n_group)
        yield (
            self.num_experts_per_tok > selectable,
            f"topk_group = {self.topk_group} groups hold {selectable} experts, fewer than "
            f"model.num_experts_per_tok = {self.num_experts_per_tok}; raise it",
        )
        yield (
            self.n_group > 1 and self.scoring_func == "softmax",
            "n_group above 1 goes with scoring_func='sigmoid' (DeepSeek-V3); with 'softmax' write "
            "1",
        )
