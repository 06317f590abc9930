"""GRPO on Qwen3-8B with GSM8K on one GPU: low-rank adapters on a frozen base.

Rewards are 1 for the right number and 0 else; thinking is off. The data set is downloaded at the
first start, or prepared beforehand (docs/data.md).

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   hf download Qwen/Qwen3-8B
           fp8rl train --config configs/qwen3_8b_lora_1gpu.py
Mesh:      1 GPU of 80 GB
Expected:  not run by us (it needs the GPU and the weights); `fp8rl plan` says that it fits
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm8k",
        "hf:Qwen/Qwen3-8B",
        run={"dir": "runs/qwen3_8b_lora"},
        lora={"rank": 32, "alpha": 64.0},
        data={"chat_options": {"enable_thinking": False}},
        rollout={"group_size": 8},
        learner={"tokens_per_batch": 8704},
        optimizer={"learning_rate": 2e-5},
    )
