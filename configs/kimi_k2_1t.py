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

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/kimi_k2_1t", "steps": 200, "checkpoint_every": 50},
            "model": {"checkpoint": "checkpoints/Kimi-K2-Instruct"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 8, "expert": 16, "data": 2},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {"task": "gsm_symbolic", "reward": "math_equal", "train_questions": 16_384},
            "rollout": {
                "prompts_per_step": 256,
                "group_size": 16,
                "max_prompt_tokens": 512,
                "max_new_tokens": 2048,
            },
            "algo": {"clip_high": 0.28, "num_minibatches": 16},
            "learner": {"gradient_accumulation_steps": 1, "remat": "full", "offload": "moments"},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1024, "every": 50},
        }
    )
