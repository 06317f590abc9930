"""GRPO on Qwen3-8B with GSM8K on one GPU: low-rank adapters on a frozen base.

Rewards are 1 for the right number and 0 else; thinking is off. The data set is downloaded at the
first start, or prepared beforehand (docs/data.md).

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   hf download Qwen/Qwen3-8B
           fp8rl train --config configs/qwen3_8b_lora_1gpu.py
Mesh:      1 GPU of 80 GB
Expected:  not run by us (it needs the GPU and the weights); `fp8rl plan` says that it fits
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/qwen3_8b_lora", "steps": 100, "checkpoint_every": 25},
            "model": {"checkpoint": "hf:Qwen/Qwen3-8B"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "lora": {"rank": 32, "alpha": 64.0},
            "data": {
                "tokenizer": "checkpoint",
                "chat": True,
                "chat_options": {"enable_thinking": False},
            },
            "env": {
                "task": "gsm8k",
                "reward": "gsm8k",
                "prompt_template": "{question}\nThink step by step, and end with '#### ' and the "
                "number that is the answer.",
            },
            "rollout": {
                "prompts_per_step": 32,
                "group_size": 8,
                "max_prompt_tokens": 320,
                "max_new_tokens": 768,
            },
            "learner": {"tokens_per_batch": 8704, "remat": "full"},
            "optimizer": {"learning_rate": 2e-5, "warmup_steps": 5, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1319, "batch_size": 256, "every": 25},
        }
    )
