"""A tool on two CPU cores: products of two numbers, with a function that multiplies.

A 0.85M-parameter decoder learns from 2,048 demonstrations, half of which call the tool, and by GRPO
that calling it pays. Calls are written as Hermes and Qwen write them
(docs/guides/conversations.md).

Precision: FP8 on both sides
Command:   fp8rl train --config configs/tiny_calculator.py
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/tiny_calculator", "steps": 60, "checkpoint_every": 20},
            "env": {
                "task": "fp8rl_jax.envs.tiny.calculator:questions",
                "tools": "fp8rl_jax.envs.tiny.calculator:TOOLS",
                "max_turns": 2,
            },
            "rollout": {
                "prompts_per_step": 16,
                "group_size": 8,
                "max_prompt_tokens": 12,
                "max_new_tokens": 112,
                "max_turn_tokens": 88,
                "max_observation_tokens": 8,
                "slots": 64,
                "part": 8,
            },
            "algo": {"scale": "none"},
            "optimizer": {"learning_rate": 3e-4, "warmup_steps": 10, "b2": 0.99},
            "sft": {
                "steps": 400,
                "questions": 2048,
                "batch_size": 32,
                "learning_rate": 4e-3,
                "evaluations": 3,
            },
            "eval": {"questions": 256, "samples": 4, "every": 25},
        }
    )
