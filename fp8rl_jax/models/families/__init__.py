"""The families of models, a file each: names, rules, config.json, published sizes.

A new family is a file like these and a line here (docs/guides/family.md).
"""

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.deepseek import DEEPSEEK_V3
from fp8rl_jax.models.families.family import Family
from fp8rl_jax.models.families.gemma import GEMMA3
from fp8rl_jax.models.families.glm import GLM4_MOE
from fp8rl_jax.models.families.gpt_oss import GPT_OSS
from fp8rl_jax.models.families.llama import LLAMA, MISTRAL
from fp8rl_jax.models.families.olmo import OLMO2
from fp8rl_jax.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

# From plain to special: of the families that a configuration is like, the last is the nearest.
FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GLM4_MOE,
    GPT_OSS,
    GEMMA3,
    OLMO2,
    DEEPSEEK_V3,
)
# {model_type of a config.json: its family}.
BY_TYPE = {name: family for family in FAMILIES for name in (family.model_type, *family.aliases)}


def nearest(config: ModelConfig) -> Family:
    """Returns the family whose marks a configuration has, even if it breaks the family's rules."""
    return next(family for family in reversed(FAMILIES) if family.is_like(config))
