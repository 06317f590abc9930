"""Predicts the times of a train step and a decode step by rooflines, and by what compiled programs
do besides: launches, instructions, and bytes between products.

FLOPs and bytes are counted by formulas (`cost_analysis` of a compiled program does not see our
kernels) and divided by the figures of gpus.py. A device's kernels follow each other; its transfers
may overlap with them or not. Left out: waiting for the slowest device, rewards.

Train step: for a token of a layer, a linear layer of P parameters takes 2 P FLOPs in the forward
pass, as much again where the layer is recomputed, and 2 P each for the gradients of its input and
its weight (Kaplan et al., arXiv:2001.08361, 2.1). Attention of T tokens with H heads of Dh takes
2 * 2 * H * Dh * T / 2 forward, and 3.5 times that backward: 2.5 for the gradients (Dao,
arXiv:2307.08691, 4.1), and another forward pass, by a faster kernel.

Decode step: each of B sequences gets a token. The step reads, once each, the weights of layers and
output head, the keys and values of B sequences, and the routed experts that some token chose: the
share ``1 - (1 - k / E)^tokens`` of E experts, if each token chooses k of them evenly. It computes 2
FLOPs for each parameter that a token uses, and attention over what is in the cache. Layers,
attention and head follow each other; each takes the longer of its bytes over the rate at which its
kernels read and its FLOPs over the peak (Williams et al., "Roofline", 2009). Attention is bound by
the instructions of its loop, too. Each other kernel takes DECODE_KERNEL, and each launch
DECODE_GAP. Left out as well: prefill, sampling, the exchange of experts' rows.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from fp8rl_jax.config.adapters import adapted_shapes
from fp8rl_jax.models import PAGE, ModelConfig
from fp8rl_jax.models.masters import frozen, trained
from fp8rl_jax.models.parallel.experts import passes_of
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.models.stacks import layer_windows
from fp8rl_jax.plan.bytes import (
    WeightBytes,
    learner_weight_bytes,
    page_bytes,
    weight_bytes,
    weight_shapes,
)
from fp8rl_jax.plan.gpus import (
    BETWEEN,
    DECODE_GAP,
    DECODE_KERNEL,
    DECODE_LAUNCHES,
    DECODE_MEMORY,
    DECODE_RATES,
    EFFICIENCY,
    HOST_LINK,
    INSTRUCTIONS,
    ISSUED,
    LAUNCH,
    MULTIPROCESSORS,
    NETWORK,
    NVLINK,
    STEP_LAUNCHES,
    TRAIN_LAUNCHES,
    Gpu,
)
from fp8rl_jax.plan.learner import LearnerPlan, Workload
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.quant import Recipe
from fp8rl_jax.sharding import MESH_AXES

_ATTENTION_BACKWARD = 3.5  # FLOPs over those of the forward pass
_ADAM_BYTES = 28  # per parameter: reads master, two moments, gradient; writes the first three


@dataclasses.dataclass(frozen=True)
class StepCost:
    """FLOPs and traffic of each device in a train step, and the least times that they take.

    Attributes:
      flops: {part of the model: FLOPs}.
      transfers: {'mesh axis: what a device receives over it': (bytes from devices of its host,
        bytes from other hosts)}.
      seconds: {part of the device's own work: seconds}.
      moving: {transfer: seconds}.
      tokens: number of the update's tokens, on all devices.
    """

    flops: dict[str, float]
    transfers: dict[str, tuple[float, float]]
    seconds: dict[str, float]
    moving: dict[str, float]
    tokens: int

    @property
    def least_seconds(self) -> float:
        """Seconds if transfers overlap with the device's work."""
        return max(sum(self.seconds.values()), *self.moving.values())

    @property
    def most_seconds(self) -> float:
        """Seconds if nothing overlaps."""
        return sum(self.seconds.values()) + sum(self.moving.values())


def attention_features(model: ModelConfig) -> int:
    """Counts a (query, key) pair's multiplications over all heads: q k and probability times v."""
    if model.latent:
        return model.num_attention_heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
    return 2 * model.num_attention_heads * model.head_dim


def keys_seen(model: ModelConfig, lengths: np.ndarray) -> np.ndarray:
    """Returns how many keys the last query of sequences of these lengths sees, mean over layers."""
    windows = layer_windows(model)
    return lengths if windows is None else np.minimum(lengths[..., None], windows).mean(-1)


def _pairs_left(model: ModelConfig, lengths: np.ndarray) -> np.ndarray:
    """Returns the share of the pairs of a query and a key that windows leave, mean over layers."""
    windows = layer_windows(model)
    if windows is None:
        return np.ones_like(lengths)
    n = lengths[..., None]
    w = np.minimum(n, windows)
    return ((w * (w + 1) / 2 + (n - w) * w) / np.maximum(n * (n + 1) / 2, 1)).mean(-1)


def step_flops(
    model: ModelConfig, work: Workload, tensor: int = 1, adapters: bool = False
) -> dict[str, float]:
    """Returns {part of the model: FLOPs of a device} in an update.

    Args:
      model: shapes of the model.
      work: work of a device; all its tokens count, padding too.
      tensor: number of devices that share each layer by columns and heads.
      adapters: whether weights have no gradients; the thin products of adapters are left out.
    """
    counts = parameter_counts(model)
    linear = counts.active - counts.tables
    passes = (4 if work.remat == "full" else 3) + work.counts - adapters
    tokens = work.tokens * work.micro_batches
    length = work.prompt + work.response
    attended = tokens * length / 2 * model.num_hidden_layers * attention_features(model)
    attended *= float(_pairs_left(model, np.asarray(length, np.float64)))
    again = work.remat == "full" and model.latent
    head = model.vocab_size * model.hidden_size  # forward, logits again, two gradients
    return {
        "linear layers": 2 * linear * passes * tokens / tensor,
        "attention": 2 * attended * (again + 1 + work.counts + _ATTENTION_BACKWARD) / tensor,
        "output head": 2 * head * 4 * tokens * work.response / length / tensor,
    }


def useful_flops(
    model: ModelConfig, lengths: np.ndarray, responses: float, shared: np.ndarray | int = 0
) -> float:
    """Returns the FLOPs that an update needs, without padding and what is recomputed: the numerator
    of MFU (Chowdhery et al., arXiv:2204.02311, appendix B), three times the forward pass.

    Args:
      model: shapes of the model.
      lengths: (B,), tokens of each sequence.
      responses: tokens of all responses; only these pass through the output head.
      shared: (B,), the first tokens of each sequence that another one computes.
    """
    lengths = np.asarray(lengths, np.float64)
    counts = parameter_counts(model)
    linear = (counts.active - counts.tables) * (lengths - shared).sum()

    def pairs_of(lengths: np.ndarray) -> np.ndarray:
        return lengths * (lengths + 1) / 2 * _pairs_left(model, lengths)

    shared = shared * np.ones_like(lengths)
    pairs = (pairs_of(lengths) - pairs_of(shared)).sum() * model.num_hidden_layers
    head = model.vocab_size * model.hidden_size * responses
    return 3 * 2 * float(linear + pairs * attention_features(model) + head)


def same_host(mesh: Mesh | AbstractMesh, axis: str, hosts: int) -> int:
    """Returns how many of the devices along an axis are on one host.

    Devices are numbered host by host, and the last axis of the mesh varies fastest.
    """
    stride = math.prod(mesh.shape[name] for name in MESH_AXES[MESH_AXES.index(axis) + 1 :])
    host = mesh.size // hosts
    return max(min(mesh.shape[axis], host // stride), 1)


def _exchanged(model: ModelConfig, work: Workload, devices: int) -> list[tuple[str, str, float]]:
    """Lists what an update exchanges between tokens and experts (models/parallel/experts.py): (mesh
    axis, what is received, bytes). A row goes to all devices of the axis; its k results come back
    from those that hold its experts."""
    width = model.hidden_size
    chosen = model.num_experts_per_tok
    tokens = work.tokens * work.micro_batches * (model.num_hidden_layers - model.dense_layers)
    again = work.remat == "full" or passes_of(work.tokens, devices) > 1  # passes are recomputed too
    forward = 1 + again + work.counts
    row = width * (1 + 4 / 128) + 4 * chosen  # FP8, scales, choices
    gathered = tokens * (devices - 1) * (forward * row + 2 * width)  # bf16 for wgrad
    results = tokens * chosen * 4 * width * (devices - 1) / devices
    gradients = results + tokens * (devices - 1) * 4 * width
    return [
        ("expert", "rows to their experts", gathered),
        ("expert", "results of the experts", forward * results),
        ("expert", "gradients of results and of rows", gradients),
    ]


def _columns(model: ModelConfig, work: Workload, devices: int) -> float:
    """Returns the bytes over `tensor`: forward, inputs of o and down in FP8 and their outputs in
    bf16; backward, two float32 all-reduces, two float32 reduce-scatters, and the inputs again."""
    tokens = work.tokens * work.micro_batches * model.num_hidden_layers
    inputs = model.num_attention_heads * model.head_dim + model.intermediate_size
    forward = inputs * (1 + 4 / 128) + 2 * 2 * model.hidden_size
    backward = 2 * 2 * 4 * model.hidden_size + 4 * inputs + inputs
    passes = (2 if work.remat == "full" else 1) + work.counts
    return tokens * (passes * forward + backward) * (devices - 1) / devices


def step_transfers(
    model: ModelConfig,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    work: Workload,
    hosts: int,
    trained: WeightBytes | None = None,
) -> dict[str, tuple[float, float]]:
    """Returns `StepCost.transfers` of an update.

    Of n devices along an axis m are on one host: n - m of n - 1 shares come from other hosts.
    `trained` are the bytes of the trained arrays, None for those of all parameters.
    """
    masters, weights = learner_weight_bytes(model, recipe, mesh)
    times = work.micro_batches
    reads = 2 + work.counts  # forward, and backward with what it recomputes
    trained = trained or masters
    gradients = trained.dense + trained.experts + trained.tables
    arrays = [  # of which a device receives all but its own part
        ("fsdp", "quantised weights, gathered", times * reads * (weights.dense + weights.experts)),
        ("fsdp", "embedding and head, gathered", weights.tables + masters.tables),
        ("fsdp", "gradients, reduce-scattered", times * gradients),
        ("data", "gradients, all-reduced", times * 2 * gradients),
        (
            "expert",
            "gradients of what is no expert, all-reduced",
            times * 2 * (gradients - trained.experts),
        ),
    ]
    received = [
        *((a, name, size * (mesh.shape[a] - 1) / mesh.shape[a]) for a, name, size in arrays),
        *_exchanged(model, work, mesh.shape["expert"]),
        ("tensor", "activations and their gradients", _columns(model, work, mesh.shape["tensor"])),
    ]
    transfers = {}
    for axis, name, size in received:
        if (count := mesh.shape[axis]) > 1:
            between = size * (count - same_host(mesh, axis, hosts)) / (count - 1)
            transfers[f"{axis}: {name}"] = size - between, between
    return transfers


def _kind(model: ModelConfig) -> str:
    if model.latent:
        return "latent"
    if model.num_experts:
        return "experts"
    return "sandwich norms" if model.sandwich_norms else "dense"


def layer_features(model: ModelConfig) -> int:
    """Counts the features that a layer's operations between products read or write: residuals and
    norms, queries, keys and values, attention's result, gate, up and their product."""
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    width = model.intermediate_size
    if model.num_experts:
        width = model.moe_intermediate_size * model.num_experts_per_tok
    return 2 * model.hidden_size + heads * model.head_dim + 3 * width


def _rate(gpu: Gpu, fp8: bool) -> float:
    """Returns the FLOP/s of products of linear layers."""
    return EFFICIENCY["FP8 products"] * gpu.fp8 if fp8 else EFFICIENCY["bf16 products"] * gpu.bf16


def _head_rate(gpu: Gpu, recipe: Recipe) -> float:
    """Returns the FLOP/s of products of the output head."""
    if recipe.for_head().compute_dtype == jnp.float32:
        return EFFICIENCY["float32 products"] * gpu.float32
    return _rate(gpu, False)


def step_cost(planned: Planned, plan: LearnerPlan) -> StepCost:
    """Returns the cost of a train step on each device.

    Args:
      planned: configuration and devices.
      plan: memory plan of its train step.
    """
    model = planned.resolved.model
    recipe = planned.resolved.learner_recipe
    mesh = planned.mesh
    gpu = planned.gpu
    work = plan.work
    _, weights = learner_weight_bytes(model, recipe, mesh)
    shapes = adapted_shapes(planned.config, model)
    changed = weight_bytes(trained(shapes), mesh)
    flops = step_flops(model, work, mesh.shape["tensor"], frozen(shapes) is not None)
    transfers = step_transfers(model, recipe, mesh, work, planned.hosts, changed)
    fp8 = recipe.quantized and not recipe.fake
    # fprop and remat in FP8; dgrad and wgrad too, if gradients are quantised.
    share = fp8 * (1.0 if recipe.backward == "fp8" else 0.5)
    per_flop = share / _rate(gpu, fp8) + (1 - share) / _rate(gpu, False)
    layers = work.micro_batches * model.num_hidden_layers
    features = BETWEEN * layer_features(model) / mesh.shape["tensor"]
    reads = (2 + work.counts) * (weights.dense + weights.experts)  # in a micro-batch
    reads += changed.dense + changed.experts
    moved = _ADAM_BYTES // 4 * changed.stored + work.micro_batches * (2 * reads + changed.stored)
    inside, between = map(sum, zip((0, 0), *transfers.values(), strict=True))
    memory = EFFICIENCY["memory"] * gpu.hbm
    seconds = {
        "linear layers": flops["linear layers"] * per_flop,
        "attention": flops["attention"] / (EFFICIENCY["attention"] * gpu.bf16),
        "output head": flops["output head"] / _head_rate(gpu, recipe),
        "weights and state in memory": moved / memory,
        "norms, gates, quantisation": layers * work.tokens * features / memory,
        "kernel launches": layers * TRAIN_LAUNCHES["FP8" if fp8 else "bf16"] * LAUNCH,
    }
    moving = {
        "links inside hosts": inside / (EFFICIENCY["links"] * NVLINK),
        "network between hosts": between / (EFFICIENCY["links"] * NETWORK),
    }
    if plan.host_moments:  # they come and go array by array: neither way overlaps with the other
        links = EFFICIENCY["links"] * HOST_LINK
        moving["moments from the host and back"] = 2 * plan.host_moments / links
    return StepCost(
        flops=flops,
        transfers=transfers,
        seconds=seconds,
        moving=moving,
        tokens=work.tokens * work.micro_batches * mesh.size // mesh.shape["tensor"],
    )


def decode_seconds(
    model: ModelConfig,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    sequences: int,
    length: int,
    gpu: Gpu,
) -> dict[str, float]:
    """Returns {part of the work: seconds of a decode step} on each device, which add up.

    Args:
      model, recipe: the sampler's model and recipe.
      mesh: mesh whose axis `tensor` is 1.
      sequences: number of sequences on a device.
      length: mean number of a sequence's tokens in the cache.
      gpu: one of GPUS.
    """
    weights = weight_bytes(weight_shapes(model, recipe, recipe), mesh)
    counts = parameter_counts(model)
    experts = 0.0
    if model.num_experts:
        missed = 1 - model.num_experts_per_tok / model.num_experts
        experts = weights.experts * (1 - missed ** (sequences * mesh.shape["expert"]))
    layers = weights.dense + experts
    seen = float(keys_seen(model, np.asarray(length, np.float64)))
    cache = sequences * seen * page_bytes(model, recipe) / PAGE
    pairs = sequences * seen * model.num_hidden_layers  # of a query and a key
    # 16 query heads of one key head, 64 keys and 128 features at a time; latents are one key head.
    keys = 1 if model.latent else model.num_key_value_heads
    tiles = keys * math.ceil(model.num_attention_heads / keys / 16)
    loops = pairs * tiles / 64 * attention_features(model) / (2 * model.num_attention_heads * 128)
    slots = MULTIPROCESSORS * ISSUED * gpu.clock
    issued = INSTRUCTIONS[recipe.stored_dtype("k"), recipe.stored_dtype("v")]

    fp8 = recipe.quantized and not recipe.fake
    products = (counts.active - counts.tables) * sequences
    read = layers / _read_rate(gpu, "FP8 products" if fp8 else "bf16 products")
    of_layers = max(read, 2 * products / _rate(gpu, fp8))
    # Keys are half of the cache, values the other.
    moved = sum(cache / 2 / _read_rate(gpu, _attention(recipe, name)) for name in ("k", "v"))
    computed = 2 * pairs * attention_features(model) / (EFFICIENCY["attention"] * gpu.bf16)
    table = model.vocab_size * model.hidden_size
    head = table * recipe.for_head().compute_dtype.itemsize / (EFFICIENCY["memory"] * gpu.hbm)
    in_layer, large = DECODE_LAUNCHES[_kind(model)]
    launches = model.num_hidden_layers * in_layer + STEP_LAUNCHES
    others = launches - model.num_hidden_layers * large
    return {
        "layers": of_layers,
        "attention": max(moved, computed, loops * issued / slots),
        "head": max(head, 2 * table * sequences / _head_rate(gpu, recipe)),
        "other kernels": others * DECODE_KERNEL + launches * DECODE_GAP,
    }


def _read_rate(gpu: Gpu, kernels: str) -> float:
    """Returns the bytes/s that kernels of a decode step read, by their name in DECODE_RATES."""
    return min(DECODE_RATES[kernels], DECODE_MEMORY * gpu.hbm)


def _attention(recipe: Recipe, name: str) -> str:
    """Returns which of DECODE_RATES attention's reads of keys ('k') or values ('v') reach."""
    stored = recipe.stored_dtype(name)
    in_bytes = stored is not None and stored.itemsize == 1
    return "attention in 8 bits" if in_bytes else "attention in bf16"
