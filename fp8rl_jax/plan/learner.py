"""Plans the memory that a train step needs on a device.

State (masters, moments, gradients, the learner's quantised weights) is counted from the shapes and
shardings of its arrays (`sharding.RULES`). Temporary arrays are an upper estimate: the inputs of
the layers, which the backward pass reads; the tables of embedding and head, which every device
gathers; and the largest of three phases: the backward pass of the head, that of a layer, and the
optimiser's update. The estimate is meant to be 1 to 1.6 times what XLA plans for the compiled step,
and never less (tests/cli/test_plan_compile.py).

The sampler's weights and its KV cache are not counted: a run frees them before the train step. With
`rollout.ahead` it does not, and the weights are counted.
"""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

from fp8rl_jax import sharding
from fp8rl_jax.batch import most_micro_batches
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.parallel.experts import passes_of
from fp8rl_jax.plan.bytes import (
    learner_weight_bytes,
    served_bytes,
    state_bytes,
    weight_bytes,
    weight_shapes,
)
from fp8rl_jax.quant import Recipe

HEAD_TOKENS = 4096  # tokens whose gradient of the logits exists at once (kernels/gpu/head.py)
_FRAGMENTS = 0.1  # share of temporary arrays that fragments add
_SPARE_ROWS = 127  # most rows that an expert leaves empty in its last tile of 128 (models/moe.py)
_BATCH_FIELDS = 7  # fields of `Batch` with a number for each response token
_PACKED_FIELDS = 4  # further ones of rows of several sequences, with a number for each token
# Bytes for each element of a row in the backward pass: 2 in the compute dtype, 1 FP8, 4 float32.
_GATED = 18  # gate, up, their product and its gradient; FP8 of two; two in float32
_ROW = 12  # input of the experts in two forms, results and their gradient
# Bytes for each logit where logits are stored: for the divergence from a frozen model, and for
# top-k and top-p; and tokens whose logits exist at once.
_DIVERGENCE = 24
_TRUNCATED = 16
_LOGITS_TOKENS = 1024
_MOVED = 8  # results in the order in which they are sent, and their gradient


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of each device in an update.

    Attributes:
      rows: sequences of a micro-batch, or 1, a row of several.
      prompt, response: most tokens of a prompt and of a response.
      micro_batches: number of micro-batches of an update, one after the other.
      remat: 'none' or 'full', as in `Observe`.
      counts: whether a forward pass before the micro-batches counts the experts' tokens
        (`learner.GradientProgram`).
      capacity: tokens of a row of several sequences (`learner.tokens_per_batch`); 0 without such.
    """

    rows: int
    prompt: int
    response: int
    micro_batches: int
    remat: str
    counts: bool = False
    capacity: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.capacity or self.rows * (self.prompt + self.response)

    @property
    def response_tokens(self) -> int:
        """Most tokens of a micro-batch that may reach the output head."""
        return self.capacity or self.rows * self.response


def workload(resolved: Resolved, mesh: Mesh | AbstractMesh) -> Workload:
    """Returns the work of a configuration's update on a mesh."""
    config = resolved.config
    sequences = resolved.minibatch_samples
    devices = sharding.batch_divisor(mesh)
    capacity = config.learner.tokens_per_batch
    if capacity:
        rows = 1
        parts = most_micro_batches(sequences, resolved.sequence_tokens, capacity, devices)
    else:
        parts = config.learner.gradient_accumulation_steps
        rows = sequences // parts // devices
    balanced = config.algo.router_aux_loss_coef > 0 and config.algo.routing_replay == "none"
    return Workload(
        rows=rows,
        prompt=config.rollout.max_prompt_tokens,
        response=config.rollout.max_new_tokens,
        micro_batches=parts,
        remat=config.learner.remat,
        counts=balanced and (parts > 1 or capacity > 0),
        capacity=capacity,
    )


