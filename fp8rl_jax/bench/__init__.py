"""`fp8rl bench`: times of rollout and train step, what zero drift costs, errors of FP8 products,
speed of the GPU kernels.

::

    cli/bench.py --+-> step_time    rollout and train step under several recipes
                   |      ^ Subject
                   +-> drift_cost   exact programs compared with naive ones
                   +-> rollout      tokens per second: rollout_ways (static or continuous batching),
                   |                transformers_peer (the same weights in transformers)
                   +-> processes    one process with N devices against N processes
                   +-> gemm_error   errors of FP8 products next to a published table
                   +-> kernels      GPU kernels compared with XLA: kernel_shapes (which calls),
                                    kernel_times (operands and clock)

What is compared takes turns, so a machine that slows down slows both; figures are medians. This
file imports nothing, so that `kernels` runs with JAX and Triton alone. Not done: figures that fail
a test (speed is reported, never asserted), and several hosts.
"""
