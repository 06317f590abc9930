"""What the configurations of published models share: GRPO from a model's files, FP8 on both sides.

Tokenizer and chat template are the model's own, and there is no supervised fine-tuning before. Each
configuration adds what is its own: mesh, batches, what one device computes at a time.
"""

from typing import Any

import ml_collections

_SHARED = {
    "precision": {"rollout": "fp8", "learner": "fp8"},
    "data": {"tokenizer": "checkpoint", "chat": True},
    "learner": {"remat": "full"},
    "optimizer": {"b2": 0.95},
    "sft": {"steps": 0},
}
# Generated word problems with DAPO's upper bound, or GSM8K with its question for a final number.
_TASKS: dict[str, dict[str, dict[str, Any]]] = {
    "gsm_symbolic": {
        "run": {"checkpoint_every": 50},
        "env": {"reward": "math_equal", "train_questions": 16_384},
        "rollout": {"group_size": 16, "max_prompt_tokens": 512, "max_new_tokens": 2048},
        "algo": {"clip_high": 0.28},
        "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10},
        "eval": {"questions": 1024, "every": 50},
    },
    "gsm8k": {
        "run": {"steps": 100, "checkpoint_every": 25},
        "env": {
            "reward": "gsm8k",
            "prompt_template": "{question}\nThink step by step, and end with '#### ' and the "
            "number that is the answer.",
        },
        "rollout": {"prompts_per_step": 32, "max_prompt_tokens": 320, "max_new_tokens": 768},
        "optimizer": {"warmup_steps": 5},
        "eval": {"questions": 1319, "batch_size": 256, "every": 25},
    },
}


def published(task: str, checkpoint: str, **own: dict[str, Any]) -> ml_collections.ConfigDict:
    """Returns the configuration of a published model on 'gsm_symbolic' or 'gsm8k'.

    Args:
      task: the questions.
      checkpoint: directory of the model's files, or hf:ORG/NAME.
      **own: {section: {field: value}}, beside the shared fields or in their place.
    """
    config = ml_collections.ConfigDict(_SHARED)
    config.update(_TASKS[task])
    config.update({"model": {"checkpoint": checkpoint}, "env": {"task": task}})
    config.update(own)
    return config