@dataclasses.dataclass(frozen=True)
class LearnerPlan:
    """Bytes on each device in a train step.

    Attributes:
      work: work of an update.
      masters: float32 parameters.
      moments: Adam's two moments, unless they are offloaded.
      others: reference policy, frozen model, states of scaling policies, the batch; with rollouts
        beside the step, the sampler's weights.
      gradients: float32 gradients; two copies where micro-batches are added up.
      own_weights: weights in the learner's recipe, sharded as the masters are.
      layer_inputs: activations of every layer that the backward pass reads.
      tables: embedding and head, gathered.
      head: temporary arrays of the head's backward pass.
      layer: temporary arrays of the largest layer's backward pass.
      optimizer: temporary arrays of the update; with offloaded moments, those of the largest
        parameter array, since the moments come to the device array by array.
      host_moments: offloaded moments, in the host's memory (`learner.offload`).
    """

    work: Workload
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
        """Bytes of arrays that exist before and after the step."""
        return self.masters + self.moments + self.others

    @property
    def _temporary(self) -> int:
        """Bytes of temporary arrays; head, layers and optimiser need theirs one after the other."""
        held = self.gradients + self.own_weights + self.layer_inputs + self.tables
        # With offloaded moments the update is a second program.
        update = 0 if self.host_moments else self.optimizer
        return held + max(self.head, self.layer, update)

    @property
    def fragments(self) -> int:
        """Space between temporary arrays, and small ones that are not counted."""
        return int(_FRAGMENTS * self._temporary)

    @property
    def needed(self) -> int:
        """Bytes at the peak."""
        return self.state + max(
            self._temporary + self.fragments,
            self.gradients + self.optimizer,  # the update
        )


def attention_widths(model: ModelConfig) -> tuple[int, int]:
    """Returns the elements per token of a layer's queries, and of all its arrays in attention."""
    heads = model.num_attention_heads
    if not model.latent:
        queries = heads * model.head_dim
        return queries, 2 * queries + 2 * model.num_key_value_heads * model.head_dim
    rotated = model.qk_rope_head_dim
    queries = heads * (model.kv_lora_rank + rotated)
    made = heads * (model.qk_nope_head_dim + rotated + model.v_head_dim) + model.q_lora_rank
    return queries, 2 * queries + made + 2 * model.kv_lora_rank


def _expert_bytes(model: ModelConfig, tokens: int, devices: int) -> int:
    """Returns the bytes of the routed experts' backward pass over a part of the rows (`passes_of`),
    in the worst case: all tokens choose experts of one device."""
    width = model.hidden_size
    each = math.ceil(tokens / passes_of(tokens, devices))
    gathered = devices * each
    chosen = gathered * model.num_experts_per_tok
    rows = chosen + model.num_experts // devices * _SPARE_ROWS
    sent = _MOVED * width if devices > 1 else 0
    gated = _GATED * model.moe_intermediate_size
    return rows * (_ROW * width + gated + sent) + gathered * 8 * width


def _layer_bytes(model: ModelConfig, tokens: int, devices: int) -> int:
    """Returns the bytes of a layer's activations and their gradients in its backward pass."""
    width = model.hidden_size
    queries, attention = attention_widths(model)
    shared = model.n_shared_experts * model.moe_intermediate_size if model.num_experts else 0
    dense = 0 if model.num_experts and not model.dense_layers else model.intermediate_size
    rows = 24 * width + 4 * attention + 8 * queries
    experts = _expert_bytes(model, tokens, devices) if model.num_experts else 0
    return tokens * rows + max(_GATED * tokens * dense, _GATED * tokens * shared + experts)


