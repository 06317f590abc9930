"""GRPO on Moonlight-16B-A3B: latent attention, 64 experts of which a token uses 6, 2 shared.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/moonlight_16b.py --config.model.checkpoint=DIR
           with the files of moonshotai/Moonlight-16B-A3B-Instruct in DIR
Mesh:      8 GPUs of 141 GB: fsdp 2, expert 4. Compiled without them, a train step needs 60.8 GiB
           of each (fp8rl plan --compile), and the sampler's weights, before it, 5.5 GiB
Expected:  not run by us (it needs the GPUs); published as a recipe, without figures.
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/Moonlight-16B-A3B-Instruct",
        run={"dir": "runs/moonlight_16b", "steps": 400},
        mesh={"fsdp": 2, "expert": 4, "data": 1},
        rollout={"prompts_per_step": 32},
        learner={"tokens_per_batch": 10_240},
    )
