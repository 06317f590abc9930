"""The smallest run that has every phase: two layers, six RL steps, eight updates of fine-tuning.

The untrained policy solves nothing, so its reward is one that every response gets some of: rewards
and gradients of all RL steps are above 0. Responses go beyond a page of 64 tokens.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {
            "run": {"steps": 6, "checkpoint_every": 2, "samples": 2},
            "model": {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
            },
            "mesh": {"data": -1},
            # A few seconds a run, and there are many; tests/drift switches it on.
            "precision": {"self_check": False},
            "env": {
                "task": "basic_arithmetic",
                "reward": "dense_reward:share_of_even_bytes",
                "task_options": {
                    "min_terms": 3,
                    "max_terms": 3,
                    "min_digits": 1,
                    "max_digits": 1,
                    "operators": ["+"],
                    "allow_parentheses": False,
                    "allow_negation": False,
                },
                "train_questions": 64,
            },
            "rollout": {
                "prompts_per_step": 4,
                "group_size": 4,
                "max_prompt_tokens": 26,
                "max_new_tokens": 60,
            },
            "sft": {"steps": 8, "questions": 64, "batch_size": 16, "evaluations": 2},
            "eval": {"questions": 32, "batch_size": 16, "every": 3},
        }
    )
