"""Flax models and the one forward pass that learner and sampler share.

::

    config.json, families/                               Tokens
          |                                                |
     ModelConfig --> arrays.py --> parameters --> transformer.py  <-->  KV cache
                     one row each  params.py               |
                                                        hidden --> head --> logprobs.py
                                                                    (over those of truncation.py)

Read first: config.py (fields in which families differ), families/ (a file each), arrays.py (every
array of a model), transformer.py (`hidden_states`), decoder_layer.py (one layer: attention.py or
latent_attention.py, then feed_forward.py or moe.py with router.py). parallel/ runs them on a mesh,
hf/ reads and writes checkpoints.

Imports `quant` and `kernels`, nothing of reinforcement learning.

Not done: biases of dense MLPs, layers of different shapes other than leading dense layers in a
model with experts.
"""

from fp8rl_jax.models.arrays import LINEAR_LAYERS, param_shapes
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.divergence import token_divergences
from fp8rl_jax.models.kv_cache import (
    PAGE,
    KVCache,
    PagedCache,
    init_cache,
    init_paged_cache,
    least_pages,
    pages_of,
)
from fp8rl_jax.models.logprobs import (
    drawn_logprobs,
    head_logits,
    logprobs_of_logits,
    output_head,
    scaled_logits,
    token_logprobs,
)
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE, Parallel
from fp8rl_jax.models.parallel.specs import param_shardings, weight_specs
from fp8rl_jax.models.params import (
    array_checksums,
    chained,
    checksum,
    for_decoding,
    init_params,
    init_probes,
    init_scaling,
    kernel_formats,
    quantize_params,
    trainable_params,
    update_scaling,
    weight_health,
)
from fp8rl_jax.models.rope import rope_tables
from fp8rl_jax.models.taps import REMAT, Swap
from fp8rl_jax.models.tokens import Tokens
from fp8rl_jax.models.transformer import ForwardOutput, forward, hidden_states
from fp8rl_jax.models.truncation import Draws, Truncation
