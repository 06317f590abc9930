"""GRPO on Qwen3-30B-A3B, 128 experts of which a token uses 8.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_30b_a3b.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-30B-A3B in DIR
Mesh:      16 GPUs of 141 GB: fsdp 4, expert 4. Compiled without them, a train step needs 51.0 GiB
           of each (fp8rl plan --compile), and the sampler's weights, before it, 8.8 GiB
Expected:  not run by us (it needs the GPUs); published: accuracy curves of FP8 and BF16 match.
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/qwen3_30b_a3b", "steps": 400, "checkpoint_every": 50},
            "model": {"checkpoint": "checkpoints/Qwen3-30B-A3B"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 4, "expert": 4, "data": 1},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {"task": "gsm_symbolic", "reward": "math_equal", "train_questions": 16_384},
            "rollout": {
                "prompts_per_step": 32,
                "group_size": 16,
                "max_prompt_tokens": 512,
                "max_new_tokens": 2048,
            },
            "algo": {"clip_high": 0.28, "num_minibatches": 1},
            "learner": {"tokens_per_batch": 5120, "remat": "full"},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1024, "every": 50},
        }
    )
