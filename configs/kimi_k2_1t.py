"""GRPO on Kimi-K2, 1T: latent attention, 384 experts of which a token uses 8, 1 shared.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/kimi_k2_1t.py --config.model.checkpoint=DIR
           with the files of moonshotai/Kimi-K2-Instruct in DIR, and a tokenizer.json made of its
           tiktoken.model
Mesh:      256 GPUs of 141 GB: data 2, fsdp 8, expert 16, moments in the host's memory (70 GiB for
           each GPU). Compiled without them, a train step needs 101.1 GiB of each (fp8rl plan
           --compile), and the sampler's weights, before it, 72.7 GiB. Expert exchange goes over
           two hosts, so a step is bound by the network between them (fp8rl plan)
Expected:  not run by us (it needs the GPUs).
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/Kimi-K2-Instruct",
        run={"dir": "runs/kimi_k2_1t", "steps": 200},
        mesh={"fsdp": 8, "expert": 16, "data": 2},
        rollout={"prompts_per_step": 256},
        algo={"num_minibatches": 16},
        learner={"offload": "moments"},
    )
