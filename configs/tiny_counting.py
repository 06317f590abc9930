"""Long-tailed responses on two CPU cores: counting in steps, answers of 2 to 512 bytes.

``from 3 by 4 to 27`` is answered by ``3 7 11 15 19 23 27``; the answers' lengths are exponentially
distributed around 126 bytes, and the reward is the share of terms before the first wrong one. Slots
are filled again as soon as a response ends, and the learner packs responses into rows without
padding (docs/guides/lengths.md), so a step costs what its tokens cost.

Precision: FP8 on both sides
Command:   fp8rl train --config configs/tiny_counting.py
Expected:  share of right terms from 0.20 to 0.28 (sampled), drift 0 (docs/guides/lengths.md)
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/tiny_counting", "steps": 100, "checkpoint_every": 20},
            "env": {
                "task": "fp8rl_jax.envs.tiny.counting:questions",
                "reward": "fp8rl_jax.envs.tiny.counting:right_terms",
            },
            "rollout": {
                "prompts_per_step": 16,
                "group_size": 8,
                "max_prompt_tokens": 24,
                "max_new_tokens": 512,
                "slots": 32,
            },
            "learner": {"tokens_per_batch": 2304},
            "algo": {"scale": "none"},
            "optimizer": {"learning_rate": 3e-4, "warmup_steps": 10, "b2": 0.99},
            "sft": {
                "steps": 300,
                "questions": 4096,
                "batch_size": 32,
                "learning_rate": 4e-3,
                "evaluations": 3,
            },
            "eval": {"questions": 128, "samples": 4, "every": 25},
        }
    )
