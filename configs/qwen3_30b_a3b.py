"""GRPO on Qwen3-30B-A3B, 128 experts of which a token uses 8.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_30b_a3b.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-30B-A3B in DIR
Mesh:      16 GPUs of 141 GB: fsdp 4, expert 4. Compiled without them, a train step needs 51.0 GiB
           of each (fp8rl plan --compile), and the sampler's weights, before it, 8.8 GiB
Expected:  not run by us (it needs the GPUs); published: accuracy curves of FP8 and BF16 match.
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/Qwen3-30B-A3B",
        run={"dir": "runs/qwen3_30b_a3b", "steps": 400},
        mesh={"fsdp": 4, "expert": 4, "data": 1},
        rollout={"prompts_per_step": 32},
        learner={"tokens_per_batch": 5120},
    )
