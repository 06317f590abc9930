"""What a train step needs of a device's memory.

State (masters, moments, gradients, the learner's own quantised weights) is counted from the shapes
of its arrays and how they are stored (`sharding.RULES`). What the step holds for a time is an upper
estimate: the inputs of the layers, which the backward pass reads; the tables of embedding and head,
which every device gathers; and the largest of three that follow each other: the backward pass of
the head, that of a layer, and the optimiser's update. The estimate is meant to be 1 to 1.6 times
what XLA plans for the compiled step, and never less (tests/cli/test_plan_compile.py).

The sampler's weights and its KV cache are not there: a run gives them up before the train step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from fp8rl_jax import sharding
from fp8rl_jax.models import (
    ModelConfig,
    init_scaling,
    param_shapes,
    param_shardings,
    quantize_params,
)
from fp8rl_jax.models.parallel.experts import passes_of
from fp8rl_jax.models.stacks import DENSE_STACK, STACK
from fp8rl_jax.quant import Recipe

HEAD_TOKENS = 4096  # tokens whose gradient of the logits exists at once (kernels/gpu/head.py)
_FRAGMENTS = 0.1  # of temporary arrays
_SPARE_ROWS = 127  # of a tile of 128, that an expert may leave empty (models/moe.py)
_BATCH_FIELDS = 7  # of `Batch`, a number for each response token
# Bytes for each number of a row, backward: 2 of the compute dtype, 1 of FP8, 4 of float32.
_GATED = 18  # gate, up, their product and its gradient; FP8 of two; two in float32
_ROW = 12  # input of the experts in two forms, results and their gradient
_MOVED = 8  # results in the order in which they are sent, and their gradient
TABLES = ("embed_tokens", "lm_head")


@dataclasses.dataclass(frozen=True)
class Workload:
    """What an update gives each device to do.

    Attributes:
      rows: sequences of a micro-batch.
      prompt, response: tokens of a sequence at most.
      micro_batches: of an update, one after the other.
      remat: 'none' or 'full', as `forward`.
      counts: whether a forward pass before them counts the experts' tokens
        (`learner.make_gradients`).
    """

    rows: int
    prompt: int
    response: int
    micro_batches: int
    remat: str
    counts: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * (self.prompt + self.response)

    @property
    def response_tokens(self) -> int:
        """Tokens of a micro-batch that reach the output head."""
        return self.rows * self.response


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """Bytes of a device's parameters in one form.

    Attributes:
      stored: the device's part.
      dense, experts: of the layers, as they are gathered to compute: whole over `fsdp`, columns
        over `tensor`, experts over `expert`.
      layer: of the largest layer, gathered.
      tables: embedding and head, whole.
      largest: the device's part of the largest array.
    """

    stored: int
    dense: int
    experts: int
    layer: int
    tables: int
    largest: int


@dataclasses.dataclass(frozen=True)
class LearnerPlan:
    """Bytes on each device in a train step.

    Attributes:
      masters: float32 parameters.
      moments: the two of Adam, unless they are offloaded.
      others: reference policy, states of scaling policies, the batch.
      gradients: float32; two of them where micro-batches are added up.
      own_weights: in the learner's recipe, stored as the masters are.
      layer_inputs: what the backward pass reads of every layer.
      tables: embedding and head, gathered.
      head: its backward pass at work.
      layer: the largest layer at work, backward.
      optimizer: temporary of the update; moments that are offloaded come for it, an array of
        parameters at a time.
      host_moments: offloaded ones, in the host's memory (learner.offload).
    """

    masters: int
    moments: int
    others: int
    gradients: int
    own_weights: int
    layer_inputs: int
    tables: int
    head: int
    layer: int
    optimizer: int
    host_moments: int

    @property
    def state(self) -> int:
        """Bytes that are there before the step and after it."""
        return self.masters + self.moments + self.others

    @property
    def _temporary(self) -> int:
        """Bytes of temporary arrays: head, layers and optimiser are at work one after the other."""
        held = self.gradients + self.own_weights + self.layer_inputs + self.tables
        # The update with offloaded moments is a program of its own.
        update = 0 if self.host_moments else self.optimizer
        return held + max(self.head, self.layer, update)

    @property
    def fragments(self) -> int:
        """Space between temporary arrays, and small ones that are not counted."""
        return int(_FRAGMENTS * self._temporary)

    @property
    def needed(self) -> int:
        """Bytes at the peak."""
        update = self.gradients + self.optimizer
        return self.state + max(self._temporary + self.fragments, update)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _parts(tree: Any, mesh: Mesh | AbstractMesh) -> Iterator[tuple[tuple[str, ...], int]]:
    """(names of the path, bytes of a device's part) of every array of a parameter tree."""
    shardings = param_shardings(mesh, tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), own in zip(leaves, jax.tree.leaves(shardings), strict=True):
        names = tuple(str(entry.key) for entry in path if hasattr(entry, "key"))
        yield names, math.prod(own.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _weight_bytes(tree: Any, mesh: Mesh | AbstractMesh) -> WeightBytes:
    """Of a tree of parameters in any form, as shapes."""
    kept = {name: mesh.shape[name] for name in ("tensor", "expert")}
    gathered = sharding.abstract_mesh({"data": 1, "fsdp": 1} | kept)
    counts = {
        name: jax.tree.leaves(run)[0].shape[0]
        for name, run in tree.items()
        if name.startswith((STACK, DENSE_STACK))
    }
    dense = experts = 0
    layer = dict.fromkeys(counts, 0)
    for names, size in _parts(tree, gathered):
        if names[0] not in counts:
            continue
        dense, experts = (dense, experts + size) if "experts" in names else (dense + size, experts)
        layer[names[0]] += size // counts[names[0]]
    tables = sum(_bytes(tree[name]) for name in TABLES if name in tree)
    stored = [size for _, size in _parts(tree, mesh)]
    return WeightBytes(
        sum(stored), dense, experts, max(layer.values()), tables, largest=max(stored)
    )


@functools.lru_cache(maxsize=8)
def _shapes(model: ModelConfig, recipe: Recipe) -> tuple[Any, Any, Any]:
    """Shapes of masters, the learner's own weights, and states of scaling policies."""
    params = param_shapes(model)
    scaling = jax.eval_shape(lambda p: init_scaling(p, recipe), params)
    own = jax.eval_shape(lambda p, s: quantize_params(p, recipe, s), params, scaling)
    return params, own, scaling


def weight_bytes(
    model: ModelConfig, recipe: Recipe, mesh: Mesh | AbstractMesh
) -> tuple[WeightBytes, WeightBytes, int]:
    """(float32 masters, the learner's own weights, states of scaling policies) on each device."""
    params, own, scaling = _shapes(model, recipe)
    return _weight_bytes(params, mesh), _weight_bytes(own, mesh), _bytes(scaling)


def attention_widths(model: ModelConfig) -> tuple[int, int]:
    """Numbers that a token has in attention: (of its queries, of all that a layer makes)."""
    heads = model.num_attention_heads
    if not model.latent:
        queries = heads * model.head_dim
        return queries, 2 * queries + 2 * model.num_key_value_heads * model.head_dim
    rotated = model.qk_rope_head_dim
    queries = heads * (model.kv_lora_rank + rotated)
    made = heads * (model.qk_nope_head_dim + rotated + model.v_head_dim) + model.q_lora_rank
    return queries, 2 * queries + made + 2 * model.kv_lora_rank


def _expert_bytes(model: ModelConfig, tokens: int, devices: int) -> int:
    """Bytes of the routed experts at work, backward, in one pass and in the worst case: all tokens
    at the experts of one device."""
    width, inner = model.hidden_size, model.moe_intermediate_size
    each = math.ceil(tokens / passes_of(tokens, devices))
    gathered = devices * each
    chosen = gathered * model.num_experts_per_tok
    rows = chosen + model.num_experts // devices * _SPARE_ROWS
    sent = _MOVED * width if devices > 1 else 0
    return rows * (_ROW * width + _GATED * inner + sent) + gathered * 8 * width


def _layer_bytes(model: ModelConfig, tokens: int, devices: int) -> int:
    """Bytes of a layer's activations and their gradients in its backward pass."""
    width = model.hidden_size
    queries, attention = attention_widths(model)
    shared = model.n_shared_experts * model.moe_intermediate_size if model.num_experts else 0
    dense = 0 if model.num_experts and not model.dense_layers else model.intermediate_size
    rows = 24 * width + 4 * attention + 8 * queries
    experts = _expert_bytes(model, tokens, devices) if model.num_experts else 0
    return tokens * rows + max(_GATED * tokens * dense, _GATED * tokens * shared + experts)


def _kept_bytes(model: ModelConfig, recipe: Recipe, work: Workload) -> int:
    """Bytes that the forward pass keeps of all layers for the backward one."""
    size = recipe.compute_dtype.itemsize
    if work.remat == "full":
        return model.num_hidden_layers * work.tokens * model.hidden_size * size
    _, attention = attention_widths(model)
    mlp = 3 * model.intermediate_size
    if model.num_experts:
        inner = model.num_experts_per_tok + model.n_shared_experts
        mlp = inner * 3 * model.moe_intermediate_size
        mlp += 2 * model.num_experts_per_tok * model.hidden_size
    each = 6 * model.hidden_size + attention + mlp
    return model.num_hidden_layers * work.tokens * each * size


def _head_bytes(model: ModelConfig, recipe: Recipe, work: Workload) -> int:
    """Bytes of the head's backward pass: whole float32 gradients of both tables, the head in a
    second layout, the gradient of the logits of some tokens in two layouts, and rows."""
    size, table = recipe.compute_dtype.itemsize, model.vocab_size * model.hidden_size
    chunk = min(work.response_tokens, HEAD_TOKENS)
    summed = 1 if work.response_tokens > chunk else 0  # the gradient of the head so far
    logits = 2 * chunk * model.vocab_size * size
    rows = 2 * 4 * work.response_tokens * model.hidden_size
    return (2 + summed) * 4 * table + size * table + logits + rows


def plan_learner(
    model: ModelConfig,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    work: Workload,
    reference: bool = False,
    offload: str = "none",
) -> LearnerPlan:
    """The plan of one device in a train step.

    Args:
      model, recipe: of the learner.
      mesh: a Mesh, or an AbstractMesh of devices that are not there.
      work: of an update.
      reference: whether a reference policy is there too (algo.kl_coef).
      offload: `learner.offload`.
    """
    away = offload == "moments"
    masters, own, scaling = weight_bytes(model, recipe, mesh)
    rows = work.rows * work.micro_batches
    batch = rows * (4 * (work.prompt + work.response) + _BATCH_FIELDS * 4 * work.response)
    activations = _layer_bytes(model, work.tokens, mesh.shape["expert"])
    return LearnerPlan(
        masters=masters.stored,
        moments=0 if away else 2 * masters.stored,
        others=reference * masters.stored + scaling + batch,
        gradients=(1 + (work.micro_batches > 1)) * masters.stored,
        own_weights=own.stored,
        layer_inputs=_kept_bytes(model, recipe, work),
        tables=masters.tables + own.tables,
        head=_head_bytes(model, recipe, work),
        layer=2 * masters.layer + 2 * own.layer + activations,
        optimizer=3 * masters.largest if away else masters.stored,
        host_moments=2 * masters.stored if away else 0,
    )
