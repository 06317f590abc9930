"""What a decode step of the sampler reads and computes, and the time that follows: a prediction.

A step gives each of B sequences a token. It reads, once each, the weights of the layers, those of
the output head, and the keys and values of B sequences; of routed experts those that some token
chose, if tokens choose evenly: of E experts, k a token, ``1 - (1 - k / E)^tokens``. It computes 2
FLOPs for each parameter that a token uses, and attention over what is in the cache. Layers,
attention and head follow each other; each takes the longer of its bytes over the memory's bandwidth
and its FLOPs over the peak (Williams et al., "Roofline", 2009), with the constants and assumed
efficiencies of `step_cost`.

Left out: prefill, the choice of tokens, activations and their quantisation, kernels' launches,
experts' exchange between devices.
"""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from fp8rl_jax.models import PAGE, ModelConfig
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout.memory_plan import RolloutPlan
from fp8rl_jax.training.learner_plan import weight_bytes
from fp8rl_jax.training.step_cost import EFFICIENCY, Gpu, attention_features


def decode_seconds(
    model: ModelConfig,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    plan: RolloutPlan,
    sequences: int,
    length: int,
    gpu: Gpu,
) -> dict[str, float]:
    """{part of the model: seconds of a decode step} on each device; their sum is the step's.

    Args:
      model, recipe: of the sampler.
      mesh: without columns over `tensor`, as the plan.
      plan: of the same sampler, for the size of its pages.
      sequences: of a device.
      length: tokens that a sequence has in the cache, on average.
      gpu: one of GPUS.
    """
    _, own, _ = weight_bytes(model, recipe, mesh)
    counts = parameter_counts(model)
    experts = 0.0
    if model.num_experts:
        missed = 1 - model.num_experts_per_tok / model.num_experts
        experts = own.experts * (1 - missed ** (sequences * mesh.shape["expert"]))
    layers = own.dense + experts
    head = own.tables if model.tie_word_embeddings else own.tables / 2  # no row of the embedding
    cache = sequences * length * plan.page / PAGE
    peak = gpu.fp8 if recipe.quantized and not recipe.fake else gpu.bf16
    attended = sequences * length * model.num_hidden_layers * attention_features(model)

    def longer(size: float, products: float, peak: float) -> float:
        return max(size / (EFFICIENCY["memory"] * gpu.hbm), 2 * products / peak)

    rate = EFFICIENCY["products"]
    return {
        "layers": longer(layers, (counts.active - counts.tables) * sequences, rate * peak),
        "attention": longer(cache, attended, EFFICIENCY["attention"] * gpu.bf16),
        "head": longer(head, model.vocab_size * model.hidden_size * sequences, rate * gpu.bf16),
    }
