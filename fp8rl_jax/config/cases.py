"""Precision cases: `FILE:CASE` runs a config file in other precisions.

Cases 1 to 4 are those of the article "Unified FP8: Moving Beyond Mixed Precision for Stable and
Accelerated MoE RL" (2025); `bf16` is the baseline without FP8, and `fp8_linear` NVIDIA's recipe,
whose K and V stay in bf16.
"""

from __future__ import annotations

# Fields of section `precision`; fields that a case does not name keep the file's values.
CASES: dict[str, dict[str, str]] = {
    "bf16": {"rollout": "bf16", "learner": "bf16", "kv_cache": "bf16", "attention": "bf16"},
    "case1": {"rollout": "fp8_blockwise", "learner": "bf16"},
    "case2": {"rollout": "fp8_blockwise", "learner": "fake_forward"},
    "case3": {"rollout": "fp8_blockwise", "learner": "fake"},
    "case4": {"rollout": "fp8_blockwise", "learner": "fp8_blockwise"},
    "fp8_linear": {
        "rollout": "fp8_linear",
        "learner": "fp8_linear",
        "kv_cache": "recipe",
        "attention": "bf16",
    },
}
