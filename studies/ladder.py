"""The ladder of `python -m studies scale`: models that differ in experts, depth or router alone.

A token of m8, m16 and m32 uses two experts of width 128, as many weights as the dense MLP of d8, so
that rungs differ in how the experts are chosen and not in how much is computed. All widths are
multiples of 128: no block is smaller than in a large model.

  d4, d8, d16      dense, 4 (width 128), 8 and 16 layers (width 256)
  m8, m16, m32     8 layers, 8, 16 and 32 experts with a softmax router
  s16              8 layers, 16 experts, sigmoid router with a correction (DeepSeek-V3's)
  m32x16           16 layers, 32 experts

Command:   python -m studies scale --config studies/ladder.py --seeds=0,1,2
           one rung alone trains by `fp8rl train --config studies/ladder.py:m8`
Expected:  docs/studies.md
"""

import ml_collections

# width, layers, experts, router
_RUNGS = {
    "d4": (128, 4, 0, "softmax"),
    "d8": (256, 8, 0, "softmax"),
    "d16": (256, 16, 0, "softmax"),
    "m8": (256, 8, 8, "softmax"),
    "m16": (256, 8, 16, "softmax"),
    "m32": (256, 8, 32, "softmax"),
    "s16": (256, 8, 16, "sigmoid"),
    "m32x16": (256, 16, 32, "softmax"),
}


def get_config(rung="m8"):
    if rung not in _RUNGS:
        raise ValueError(f"no rung {rung!r}: write one of {', '.join(_RUNGS)}")
    width, layers, experts, router = _RUNGS[rung]
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    # An option of qwen3_moe, whose other rules the default family has too.
    sigmoid = {"family": "qwen3_moe", "family_options": {"scoring_func": router}}
    return ml_collections.ConfigDict(
        {
            "run": {"dir": f"runs/study_scale/{rung}", "steps": 160, "checkpoint_every": 40},
            "model": {
                "hidden_size": width,
                "intermediate_size": 256,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 32,
                "num_key_value_heads": width // 64,
                "head_dim": 32,
                **(mixture if experts else {}),
                **(sigmoid if router == "sigmoid" else {}),
            },
            "precision": {"rollout": "fp8", "learner": "fp8"},
            "env": {"task": "studies.running_sums:rows"},
            "rollout": {
                "prompts_per_step": 8,
                "group_size": 8,
                "max_prompt_tokens": 34,
                "max_new_tokens": 64,
            },
            "algo": {"scale": "none"},
            "optimizer": {"learning_rate": 1e-4, "warmup_steps": 5},
            "sft": {
                "steps": 400,
                "questions": 2048,
                "batch_size": 32,
                "learning_rate": 1e-3,
                "evaluations": 1,
            },
            "eval": {"questions": 128, "batch_size": 64, "every": 80},
        }
    )
