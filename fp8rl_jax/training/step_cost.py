"""What a train step computes and moves, and the least time that follows: a roofline estimate.

FLOPs and bytes are counted by formulas (`cost_analysis` of a compiled program does not see our
kernels). Times divide them by what a GPU and its links give, as data sheets say, times an assumed
efficiency (`EFFICIENCY`); nothing here was measured on a GPU. Work on a device and its transfers
may overlap or not, so the estimate is the largest of the times and their sum is its upper end.
Left out: waiting for the slowest device, kernels' launches, rewards, the rollout.

Formulas, for a token of a layer: a linear layer of P parameters takes 2 P FLOPs in the forward
pass, as much again where the layer is recomputed, and 2 P each for the gradients of its input and
its weight (Kaplan et al., arXiv:2001.08361, 2.1). Attention of T tokens with H heads of Dh takes
2 * 2 * H * Dh * T / 2 forward, and 2.5 times that backward (Dao, arXiv:2307.08691, 4.1).
"""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.parallel.experts import passes_of
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.quant import Recipe
from fp8rl_jax.sharding import MESH_AXES
from fp8rl_jax.training.learner_plan import Workload, weight_bytes


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: NVIDIA H100 (SXM5) and H200 (SXM), dense products.

    Attributes:
      name: as it is written.
      memory: GB on the data sheet, which `--memory-gb` takes for GiB.
      bf16, fp8: FLOP/s.
      hbm: bytes/s of its memory.
    """

    name: str
    memory: float
    bf16: float = 989e12
    fp8: float = 1979e12
    hbm: float = 4.8e12

    @property
    def speed(self) -> str:
        """The figures in words."""
        return (
            f"{self.bf16 / 1e12:,.0f} TFLOPS bf16, {self.fp8 / 1e12:,.0f} FP8, dense; "
            f"{self.hbm / 1e12:.2f} TB/s"
        )


GPUS = {"h100": Gpu("H100", 80.0, hbm=3.35e12), "h200": Gpu("H200", 141.0)}
NVLINK = 450e9  # bytes/s a GPU receives within a host (NVLink 4: 900 GB/s, both directions)
HOST_LINK = 64e9  # bytes/s between a GPU and its host's memory, each way (PCIe 5.0 x16)
NETWORK = 50e9  # bytes/s a GPU receives from other hosts (one 400 Gb/s adapter for each, as a DGX)
HOST_DEVICES = 8  # GPUs of a host
EFFICIENCY = {"products": 0.4, "attention": 0.4, "memory": 0.8, "links": 0.8}  # assumed
_ATTENTION_BACKWARD = 2.5  # of the forward pass
_ADAM_BYTES = 28  # a parameter: reads master, moments, gradient; writes the first three


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What a device receives over a mesh axis in a train step.

    Attributes:
      axis: of the mesh.
      what: in words.
      inside, between: bytes from devices of its own host, and of others.
    """

    axis: str
    what: str
    inside: float
    between: float


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What each device does in a train step, and the times that this takes at least.

    Attributes:
      flops: {part of the model: FLOPs}.
      transfers: over the mesh.
      seconds: {what takes the time: seconds}.
      tokens: of the update, on all devices.
    """

    flops: dict[str, float]
    transfers: tuple[Transfer, ...]
    seconds: dict[str, float]
    tokens: int

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def least_seconds(self) -> float:
        """Everything overlaps with what takes longest."""
        return self.seconds[self.bound]

    @property
    def most_seconds(self) -> float:
        """Nothing overlaps."""
        return sum(self.seconds.values())


def attention_features(model: ModelConfig) -> int:
    """Products of a query and a key, and of a weight and a value, in all heads together."""
    if model.latent:
        return model.num_attention_heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
    return 2 * model.num_attention_heads * model.head_dim


def step_flops(model: ModelConfig, work: Workload, tensor: int = 1) -> dict[str, float]:
    """{part of the model: FLOPs of a device} in an update.

    Args:
      model: shapes.
      work: of a device; all its tokens count, padding too.
      tensor: devices that share each layer by columns and heads.
    """
    counts = parameter_counts(model)
    linear = counts.active - counts.tables
    passes = (4 if work.remat == "full" else 3) + work.counts
    tokens, length = work.tokens * work.micro_batches, work.prompt + work.response
    attended = tokens * length / 2 * model.num_hidden_layers * attention_features(model)
    head = model.vocab_size * model.hidden_size  # forward, logits again, two gradients
    return {
        "linear layers": 2 * linear * passes * tokens / tensor,
        "attention": 2 * attended * (passes - 2 + _ATTENTION_BACKWARD) / tensor,
        "output head": 2 * head * 4 * work.response_tokens * work.micro_batches / tensor,
    }


def same_host(mesh: Mesh | AbstractMesh, axis: str, hosts: int) -> int:
    """How many of the devices along an axis are on one host, itself included.

    Devices are numbered host by host, and the last axis of the mesh varies first.
    """
    stride = math.prod(mesh.shape[name] for name in MESH_AXES[MESH_AXES.index(axis) + 1 :])
    host = mesh.size // hosts
    return max(min(mesh.shape[axis], host // stride), 1)


def _received(
    model: ModelConfig, recipe: Recipe, mesh: Mesh | AbstractMesh, work: Workload
) -> list[tuple[str, str, float]]:
    """(axis, what, bytes that a device receives) in an update."""
    masters, own, _ = weight_bytes(model, recipe, mesh)
    data, fsdp, tensor, expert = (mesh.shape[name] for name in MESH_AXES)
    times = work.micro_batches
    reads = 2 + work.counts  # forward, and backward with what it recomputes
    layers, experts = masters.dense + masters.experts, masters.experts
    found = [
        ("fsdp", "quantised weights, gathered", times * reads * (own.dense + own.experts)),
        ("fsdp", "embedding and head, gathered", own.tables + masters.tables),
        ("fsdp", "gradients, reduce-scattered", times * (layers + masters.tables)),
    ]
    rest = [(axis, what, size * (fsdp - 1) / fsdp) for axis, what, size in found if fsdp > 1]
    if data > 1:
        size = times * 2 * (layers + masters.tables) * (data - 1) / data
        rest.append(("data", "gradients, all-reduced", size))
    if expert > 1:
        size = times * 2 * (layers - experts + masters.tables) * (expert - 1) / expert
        rest.append(("expert", "gradients of what is no expert, all-reduced", size))
        rest += _exchanged(model, work, expert)
    if tensor > 1:
        rest.append(("tensor", "activations and their gradients", _columns(model, work, tensor)))
    return rest


def _exchanged(model: ModelConfig, work: Workload, devices: int) -> list[tuple[str, str, float]]:
    """What tokens and their experts send each other (models/parallel/experts.py), in an update.

    A row goes to all devices of the axis, its k results come back from those that hold its experts.
    """
    width, chosen = model.hidden_size, model.num_experts_per_tok
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
    """Bytes over `tensor`: inputs of o and down in FP8 and their outputs in bf16, forward; two
    float32 all-reduces and two float32 reduce-scatters, and the inputs again, backward."""
    tokens = work.tokens * work.micro_batches * model.num_hidden_layers
    inputs = model.num_attention_heads * model.head_dim + model.intermediate_size
    forward = inputs * (1 + 4 / 128) + 2 * 2 * model.hidden_size
    backward = 2 * 2 * 4 * model.hidden_size + 4 * inputs + inputs
    passes = (2 if work.remat == "full" else 1) + work.counts
    return tokens * (passes * forward + backward) * (devices - 1) / devices


def step_transfers(
    model: ModelConfig, recipe: Recipe, mesh: Mesh | AbstractMesh, work: Workload, hosts: int
) -> tuple[Transfer, ...]:
    """What a device receives in an update, over each mesh axis.

    Of n devices along an axis, of which m are on one host, n - m of n - 1 shares come from others.
    """
    found = []
    for axis, what, size in _received(model, recipe, mesh, work):
        count = mesh.shape[axis]
        between = size * (count - same_host(mesh, axis, hosts)) / (count - 1)
        found.append(Transfer(axis, what, size - between, between))
    return tuple(found)


def step_cost(
    model: ModelConfig,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    work: Workload,
    gpu: Gpu,
    hosts: int,
    host_moments: int = 0,
) -> StepCost:
    """The cost of a train step on each device.

    Args:
      model, recipe: of the learner.
      mesh: of devices that need not be there.
      work: of an update.
      gpu: one of GPUS.
      hosts: that the devices are on, in equal numbers.
      host_moments: bytes of moments of a device in the host's memory; they come and go array by
        array, so neither way overlaps with the other.
    """
    flops = step_flops(model, work, mesh.shape["tensor"])
    transfers = step_transfers(model, recipe, mesh, work, hosts)
    masters, own, _ = weight_bytes(model, recipe, mesh)
    fp8 = recipe.quantized and not recipe.fake
    # fprop and remat in FP8; dgrad and wgrad too, if gradients are quantised.
    peak = gpu.fp8 if fp8 else gpu.bf16
    share = 1.0 if recipe.gradient is not None or not fp8 else 0.5
    linear = flops["linear layers"] * (share / peak + (1 - share) / gpu.bf16)
    others = flops["attention"] + flops["output head"]
    reads = (2 + work.counts) * (own.dense + own.experts)  # in a micro-batch
    reads += masters.dense + masters.experts
    moved = _ADAM_BYTES // 4 * masters.stored + work.micro_batches * (2 * reads + masters.stored)
    seconds = {
        "linear layers": linear / EFFICIENCY["products"],
        "attention and head": others / (EFFICIENCY["attention"] * gpu.bf16),
        "weights and state in memory": moved / (EFFICIENCY["memory"] * gpu.hbm),
        "links inside hosts": sum(t.inside for t in transfers) / (EFFICIENCY["links"] * NVLINK),
        "network between hosts": sum(t.between for t in transfers)
        / (EFFICIENCY["links"] * NETWORK),
    }
    if host_moments:
        away = 2 * host_moments / (EFFICIENCY["links"] * HOST_LINK)
        seconds["moments from the host and back"] = away
    tokens = work.tokens * work.micro_batches * mesh.size // mesh.shape["tensor"]
    return StepCost(flops, transfers, seconds, tokens)
