"""GRPO on Qwen3-235B-A22B, the shapes of the largest published Qwen3 run.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_235b_a22b.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-235B-A22B in DIR
Mesh:      64 GPUs of 141 GB: fsdp 8, expert 8. Compiled without them, a train step needs 101.1 GiB
           of each (fp8rl plan --compile), and the sampler's weights, before it, 35.2 GiB
Expected:  not run by us (it needs the GPUs); published: FP8 on both sides keeps lowering clip
           fraction and difference at this size.
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/qwen3_235b_a22b", "steps": 200, "checkpoint_every": 50},
            "model": {"checkpoint": "checkpoints/Qwen3-235B-A22B"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 8, "expert": 8, "data": 1},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {"task": "gsm_symbolic", "reward": "math_equal", "train_questions": 16_384},
            "rollout": {
                "prompts_per_step": 64,
                "group_size": 16,
                "max_prompt_tokens": 512,
                "max_new_tokens": 2048,
            },
            "algo": {"clip_high": 0.28, "num_minibatches": 1},
            "learner": {"tokens_per_batch": 2560, "remat": "full"},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1024, "every": 50},
        }
    )
