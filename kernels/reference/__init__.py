"""The definition of each operation in plain jnp: what runs on a CPU, and wherever no kernel does.

`matmul` and `attention` give a row the same bits whatever is in the batch; `gpu` has a file of the
same name for each operation. `products`, `reductions`, `e4m3` and `bits` are what they are made of.
"""

from fp8rl_jax.kernels.reference import attention, attention_gradient, matmul
