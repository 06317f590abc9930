"""Models and a recipe of tests that sample many sequences: two layers, each kind once."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import get_recipe

DENSE = ModelConfig(61, 64, 64, 2, 4, 2, 16)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
LATENT = ModelConfig(
    61, 64, 64, 2, 4, 4, 16, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
CALIBRATED = dataclasses.replace(get_recipe("fp8_blockwise"), kv="calibrated", fp8_attention=True)
