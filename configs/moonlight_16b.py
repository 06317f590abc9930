"""GRPO on Moonlight-16B-A3B: latent attention, 64 experts of which a token uses 6, 2 shared.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/moonlight_16b.py --config.model.checkpoint=DIR
           with the files of moonshotai/Moonlight-16B-A3B-Instruct in DIR
Mesh:      8 GPUs of 141 GB: fsdp 2, expert 4. Compiled without them, a train step needs 60.8 GiB
           of each (fp8rl plan --compile), and the sampler's weights, before it, 5.5 GiB
Expected:  not run by us (it needs the GPUs); published as a recipe, without figures.
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/moonlight_16b", "steps": 400, "checkpoint_every": 50},
            "model": {"checkpoint": "checkpoints/Moonlight-16B-A3B-Instruct"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 2, "expert": 4, "data": 1},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {"task": "gsm_symbolic", "reward": "math_equal", "train_questions": 16_384},
            "rollout": {
                "prompts_per_step": 32,
                "group_size": 16,
                "max_prompt_tokens": 512,
                "max_new_tokens": 2048,
            },
            "algo": {"clip_high": 0.28, "num_minibatches": 1},
            "learner": {"tokens_per_batch": 10_240, "remat": "full"},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1024, "every": 50},
        }
    )
