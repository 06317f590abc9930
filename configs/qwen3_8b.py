"""GRPO on Qwen3-8B-Base with DAPO's bounds: 32 prompts of 16 responses, one update a rollout.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_8b.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-8B-Base in DIR
Mesh:      8 GPUs of 80 GB: fsdp 8
Expected:  not run by us (it needs the GPUs); published: FP8 rollout follows BF16 in accuracy
           when importance weights correct it, and not without; here case 4 needs none. The
           published responses have 20,480 tokens.
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/qwen3_8b", "steps": 400, "checkpoint_every": 50},
            "model": {"checkpoint": "checkpoints/Qwen3-8B-Base"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 8, "data": 1},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {"task": "gsm_symbolic", "reward": "math_equal", "train_questions": 16_384},
            "rollout": {
                "prompts_per_step": 32,
                "group_size": 16,
                "max_prompt_tokens": 512,
                "max_new_tokens": 4096,
            },
            "algo": {"clip_high": 0.28, "num_minibatches": 1},
            "learner": {"tokens_per_batch": 18_432, "remat": "full"},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1024, "every": 50},
        }
    )
