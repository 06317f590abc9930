"""The small models of tests, and a recipe; a test that needs one field otherwise replaces it.

(Models as Hugging Face describes them: hf_checkpoints.py. Families for zero drift:
drift_harness.py.)
"""

from __future__ import annotations

import dataclasses

from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import get_recipe

# Two layers, each kind once, for tests that sample many sequences.
DENSE = ModelConfig(61, 64, 64, 2, 4, 2, 16)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
LATENT = dataclasses.replace(
    DENSE,
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
CALIBRATED = dataclasses.replace(get_recipe("fp8_blockwise"), kv="calibrated", fp8_attention=True)

# Where programs matter and numbers do not: the fewest layers, heads and features.
TINY = ModelConfig(61, 32, 32, 1, 2, 1, 16)
NARROW = ModelConfig(64, 32, 48, 2, 2, 1, 16)

# Widths that are whole blocks of 128, as GPU kernels take them in one piece.
BLOCKS = ModelConfig(96, 128, 256, 2, 4, 2, 32)

# 136 columns cross a block of 128, and no width is a power of two.
UNEVEN = ModelConfig(50, 48, 136, 2, 4, 2, 24)
UNEVEN_LATENT = dataclasses.replace(
    UNEVEN,
    num_key_value_heads=4,
    kv_lora_rank=136,
    q_lora_rank=40,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=24,
    qk_norm=False,
    rope_interleave=True,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
