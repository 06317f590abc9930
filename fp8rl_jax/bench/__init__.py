"""`fp8rl bench`: times of rollout and train step, and errors of the FP8 products."""

from fp8rl_jax.bench.gemm_error import ARTICLE, gemm_errors, write_gemm_errors
from fp8rl_jax.bench.gemm_error import format_table as format_error_table
from fp8rl_jax.bench.step_time import bench, format_table

__all__ = [
    "ARTICLE",
    "bench",
    "format_error_table",
    "format_table",
    "gemm_errors",
    "write_gemm_errors",
]
