"""GRPO on Llama-3.1-8B-Instruct on word problems.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/llama3p1_8b.py --config.model.checkpoint=DIR
           with the files of meta-llama/Llama-3.1-8B-Instruct in DIR
Mesh:      8 GPUs of 80 GB: fsdp 8
Expected:  not run by us (it needs the GPUs); published after 4,000 steps on a mathematics
           set: validation accuracy 0.616 in BF16, 0.613 in FP8 end to end, 0.586 with FP8
           generation alone (case 1 without a correction).
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/llama3p1_8b", "steps": 4000, "checkpoint_every": 50},
            "model": {"checkpoint": "checkpoints/Llama-3.1-8B-Instruct"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 8, "data": 1},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {"task": "gsm_symbolic", "reward": "math_equal", "train_questions": 16_384},
            "rollout": {
                "prompts_per_step": 32,
                "group_size": 16,
                "max_prompt_tokens": 512,
                "max_new_tokens": 2048,
            },
            "algo": {"clip_high": 0.28, "num_minibatches": 1},
            "learner": {"tokens_per_batch": 20_480, "remat": "full"},
            "optimizer": {"learning_rate": 3e-7, "warmup_steps": 10, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1024, "every": 50},
        }
    )
