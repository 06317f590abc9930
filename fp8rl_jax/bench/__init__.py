"""`fp8rl bench`: speed of the rollout and of the GPU kernels, on a user's machine.

::

    cli/bench.py --+-> rollout      tokens per second: rollout_ways (static or continuous batching)
                   +-> kernels      GPU kernels compared with XLA: kernel_shapes (which calls),
                                    kernel_times (operands and clock)

What is compared takes turns, so a machine that slows down slows both; figures are medians. This
file imports nothing, so that `kernels` runs with JAX and Triton alone. Other benchmarks stand
beside the library, in `benchmarks/`.
"""
