"""GRPO on Qwen3-4B with DAPO's bounds, the smallest of the published unified-FP8 runs.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_4b.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-4B in DIR
Mesh:      8 GPUs of 80 GB: fsdp 8
Expected:  not run by us (it needs the GPUs); published: FP8 on both sides lowers the clip
           fraction and the log-probability difference against case 1; here case 4 has neither.
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/Qwen3-4B",
        run={"dir": "runs/qwen3_4b", "steps": 400},
        mesh={"fsdp": 8, "data": 1},
        rollout={"prompts_per_step": 32},
        learner={"tokens_per_batch": 20_480},
    )
