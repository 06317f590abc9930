"""The GPU kernels: a file for each family, kernels above the functions that call them.

Importing this needs Triton. `kernels.gpu_kernels()` imports it for the library, when a program
first takes a kernel; `mosaic_matmul`, which needs Pallas instead, is imported by `dispatch`.
"""

from fp8rl_jax.kernels.gpu import attention, attention_gradient, fast_attention, head, matmul, norm
