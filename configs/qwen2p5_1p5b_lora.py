"""GRPO on Qwen2.5-1.5B-Instruct with GSM8K on one GPU: low-rank adapters on a frozen base.

Rewards are 1 for the right number and 0 else. The data set is downloaded at the first start, or
prepared beforehand (docs/data.md).

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   hf download Qwen/Qwen2.5-1.5B-Instruct
           fp8rl train --config configs/qwen2p5_1p5b_lora.py
Mesh:      1 GPU of 80 GB
Expected:  not run by us (it needs the GPU and the weights); `fp8rl plan` says that it fits
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm8k",
        "hf:Qwen/Qwen2.5-1.5B-Instruct",
        run={"dir": "runs/qwen2p5_1p5b_lora"},
        lora={"rank": 32, "alpha": 64.0},
        rollout={"group_size": 8},
        learner={"tokens_per_batch": 34_816},
        optimizer={"learning_rate": 2e-5},
    )
