"""GRPO on Qwen3-1.7B with GSM8K: a run whose result others have published, as a check of ours.

Rewards are 1 for the right number and 0 else; thinking is off. The data set is downloaded at the
first start, or prepared beforehand (docs/data.md).

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_1p7b_gsm8k.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-1.7B in DIR
Mesh:      4 GPUs of 80 GB: fsdp 4
Expected:  not run by us (it needs the GPUs and the weights). Published for 100 steps on this model
           and data set, in other precisions and with their own batches: mean reward 0.8077
           (MaxText, pull request 4015), within NeMo-RL's band of 0.804 to 0.820.
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/qwen3_1p7b_gsm8k", "steps": 100, "checkpoint_every": 25},
            "model": {"checkpoint": "checkpoints/Qwen3-1.7B"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 4, "data": 1},
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
                "group_size": 16,
                "max_prompt_tokens": 320,
                "max_new_tokens": 768,
            },
            "learner": {"tokens_per_batch": 34_816, "remat": "full"},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 5, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1319, "batch_size": 256, "every": 25},
        }
    )
