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

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {
            "run": {"dir": "runs/deepseek_v3_671b", "steps": 200, "checkpoint_every": 50},
            "model": {"checkpoint": "checkpoints/DeepSeek-V3"},
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "mesh": {"fsdp": 8, "expert": 16, "data": 1},
            "data": {"tokenizer": "checkpoint", "chat": True},
            "env": {"task": "gsm_symbolic", "reward": "math_equal", "train_questions": 16_384},
            "rollout": {
                "prompts_per_step": 128,
                "group_size": 16,
                "max_prompt_tokens": 512,
                "max_new_tokens": 2048,
            },
            "algo": {"clip_high": 0.28, "num_minibatches": 8},
            "learner": {"gradient_accumulation_steps": 1, "remat": "full", "offload": "moments"},
            "optimizer": {"learning_rate": 1e-6, "warmup_steps": 10, "b2": 0.95},
            "sft": {"steps": 0},
            "eval": {"questions": 1024, "every": 50},
        }
    )
