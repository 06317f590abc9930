"""GRPO on Qwen3-30B-A3B with GSM8K on two GPUs: low-rank adapters of attention, a frozen base.

Each GPU holds half of the experts, in the bf16 base and in the sampler's FP8 weights. Rewards are 1
for the right number and 0 else; thinking is off. The data set is downloaded at the first start, or
prepared beforehand (docs/data.md).

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   hf download Qwen/Qwen3-30B-A3B
           fp8rl train --config configs/qwen3_30b_a3b_lora_2gpu.py
Mesh:      2 GPUs of 80 GB: expert 2
Expected:  not run by us (it needs the GPUs and the weights); `fp8rl plan` says that it fits
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm8k",
        "hf:Qwen/Qwen3-30B-A3B",
        run={"dir": "runs/qwen3_30b_a3b_lora"},
        lora={"rank": 32, "alpha": 64.0, "modules": "[qkvo]_proj"},
        mesh={"fsdp": 1, "expert": 2, "data": 1},
        data={"chat_options": {"enable_thinking": False}},
        rollout={"group_size": 8},
        learner={"tokens_per_batch": 2176},
        optimizer={"learning_rate": 2e-5},
    )
