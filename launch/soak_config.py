"""The run of launch/soak.py: every phase in a few seconds, with a reward that has a gradient."""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"steps": 8, "checkpoint_every": 2, "samples": 2, "keep_checkpoints": 3},
            "model": {
                "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
            },
            "env": {
                "task": "basic_arithmetic",
                "reward": "soak_reward:share_of_even_bytes",
                "task_options": {
                    "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1,
                    "operators": ["+"], "allow_parentheses": False, "allow_negation": False,
                },
                "train_questions": 32,
            },
            "rollout": {
                "prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 24,
                "max_new_tokens": 16,
            },
            "sft": {"steps": 8, "questions": 32, "batch_size": 16, "evaluations": 2},
            "eval": {"questions": 16, "batch_size": 16, "every": 4},
        }
    )  # fmt: skip
