"""A conversation on two CPU cores: guessing a number from 0 to 31 in five replies.

A 0.85M-parameter decoder learns from 2,048 games of random play which guesses are left, then by
GRPO which of them tells most. After each reply the sampler waits for the environment's answer, and
goes on with the tokens as they were drawn (docs/guides/conversations.md).

Precision: FP8 on both sides
Command:   fp8rl train --config configs/tiny_guessing.py
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/tiny_guessing", "steps": 100, "checkpoint_every": 20},
            "env": {
                "task": "fp8rl_jax.envs.tiny.guessing:questions",
                "step": "fp8rl_jax.envs.tiny.guessing:step",
                "max_turns": 5,
            },
            "rollout": {
                "prompts_per_step": 16,
                "group_size": 8,
                "max_prompt_tokens": 12,
                "max_new_tokens": 36,
                "max_turn_tokens": 4,
                "max_observation_tokens": 2,
                "slots": 64,
                "part": 8,
            },
            "algo": {"scale": "none"},
            "optimizer": {"learning_rate": 3e-4, "warmup_steps": 10, "b2": 0.99},
            "sft": {
                "steps": 300,
                "questions": 2048,
                "batch_size": 32,
                "learning_rate": 4e-3,
                "evaluations": 3,
            },
            "eval": {"questions": 256, "samples": 4, "every": 25},
        }
    )
