"""GRPO on Qwen3-8B-Base with DAPO's bounds: 32 prompts of 16 responses, one update a rollout.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_8b.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-8B-Base in DIR
Mesh:      8 GPUs of 80 GB: fsdp 8
Expected:  not run by us (it needs the GPUs); published: FP8 rollout follows BF16 in accuracy
           when importance weights correct it, and not without; here case 4 needs none. The
           published responses have 20,480 tokens.
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/Qwen3-8B-Base",
        run={"dir": "runs/qwen3_8b", "steps": 400},
        mesh={"fsdp": 8, "data": 1},
        rollout={"prompts_per_step": 32, "max_new_tokens": 4096},
        learner={"tokens_per_batch": 18_432},
    )
