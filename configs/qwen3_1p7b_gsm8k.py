"""GRPO on Qwen3-1.7B with GSM8K: a run whose result others have published, as a check of ours.

Rewards are 1 for the right number and 0 else; thinking is off. The data set is downloaded at the
first start, or prepared beforehand (docs/data.md).

Precision: FP8 on both sides; bf16, fp8_linear and case1 to case4 as FILE:CASE (docs/usage.md)
Command:   fp8rl train --config configs/qwen3_1p7b_gsm8k.py --config.model.checkpoint=DIR
           with the files of Qwen/Qwen3-1.7B in DIR
Mesh:      4 GPUs of 80 GB: fsdp 4
Expected:  not run by us (it needs the GPUs and the weights). Published for 100 steps on this model
           and data set, in other precisions and with their own batches: mean reward 0.8077
           (MaxText, pull request 4015), within NeMo-RL's band of 0.804 to 0.820.
"""

from fp8rl_jax.configs._published import published


def get_config():
    return published(
        "gsm8k",
        "checkpoints/Qwen3-1.7B",
        run={"dir": "runs/qwen3_1p7b_gsm8k"},
        mesh={"fsdp": 4, "data": 1},
        data={"chat_options": {"enable_thinking": False}},
        rollout={"group_size": 16},
        learner={"tokens_per_batch": 34_816},
        optimizer={"learning_rate": 1e-6},
    )
