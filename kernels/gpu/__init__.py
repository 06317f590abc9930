"""The GPU kernels: a file for each family, kernels above the functions that call them.

Importing this package needs Triton. `kernels.gpu_kernels()` imports it when a program first uses a
kernel; `dispatch` imports `mosaic_matmul`, which needs Pallas instead.
"""

from fp8rl_jax.kernels.gpu import (
    attention,
    attention_gradient,
    attention_inputs,
    embedding,
    fast_attention,
    head,
    matmul,
    norm,
)
