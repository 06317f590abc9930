"""GRPO on Llama-3.1-8B-Instruct on word problems.

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/llama3p1_8b.py --config.model.checkpoint=DIR
           with the files of meta-llama/Llama-3.1-8B-Instruct in DIR
Mesh:      8 GPUs of 80 GB: fsdp 8
Expected:  not run by us (it needs the GPUs); published after 4,000 steps on a mathematics
           set: validation accuracy 0.616 in BF16, 0.613 in FP8 end to end, 0.586 with FP8
           generation alone (case 1 without a correction).
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm_symbolic",
        "checkpoints/Llama-3.1-8B-Instruct",
        run={"dir": "runs/llama3p1_8b", "steps": 4000},
        mesh={"fsdp": 8, "data": 1},
        rollout={"prompts_per_step": 32},
        learner={"tokens_per_batch": 20_480},
        optimizer={"learning_rate": 3e-7},
    )
