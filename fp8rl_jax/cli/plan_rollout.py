"""`fp8rl plan --rollout`: what a config's rollout needs of a device, without that device.

The same plan by which a run allocates (rollout/memory_plan.py), for GPUs of a given memory and a
mesh of any size, in the config's own recipe and beside it in FP8 and BF16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from fp8rl_jax.bench.table import text_table
from fp8rl_jax.cli.planned import Planned
from fp8rl_jax.errors import UserError
from fp8rl_jax.models import PAGE, pages_of
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.rollout import Batching, Loop, SamplerConfig
from fp8rl_jax.rollout.memory_plan import RolloutPlan, gib, plan_rollout

_BESIDE = ("fp8", "bf16")


@dataclasses.dataclass(frozen=True)
class ConfigPlan:
    """The plans of a config on a mesh.

    Attributes:
      planned: the whole configuration, and the mesh.
      plans: {name of a recipe: its plan}; the first is the config's own.
    """

    planned: Planned
    plans: dict[str, RolloutPlan]

    @property
    def own(self) -> RolloutPlan:
        return next(iter(self.plans.values()))

    @property
    def samples(self) -> int:
        """Responses of a step on each device."""
        rollout = self.planned.config.rollout
        return rollout.prompts_per_step * rollout.group_size // self.planned.mesh.size


def plan_config(planned: Planned, memory: int) -> ConfigPlan:
    """The plans of a config's rollout on GPUs.

    Args:
      planned: the config, and a mesh.
      memory: bytes of a device.

    Raises:
      UserError: such a rollout cannot be planned.
    """
    config, resolved, mesh = planned.config, planned.resolved, planned.mesh
    rollout = config.rollout
    for field, other in (("mesh.tensor", 1), ("algo.routing_replay", "none")):
        section, name = field.split(".")
        if config[section][name] != other:
            raise UserError(
                f"fp8rl plan --rollout: {field} is {config[section][name]!r}, and continuous "
                f"batching, which is planned here, needs {other!r}"
            )
    sampler = SamplerConfig(rollout.max_new_tokens, rollout.group_size, (), 0)
    slots = rollout.slots or rollout.prompts_per_step * rollout.group_size
    sizes = Batching(slots, rollout.pages, prefill_chunk=rollout.prefill_chunk)

    def plan(recipe: Recipe, learner: Recipe) -> RolloutPlan:
        on_gpu = dataclasses.replace(recipe, kernels="triton")
        return plan_rollout(
            Loop(resolved.model, on_gpu, sampler), learner, mesh,
            prompt_tokens=rollout.max_prompt_tokens, batching=sizes, memory=memory,
            reference=resolved.algorithm.needs_reference, offload=planned.config.learner.offload,
        )  # fmt: skip

    own = resolved.rollout_recipe
    plans = {f"{own.name} *": plan(own, resolved.learner_recipe)}
    for recipe in map(get_recipe, _BESIDE):
        if recipe != dataclasses.replace(own, kernels=recipe.kernels):
            plans[recipe.name] = plan(recipe, recipe)
    return ConfigPlan(planned, plans)


def format_plans(found: ConfigPlan) -> str:
    """The table of `fp8rl plan --rollout`."""
    own, count = found.own, found.planned.mesh.size
    half = math.ceil(own.tokens / 2)
    figures: dict[str, Callable[[RolloutPlan], str]] = {
        "weights": lambda p: gib(p.weights),
        "train state": lambda p: gib(p.train_state),
        "workspace, about": lambda p: gib(p.workspace),
        "a page": lambda p: f"{p.page / 2**10:,.1f} KiB",
        "KV of a token": lambda p: f"{p.page / PAGE / 2**10:,.2f} KiB",
        "pages that fit": lambda p: f"{p.room:,}",
        f"slots of {own.tokens} tokens": lambda p: f"{p.slots_of(own.tokens):,}",
        f"slots of {half} tokens": lambda p: f"{p.slots_of(half):,}",
    }
    rows = [(name, *map(figure, found.plans.values())) for name, figure in figures.items()]
    return "\n".join([
        f"{count} device{'s' * (count > 1)} of {gib(own.memory or 0)} (mesh: "
        f"{found.planned.mesh_text}); figures of each.",
        f"A sequence: {own.tokens} tokens at most, {pages_of(own.tokens)} pages of {PAGE}. A "
        f"step: {found.samples} samples, of which {own.slots} decode at a time.",
        "",
        *text_table(("", *found.plans), *rows),
        "",
        "* the config's own recipe (precision.rollout)",
    ])  # fmt: skip


def describe_allocation(found: ConfigPlan) -> str:
    """What the sampler allocates for the config as it is.

    Raises:
      UserError: it cannot.
    """
    planned, own = found.planned, found.own
    rollout, devices = planned.config.rollout, planned.mesh.size
    planned = own.pages
    if not rollout.slots:
        cache = found.samples * pages_of(own.tokens) * own.page
        fitting = own.slots_of(math.ceil(own.tokens / 2)) or 1  # at half the length
        return (
            f"rollout.slots is 0: the sampler allocates a cache for all {found.samples} samples at "
            f"once, {gib(cache)} a device, whatever fits; continuous batching would do best with "
            f"rollout.slots={devices * min(found.samples, fitting)}"
        )
    pages = rollout.pages // devices or planned
    if pages > (own.room or 0):
        raise UserError(
            f"rollout.pages is {rollout.pages}, {pages} a device, and {own.room} fit: write at "
            f"most {(own.room or 0) * devices}, or 0"
        )
    return (
        f"The sampler allocates {own.slots} slots and {pages} pages a device, "
        f"{gib(pages * own.page)} ({own.wanted} pages would hold every slot's whole sequence)"
    )
