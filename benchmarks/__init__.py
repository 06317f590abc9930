"""Benchmarks of the library's own promises, beside it and not in its wheel.

::

    step_time    rollout and train step under several recipes
        ^ Subject
    drift_cost   exact programs compared with naive ones
    processes    one process with N devices against N processes
    gemm_error   errors of FP8 products next to a published table

What is compared takes turns, so a machine that slows down slows both; figures are medians. What
users run on their machines is `fp8rl bench`. Not done: figures that fail a test (speed is reported,
never asserted), and several hosts.
"""
