"""The definition of each operation in plain jnp, which runs on CPUs and wherever no kernel does.

`matmul` and `attention` give a row the same bits whatever else is in the batch; `gpu` has a file of
the same name for each operation. They build on `exact` and `bits`, and take the way of multiplying
that `probe` finds: it tests at run time that a CPU's dots keep the order of `orders`.
"""

from fp8rl_jax.kernels.reference import attention, attention_gradient, matmul
