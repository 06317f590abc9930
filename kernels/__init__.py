"""GPU kernels and their CPU references. Imports jax only (never the rest of the library).

::

    models, quant --> dispatch.py: implementation and platform
                          |
          +---------------+----------------+
    gpu/ (CUDA)                      reference/ (elsewhere)
    attention, attention_inputs,     attention, attention_gradient, matmul: jnp with a
    fast_attention,                  fixed order of summation, by a way of multiplying that
    attention_gradient, matmul,      probe.py has tested on this machine
    embedding, head, norm: Triton;
    mosaic_matmul, mosaic_decode: Mosaic GPU

Read first: dispatch.py, then reference/attention.py and gpu/attention.py, which compute the same.
gpu and reference give different bits: rollout and learner must use the same one.

Not done: other GPUs than Hopper, backward kernels for heads of more than 256 features.

Import it as ``fp8rl_jax.kernels``. The directory is at the root of the repository, but the
top-level name ``kernels`` belongs to another project that many users have installed.
"""

from fp8rl_jax.kernels.arrays import (
    EXP_LANES,
    K_BLOCK,
    KV_CHUNK,
    KV_STEP,
    axes_of,
    broadcast_last,
    folded,
    fp8_max,
    max_last,
    prevent_fma,
    round_bf16,
    rounded,
    stored,
    sum_all,
    sum_last,
    sum_rows,
    tree_norm,
    varying_as,
)
from fp8rl_jax.kernels.dispatch import (
    IMPLEMENTATIONS,
    attention,
    attention_vjp,
    block_matmul,
    by_platform,
    gpu_kernels,
    layer_kernels,
    matmul_at_once,
    resolve,
    triton_installed,
)
from fp8rl_jax.kernels.machine import backend
from fp8rl_jax.kernels.reference.attention import dequantized
from fp8rl_jax.kernels.reference.bits import (
    as_bytes,
    in_bits,
    keep,
    kept,
    scan_in_bits,
    to_e4m3,
    widened,
)
