"""Plans the memory that a rollout needs on a device, and how many slots and pages fit.

The sampler of continuous batching allocates by this plan (`rollout.pages` 0), and `fp8rl plan
--rollout` prints it for a device that need not exist. Everything but the workspace is counted from
shapes; the workspace is an upper estimate of the temporary arrays of an iteration of the sampling
loop (tests/plan/test_rollout_plan.py compares it with the compiler's figure).
"""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, Mesh

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.combinations import unmet_needs
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.models import PAGE, least_pages, pages_of, param_shapes
from fp8rl_jax.models.stacks import RUNS
from fp8rl_jax.plan.bytes import gib, page_bytes, served_bytes, state_bytes, weight_shapes
from fp8rl_jax.plan.learner import plan_learner
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Loop, SamplerConfig
from fp8rl_jax.rollout.cases import CASES
from fp8rl_jax.rollout.continuous_loop import default_chunk

_SPARE_PAGES = 4  # page 0, and last pages of prompts whose samples are being admitted


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """Bytes on each device, and the number of pages that then fit.

    Attributes:
      weights: quantised weights of the sampler, their scales, and the converted copies it reads.
      train_state: masters, optimiser moments, and states of scaling policies; with `rollout.ahead`
        all of a train step, which runs beside the rollout; on devices for rollouts alone the
        weights of versions that are ahead.
      workspace: estimate of the temporary arrays of an iteration of the sampling loop, and the
        records of which tokens top-k and top-p kept.
      page: one page of 64 tokens, keys and values of all layers.
      memory: bytes of the device that a run may fill; None if unknown.
      tokens: most tokens of a sequence, prompt and response.
      slots: number of sequences that decode at a time.
      sequences: number of sequences that hold pages at a time, if there is room: the slots, or with
        several replies all of a step, most of which may wait for an environment.
    """

    weights: int
    train_state: int
    workspace: int
    page: int
    memory: int | None
    tokens: int
    slots: int
    sequences: int

    @property
    def wanted(self) -> int:
        """Pages for as many sequences of the greatest length as hold pages at a time."""
        return self.sequences * pages_of(self.tokens) + _SPARE_PAGES

    @property
    def fitting(self) -> int | None:
        """Pages that fit besides everything else; None if the memory is unknown."""
        if self.memory is None:
            return None
        left = self.memory - self.weights - self.train_state - self.workspace
        return max(int(left) // self.page, 0)

    @property
    def pages(self) -> int:
        """Pages to allocate.

        Raises:
          UserError: not even one sequence fits.
        """
        if self.fitting is None or self.fitting >= self.wanted:
            return self.wanted
        least = least_pages(self.tokens)
        if self.fitting < least:
            raise UserError(
                f"beside {gib(self.weights)} of weights, {gib(self.train_state)} of train state "
                f"and {gib(self.workspace)} of workspace a device, of which a run may fill "
                f"{gib(self.memory or 0)}, has room for {self.fitting} pages of 64 tokens, and one "
                f"sequence of {self.tokens} tokens (rollout.max_prompt_tokens + max_new_tokens) "
                f"needs {least}: lower these or rollout.slots, or raise mesh.fsdp (train state of "
                "devices that learn, too) or mesh.expert (experts)"
            )
        return self.fitting

    @property
    def half(self) -> int:
        """Half of the tokens that a sequence can have."""
        return math.ceil(self.tokens / 2)

    def slots_of(self, tokens: int) -> int | None:
        """Returns the slots that fit if each holds `tokens` tokens; None without a known memory."""
        if self.fitting is None:
            return None
        return max((self.fitting - _SPARE_PAGES) // pages_of(tokens), 0)


def sampler_bytes(loop: Loop, learner_recipe: Recipe, mesh: Mesh | AbstractMesh) -> int:
    """Returns the bytes of a device's part of the sampler's weights, in both forms if they are
    converted. The mesh axis `tensor` is 1: continuous batching does not cut layers by columns."""

    stored = weight_shapes(loop.model, loop.recipe, learner_recipe)
    made = jax.eval_shape(loop.prepare, stored) if loop.converts else {}
    return served_bytes(stored, mesh) + served_bytes(made, mesh)


def workspace_bytes(loop: Loop, slots: int, prefill_tokens: int, expert_devices: int = 1) -> int:
    """Returns an upper estimate of the temporary bytes of one iteration of the sampling loop.

    Logits: seven float32 copies (raw, scaled, masked by top-k and top-p, sorted, and as weights of
    the log-softmax). Layers: four float32 copies of the widest activations, of the prefilled tokens
    or of the slots; with experts each token has a row per chosen expert, and tokens come from all
    devices that share experts. On a CPU also the float32 arrays that XLA's products read: a layer's
    matrices, the embedding transposed, and copies of a page of keys and values of every slot.
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
        stacks = [jax.tree.leaves(params[name]) for name in RUNS & set(params)]
        stored = 2 * model.num_key_value_heads * model.head_dim  # of a token, in a layer
        if model.latent:
            stored = model.kv_lora_rank + model.qk_rope_head_dim
        made = max(sum(x.size // x.shape[0] for x in stack) for stack in stacks)
        made += model.vocab_size * model.hidden_size + 4 * slots * PAGE * stored
    return 4 * (logits + rows + made)


def plan_rollout(
    resolved: Resolved, mesh: Mesh | AbstractMesh, memory: int | None = None, alone: bool = False
) -> RolloutPlan:
    """Plans the rollout memory of one device in a training run; does not read `rollout.pages`.

    Args:
      resolved: sizes, model and recipes; `rollout.slots` 0 stands for all samples of a step.
      mesh: a Mesh, or an AbstractMesh of devices that need not exist.
      memory: bytes of a device that a run may fill; None if unknown.
      alone: whether the devices do nothing but sample.
    """
    rollout = resolved.config.rollout
    loop = Loop(
        resolved.model,
        resolved.rollout_recipe,
        SamplerConfig(rollout.max_new_tokens, rollout.group_size, eos_ids=(), pad_id=0),
    )
    drawn = resolved.step_samples * rollout.max_new_tokens * rollout.most_versions
    recorded = 4 * drawn // mesh.size * resolved.recorded_numbers
    slots = (rollout.slots or resolved.step_samples) // mesh.size
    prefill_tokens = rollout.prefill_chunk or default_chunk(loop.on_cpu)
    if alone:
        shapes = weight_shapes(loop.model, loop.recipe, resolved.learner_recipe)
        train_state = rollout.ahead * served_bytes(shapes, mesh)
    elif rollout.ahead:
        train_state = plan_learner(resolved, mesh).needed
    else:
        train_state = state_bytes(resolved, mesh).on_device
    return RolloutPlan(
        weights=sampler_bytes(loop, resolved.learner_recipe, mesh),
        train_state=train_state,
        workspace=recorded + workspace_bytes(loop, slots, prefill_tokens, mesh.shape["expert"]),
        page=page_bytes(loop.model, loop.recipe),
        memory=memory,
        tokens=resolved.sequence_tokens,
        slots=slots,
        sequences=resolved.step_samples // mesh.size if resolved.step else slots,
    )


def plan_rollouts(planned: Planned) -> tuple[RolloutPlan, dict[str, RolloutPlan]]:
    """Plans a configuration's rollout on GPUs, and the same rollout in each of CASES, with the
    learner in that case's recipe too: {name: plan}.

    Raises:
      UserError: a feature of the configuration excludes continuous batching, which plans assume.
    """
    resolved = planned.resolved
    for path, problem, _ in unmet_needs(resolved, {"rollout.slots": resolved.step_samples}):
        raise UserError(f"fp8rl plan --rollout cannot plan that: {problem}: leave {path} out")

    def plan(recipe: Recipe, learner: Recipe) -> RolloutPlan:
        changed = dataclasses.replace(
            resolved,
            rollout_recipe=dataclasses.replace(recipe, kernels="gpu"),
            learner_recipe=learner,
        )
        return plan_rollout(changed, planned.mesh, int(planned.usable), planned.alone)

    recipes = {name: make() for name, make in CASES.items()}
    cases = {name: plan(recipe, recipe) for name, recipe in recipes.items()}
    return plan(resolved.rollout_recipe, resolved.learner_recipe), cases
