"""Llama 3 (arXiv:2407.21783) and models of its architecture, such as SmolLM2; Mistral 7B
(arXiv:2310.06825), which has a window in every layer.

Files of type 'mistral' without a window (from version 0.2 on) are Llama's, and written as such.
"""

from functools import partial

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.family import Family

# Presets in all families: vocabulary, hidden size, width of the MLP, layers, query heads, key and
# value heads, width of a head.
_llama = partial(ModelConfig, qk_norm=False, rms_norm_eps=1e-5)
_stretched = partial(_llama, 128_256, rope_theta=5e5, rope_type="llama3")
_small = partial(_stretched, rope_factor=32.0, tie_word_embeddings=True)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    is_like=lambda config: True,
    presets={
        "llama3p1_8b": _stretched(4096, 14_336, 32, 32, 8, 128, rope_factor=8.0),
        "llama3p2_1b": _small(2048, 8192, 16, 32, 8, 64),
        "llama3p2_3b": _small(3072, 8192, 28, 24, 8, 128),
        "smollm2_135m": _llama(
            *(49_152, 576, 1536, 30, 9, 3, 64), rope_theta=1e5, tie_word_embeddings=True
        ),
    },
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    is_like=lambda config: config.sliding_window > 0,
    mark="sliding_window",
    options={"sliding_window": 4096},
    absent={"num_key_value_heads": 8, "sliding_window": 4096},
    presets={
        "mistral_7b": _llama(32_768, 4096, 14_336, 32, 32, 8, 128, rope_theta=1e6),
        "mistral_7b_v0p1": _llama(32_000, 4096, 14_336, 32, 32, 8, 128, sliding_window=4096),
    },
)
