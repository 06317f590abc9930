"""GRPO on Qwen3-235B-A22B, the shapes of the largest published Qwen3 run.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_235b_a22b.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-235B-A22B in DIR
Mesh:      64 GPUs of 141 GB: fsdp 8, expert 8. Compiled without them, a train step needs 101.1 GiB
           of each (fp8rl plan --compile), and the sampler's weights, before it, 35.2 GiB
Expected:  not run by us (it needs the GPUs); published: FP8 on both sides keeps lowering clip
           fraction and difference at this size.
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/Qwen3-235B-A22B",
        run={"dir": "runs/qwen3_235b_a22b", "steps": 200},
        mesh={"fsdp": 8, "expert": 8, "data": 1},
        rollout={"prompts_per_step": 64},
        learner={"tokens_per_batch": 2560},
    )
