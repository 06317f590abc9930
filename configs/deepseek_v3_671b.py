"""GRPO on DeepSeek-V3, 671B: latent attention, 256 experts of which a token uses 8, 1 shared.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/deepseek_v3_671b.py --config.model.checkpoint=DIR
           with the files of deepseek-ai/DeepSeek-V3 in DIR
Mesh:      128 GPUs of 141 GB: fsdp 8, expert 16, moments in the host's memory (54 GiB for each
           GPU). Compiled without them, a train step needs 90.4 GiB of each (fp8rl plan --compile),
           and the sampler's weights, before it, 56.0 GiB. Expert exchange goes over two hosts,
           so a step is bound by the network between them (fp8rl plan)
Expected:  not run by us (it needs the GPUs). Its multi-token prediction layer is not read.
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/DeepSeek-V3",
        run={"dir": "runs/deepseek_v3_671b", "steps": 200},
        mesh={"fsdp": 8, "expert": 16, "data": 1},
        rollout={"prompts_per_step": 128},
        algo={"num_minibatches": 8},
        learner={"offload": "moments"},
    )
