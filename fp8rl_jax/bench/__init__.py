"""`fp8rl bench`: times of rollout and train step, what zero drift costs, errors of FP8 products,
speed of the GPU kernels.

Imports nothing: each bench is a module of its own, and the one of the kernels runs on machines that
have JAX and Triton and not what a training run needs.
"""
