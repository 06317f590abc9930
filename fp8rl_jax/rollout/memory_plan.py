"""What a rollout needs of a device's memory, and how many slots and pages fit.

The sampler of continuous batching allocates by this plan (`rollout.pages` 0), and `fp8rl plan
--rollout` prints it for a device that need not be there. Everything but the workspace is counted
from shapes; the workspace is an upper estimate of what a turn of the loop holds at once
(tests/cli/test_plan.py compares it with the compiler's own figure).
"""

from __future__ import annotations

import dataclasses
import math
import os

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import (
    PAGE,
    ModelConfig,
    init_paged_cache,
    init_scaling,
    least_pages,
    pages_of,
    param_shapes,
    param_shardings,
    quantize_params,
)
from fp8rl_jax.models.parallel.specs import rollout_specs
from fp8rl_jax.models.stacks import DENSE_STACK, STACK
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Batching, Loop

USABLE = 0.92  # of a device's memory: fragments, and what the driver and other programs hold
_SPARE_PAGES = 4  # page 0, and last pages of prompts whose samples are being admitted


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """Bytes on each device, and what they leave room for.

    Attributes:
      weights: of the sampler, quantised, with their scales and what is made of them beforehand.
      train_state: masters, optimiser moments, and states of scaling policies.
      workspace: what a turn of the loop holds at once, about.
      page: one page of 64 tokens, keys and values of all layers.
      memory: of the device; None where it is unknown.
      tokens: of a sequence, prompt and response.
      slots: sequences that decode at a time.
    """

    weights: int
    train_state: int
    workspace: int
    page: int
    memory: int | None
    tokens: int
    slots: int

    @property
    def wanted(self) -> int:
        """Pages with which every slot can hold a whole sequence."""
        return self.slots * pages_of(self.tokens) + _SPARE_PAGES

    @property
    def room(self) -> int | None:
        """Pages that fit beside everything else; None where the memory is unknown."""
        if self.memory is None:
            return None
        left = self.memory * USABLE - self.weights - self.train_state - self.workspace
        return max(int(left) // self.page, 0)

    @property
    def pages(self) -> int:
        """Pages to allocate.

        Raises:
          UserError: not even one sequence fits.
        """
        if self.room is None or self.room >= self.wanted:
            return self.wanted
        least = least_pages(self.tokens)
        if self.room < least:
            raise UserError(
                f"beside {gib(self.weights)} of weights, {gib(self.train_state)} of train state "
                f"and {gib(self.workspace)} of workspace a device of {gib(self.memory or 0)} has "
                f"room for {self.room} pages of 64 tokens, and one sequence of {self.tokens} "
                f"tokens (rollout.max_prompt_tokens + max_new_tokens) needs {least}: lower these "
                "or rollout.slots, or raise mesh.fsdp (train state) or mesh.expert (experts)"
            )
        return self.room

    def slots_of(self, tokens: int) -> int | None:
        """Slots that fit if each holds `tokens` tokens."""
        if self.room is None:
            return None
        return max((self.room - _SPARE_PAGES) // pages_of(tokens), 0)


def gib(size: float) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.2f} GiB"


def device_memory() -> int | None:
    """Bytes of the first device; of a CPU, its share of the machine's memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def part_bytes(mesh: Mesh | AbstractMesh, tree, specs) -> int:
    """Bytes of a device's part of a tree of arrays or their shapes.

    Args:
      specs: a PartitionSpec for every array, as a tree of the same structure.
    """

    def part(x, spec) -> int:
        return math.prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(part, tree, specs)))


def weight_bytes(loop: Loop, learner_recipe: Recipe, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of a device's part of the sampler's weights; where they are converted, of both
    forms. Without columns over `mesh.tensor`, which continuous batching does not know."""

    def weights(params):
        return quantize_params(params, loop.recipe, init_scaling(params, learner_recipe))

    def held(tree) -> int:
        return part_bytes(mesh, tree, rollout_specs(tree))

    stored = jax.eval_shape(weights, param_shapes(loop.model))
    return held(stored) + (held(jax.eval_shape(loop.prepare, stored)) if loop.converts else 0)


def page_bytes(model: ModelConfig, recipe: Recipe) -> int:
    """Bytes of a page, all layers."""
    table = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    cache = jax.eval_shape(lambda table: init_paged_cache(model, recipe, 1, table), table)
    return _bytes(cache.runs)


def train_bytes(
    model: ModelConfig,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    reference: bool = False,
    offload: str = "none",
) -> int:
    """Bytes of a device's part of masters, their two moments, the reference policy (algo.kl_coef)
    if there is one, and scaling states (replicated). With `offload` (`learner.offload`) 'moments'
    these are in the host's memory."""
    params = param_shapes(model)
    specs = jax.tree.map(lambda s: s.spec, param_shardings(mesh, params))
    scaling = jax.eval_shape(lambda p: init_scaling(p, recipe), params)
    copies = (1 if offload == "moments" else 3) + reference
    return copies * part_bytes(mesh, params, specs) + _bytes(scaling)


def workspace_bytes(loop: Loop, slots: int, prefill_tokens: int, expert_devices: int = 1) -> int:
    """An upper estimate of a turn's temporary bytes.

    Decode: float32 logits, scaled, without what top-k and top-p leave out, in order of size and as
    weights of the log-softmax.
    Prefill: some rows of the widest layer in float32, and the experts' copies of each token, of
    all the devices that share experts. On a CPU also what XLA's products read: a layer's matrices,
    the embedding transposed, and a page of every slot's keys and values in float32.
    """
    model = loop.model
    copies = model.num_experts_per_tok * expert_devices if model.num_experts else 1
    width = max(
        2 * model.intermediate_size,
        2 * copies * (model.moe_intermediate_size or 0),
        model.num_attention_heads * model.head_dim,
        copies * model.hidden_size,
    )
    logits = 7 * slots * model.vocab_size
    rows = 4 * max(prefill_tokens, slots) * width
    made = 0
    if loop.on_cpu:
        params = param_shapes(model)
        stacks = (params[name] for name in (DENSE_STACK, STACK) if name in params)
        made = max(sum(x.size // x.shape[0] for x in jax.tree.leaves(s)) for s in stacks)
        made += model.vocab_size * model.hidden_size + 4 * slots * PAGE * _features(model)
    return 4 * (logits + rows + made)


def _features(model: ModelConfig) -> int:
    """Numbers of a token's keys and values in a layer."""
    if model.latent:
        return model.kv_lora_rank + model.qk_rope_head_dim
    return 2 * model.num_key_value_heads * model.head_dim


def plan_rollout(
    loop: Loop,
    learner_recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    *,
    prompt_tokens: int,
    batching: Batching,
    memory: int | None,
    reference: bool = False,
    offload: str = "none",
) -> RolloutPlan:
    """The plan of one device in a training run.

    Args:
      loop: the sampler's model, recipe and settings.
      learner_recipe: for the train state.
      mesh: a Mesh, or an AbstractMesh of devices that are not there.
      prompt_tokens: prompt slots.
      batching: sizes of all devices together; its pages are not read.
      memory: bytes of a device, or None.
      reference, offload: as for `train_bytes`.
    """
    slots = batching.slots // mesh.size
    prefill_tokens = min(batching.prefill_chunk, prompt_tokens)
    return RolloutPlan(
        weights=weight_bytes(loop, learner_recipe, mesh),
        train_state=train_bytes(loop.model, learner_recipe, mesh, reference, offload),
        workspace=workspace_bytes(loop, slots, prefill_tokens, mesh.shape["expert"]),
        page=page_bytes(loop.model, loop.recipe),
        memory=memory,
        tokens=prompt_tokens + loop.sampler.max_new_tokens,
        slots=slots,
    )
