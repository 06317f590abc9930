"""GPU kernels and their CPU references. Imports jax only (never the rest of the library).

Import it as ``fp8rl_jax.kernels``; the directory stands at the root of the repository, but the
top-level name ``kernels`` belongs to another project that many users have installed.
"""

from fp8rl_jax.kernels.dispatch import (
    IMPLEMENTATIONS,
    attention,
    attention_vjp,
    block_matmul,
    choose,
    fast_attention_forward,
    resolve,
)
from fp8rl_jax.kernels.reference import (
    EXP_LANES,
    K_BLOCK,
    KV_CHUNK,
    as_bytes,
    dequantized,
    from_bytes,
    guard,
    round_bf16,
    rounded,
)

__all__ = [
    "EXP_LANES",
    "IMPLEMENTATIONS",
    "KV_CHUNK",
    "K_BLOCK",
    "as_bytes",
    "attention",
    "attention_vjp",
    "block_matmul",
    "choose",
    "dequantized",
    "fast_attention_forward",
    "from_bytes",
    "guard",
    "resolve",
    "round_bf16",
    "rounded",
]