def _kept_bytes(model: ModelConfig, recipe: Recipe, work: Workload) -> int:
    """Returns the bytes that the forward pass of all layers keeps for the backward pass."""
    size = recipe.compute_dtype.itemsize
    if work.remat == "full":
        result = 0 if model.latent else model.num_attention_heads * model.head_dim
        return model.num_hidden_layers * work.tokens * (model.hidden_size + result) * size
    _, attention = attention_widths(model)
    mlp = 3 * model.intermediate_size
    if model.num_experts:
        inner = model.num_experts_per_tok + model.n_shared_experts
        mlp = (
            inner * 3 * model.moe_intermediate_size
            + 2 * model.num_experts_per_tok * model.hidden_size
        )
    each = 6 * model.hidden_size + attention + mlp
    return model.num_hidden_layers * work.tokens * each * size


def _head_bytes(model: ModelConfig, recipe: Recipe, work: Workload, truncated: bool) -> int:
    """Returns the bytes of the head's backward pass: unsharded float32 gradients of both tables,
    the head in a second layout, the logits' gradient of some tokens in two layouts, and rows. If
    top-k or top-p has `truncated` the vocabulary, the logits themselves are stored, too."""
    size = recipe.for_head().compute_dtype.itemsize
    table = model.vocab_size * model.hidden_size
    chunk = min(work.response_tokens, HEAD_TOKENS)
    summed = 1 if work.response_tokens > chunk else 0  # the gradient of the head so far
    logits = 2 * chunk * model.vocab_size * size
    if truncated:
        stored = _TRUNCATED * min(work.response_tokens, _LOGITS_TOKENS) * model.vocab_size
        logits = max(logits, stored)
    rows = 2 * 4 * work.response_tokens * model.hidden_size
    return (2 + summed) * 4 * table + size * table + logits + rows


def plan_learner(
    resolved: Resolved, mesh: Mesh | AbstractMesh, work: Workload | None = None
) -> LearnerPlan:
    """Plans the memory of one device in a train step.

    Args:
      resolved: configuration with its model and recipes.
      mesh: a Mesh, or an AbstractMesh of devices that need not exist.
      work: work of an update; by default that of `workload`.
    """
    work = work or workload(resolved, mesh)
    model = resolved.model
    recipe = resolved.learner_recipe
    masters, weights = learner_weight_bytes(model, recipe, mesh)
    state = state_bytes(resolved, mesh)
    fields = _BATCH_FIELDS + resolved.recorded_numbers
    batch = 4 * work.micro_batches * (work.tokens + fields * work.response_tokens)
    if work.capacity:
        batch += 4 * work.micro_batches * _PACKED_FIELDS * work.capacity
    head = _head_bytes(model, recipe, work, resolved.truncation is not None)
    if resolved.frozen_model is not None:
        other = resolved.frozen_recipe
        size = other.compute_dtype.itemsize
        batch += (
            work.micro_batches * work.response_tokens * resolved.frozen_model.hidden_size * size
        )
        gathered = weight_bytes(weight_shapes(resolved.frozen_model, other, other), mesh)
        batch += gathered.tables  # its head, as a step reads it
        head += _DIVERGENCE * min(work.response_tokens, _LOGITS_TOKENS) * model.vocab_size
        if mesh.size > 1:  # its pass reads all layers gathered
            batch += gathered.dense + gathered.experts
    if resolved.config.rollout.ahead and not resolved.config.mesh.rollout:
        shapes = weight_shapes(model, resolved.rollout_recipe, recipe)
        batch += resolved.config.rollout.ahead * served_bytes(shapes, mesh)
    return LearnerPlan(
        work=work,
        masters=state.masters,
        moments=state.moments,
        others=state.reference + state.scaling + batch,
        gradients=(1 + (work.micro_batches > 1 or work.capacity > 0)) * state.trained,
        own_weights=weights.stored,
        layer_inputs=_kept_bytes(model, recipe, work),
        tables=masters.tables + weights.tables,
        head=head,
        layer=2 * masters.layer
        + 2 * weights.layer
        + _layer_bytes(model, work.tokens, mesh.shape["expert"]),
        # The update; with adapters also the largest array when they are merged into it.
        optimizer=3 * masters.largest
        if state.host_moments
        else state.trained + masters.largest * (state.trained < state.masters),
        host_moments=state.host_moments,
    )
