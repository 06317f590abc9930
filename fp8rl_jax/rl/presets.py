"""Presets: the fields of section `algo` that make a published algorithm."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published algorithm.

    Attributes:
      source: the paper.
      formula: the loss of a response's token t, and how tokens are aggregated.
      fields: values in section `algo`; other `PRESET_FIELDS` get their defaults.
    """

    source: str
    formula: str
    fields: dict[str, Any]


_CLIP = "-min(r_t A, clip(r_t, 1 - low, 1 + high) A)"
_MEAN_OF_MEANS = {"loss_aggregation": "seq_mean_token_mean"}  # over tokens, then over responses
_GROUP = "A = (r - mean of the group) / (std of the group + 1e-4)"

# Values of algo.preset: name -> paper, formula, and the fields that it sets.
PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "DeepSeekMath, arXiv:2402.03300, equations 3 and 4",
        f"{_CLIP}; {_GROUP}; mean over a response's tokens, then over responses",
        _MEAN_OF_MEANS,
    ),
    "dr_grpo": Preset(
        "Understanding R1-Zero-like training, arXiv:2503.20783, section 3",
        f"{_CLIP}; A = r - mean of the group; sum over tokens / (responses x longest length)",
        {"scale": "none", "loss_aggregation": "seq_mean_token_sum_norm"},
    ),
    "dapo": Preset(
        "DAPO, arXiv:2503.14476, equations 8 to 13",
        f"{_CLIP}; {_GROUP}; mean over all tokens; groups of equal rewards are sampled again; "
        "responses near the length limit lose reward",
        {"clip_high": 0.28, "dynamic_sampling": True, "overlong_buffer": -1},
    ),
    "gspo": Preset(
        "GSPO, arXiv:2507.18071, equations 5 to 7",
        f"-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean of log r_t); {_GROUP}; mean over "
        "a response's tokens, then over responses",
        {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, **_MEAN_OF_MEANS},
    ),
    "rloo": Preset(
        "Back to basics, arXiv:2402.14740",
        "-A log p_t; A = r - mean of the other responses; sum over a response's tokens, mean over "
        "responses",
        {
            "baseline": "leave_one_out",
            "scale": "none",
            "loss": "reinforce",
            "loss_aggregation": "seq_mean_token_sum",
        },
    ),
    "reinforce_pp": Preset(
        "REINFORCE++, arXiv:2501.03262",
        f"{_CLIP}; A_t = r - 0.01 x sum from t on of (log p - log p_reference), then minus mean, "
        "over std of all tokens; mean over all tokens",
        {"baseline": "none", "scale": "token_std", "kl_coef": 0.01, "kl_in": "reward"},
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++, arXiv:2501.03262",
        f"{_CLIP}; A = r - mean of the group, then minus mean, over std of all tokens; mean over "
        "all tokens; the divergence from the reference in the loss (k2)",
        {"scale": "token_std", "kl_coef": 0.01, "kl_estimator": "k2"},
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv:2506.13585, equations 4 and 5; cap of ScaleRL, arXiv:2510.13786",
        f"-clip(r_t, 0, 5) A log p_t, no gradient through r_t; {_GROUP}; mean over all tokens",
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    ),
    "lite_ppo": Preset(
        "Tricks or traps, arXiv:2508.08221",
        f"{_CLIP}; A = (r - mean of the group) / std of the batch; mean over all tokens",
        {"scale": "batch_std"},
    ),
    "sapo": Preset(
        "SAPO, arXiv:2511.20347",
        f"-A (4 / tau) sigmoid(tau (r_t - 1)); {_GROUP}; mean over a response's tokens, then over "
        "responses",
        {"loss": "sapo", **_MEAN_OF_MEANS},
    ),
    "gmpo": Preset(
        "GMPO, arXiv:2507.20673",
        f"-A exp(mean of clipped log r_t); {_GROUP}; mean over responses",
        {"loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4, **_MEAN_OF_MEANS},
    ),
}

# Fields that a preset sets, to the preset's value or to the default.
PRESET_FIELDS = (
    "baseline",
    "scale",
    "loss",
    "clip_low",
    "clip_high",
    "loss_aggregation",
    "kl_coef",
    "kl_estimator",
    "kl_in",
    "dynamic_sampling",
    "overlong_buffer",
    "overlong_penalty",
    "mask_truncated",
)
