"""`fp8rl bench`: times of rollout and train step, what zero drift costs, errors of FP8 products."""

from fp8rl_jax.bench.drift_cost import drift_cost, format_cost_table
from fp8rl_jax.bench.gemm_error import ARTICLE, gemm_errors, write_gemm_errors
from fp8rl_jax.bench.gemm_error import format_table as format_error_table
from fp8rl_jax.bench.step_time import bench, format_table

__all__ = [
    "ARTICLE",
    "bench",
    "drift_cost",
    "format_cost_table",
    "format_error_table",
    "format_table",
    "gemm_errors",
    "write_gemm_errors",
]
