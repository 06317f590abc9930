"""OLMo 2 (arXiv:2501.00656).

The results of attention and MLP are normed, and not what they read; QK-norm runs over the whole
width of queries and keys.
"""

from functools import partial

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.family import Family, Values

_RULES: Values = {
    "qk_norm": True,
    "qk_norm_by_head": False,
    "pre_norms": False,
    "sandwich_norms": True,
}
_normed = partial(ModelConfig, **_RULES)
_olmo2 = partial(_normed, 100_352, rope_theta=5e5)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    is_like=lambda config: not config.pre_norms,
    rules=_RULES | {"num_experts": 0},
    absent={"rms_norm_eps": 1e-5},
    presets={
        "olmo2_1b": _olmo2(2048, 8192, 16, 16, 16, 128),
        "olmo2_7b": _olmo2(4096, 11_008, 32, 32, 32, 128),
        "olmo2_13b": _olmo2(5120, 13_824, 40, 40, 40, 128),
        "olmo2_32b": _olmo2(5120, 27_648, 64, 40, 8, 128),
    },
)
