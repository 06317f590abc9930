"""`fp8rl plan --learner`: what a config's train step needs of a device, and what it costs.

Memory by training/learner_plan.py, FLOPs, traffic and times by training/step_cost.py. Where it does
not fit, changes of the config that make it fit by the same plan, the cheapest first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import ml_collections

from fp8rl_jax import sharding
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.cli.planned import Planned, read_planned
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout.memory_plan import USABLE, gib
from fp8rl_jax.training.described import on_gpu
from fp8rl_jax.training.learner_plan import LearnerPlan, Workload, plan_learner
from fp8rl_jax.training.step_cost import (
    EFFICIENCY,
    HOST_LINK,
    NETWORK,
    NVLINK,
    Gpu,
    StepCost,
    step_cost,
)

_FACTORS = (2, 4, 8, 16)  # by which mesh axes are tried larger
_CHANGED = tuple(
    tuple(name.split("."))
    for name in (
        "learner.gradient_accumulation_steps",
        "learner.remat",
        "learner.offload",
        "mesh.data",
        "mesh.fsdp",
        "mesh.expert",
        "rollout.prompts_per_step",
        "eval.batch_size",
    )
)


@dataclasses.dataclass(frozen=True)
class LearnerConfigPlan:
    """The plan of a config's train step on a mesh.

    Attributes:
      planned: the config, and the mesh.
      work: of an update.
      plan: bytes on each device.
      cost: FLOPs, traffic, times.
      gpu, hosts, memory: the devices; bytes of each.
    """

    planned: Planned
    work: Workload
    plan: LearnerPlan
    cost: StepCost
    gpu: Gpu
    hosts: int
    memory: int

    @property
    def usable(self) -> float:
        """Bytes of a device that a run may fill."""
        return USABLE * self.memory

    @property
    def fits(self) -> bool:
        return self.plan.needed <= self.usable


def workload(planned: Planned) -> Workload:
    """What an update of the config gives each device to do."""
    config = planned.config
    rollout, parts = config.rollout, config.learner.gradient_accumulation_steps
    rows = rollout.prompts_per_step * rollout.group_size // config.algo.num_minibatches // parts
    balanced = config.algo.router_aux_loss_coef > 0 and config.algo.routing_replay == "none"
    return Workload(
        rows // sharding.batch_divisor(planned.mesh),
        rollout.max_prompt_tokens,
        rollout.max_new_tokens,
        parts,
        config.learner.remat,
        balanced and parts > 1,
    )


def _memory(planned: Planned) -> LearnerPlan:
    model, recipe = _learner(planned)
    reference = planned.resolved.algorithm.needs_reference
    offload = planned.config.learner.offload
    return plan_learner(model, recipe, planned.mesh, workload(planned), reference, offload)


def _learner(planned: Planned) -> tuple[ModelConfig, Recipe]:
    return planned.resolved.model, on_gpu(planned.resolved.learner_recipe)


def plan_learner_config(planned: Planned, memory: int, gpu: Gpu, hosts: int) -> LearnerConfigPlan:
    """The plan of a config's learner on GPUs that need not be there.

    Args:
      planned: the config, and a mesh.
      memory: bytes of a device.
      gpu: its speed; hosts: that the devices are on, in equal numbers.
    """
    model, recipe = _learner(planned)
    work, plan = workload(planned), _memory(planned)
    cost = step_cost(model, recipe, planned.mesh, work, gpu, hosts, plan.host_moments)
    return LearnerConfigPlan(planned, work, plan, cost, gpu, hosts, memory)


def format_learner(found: LearnerConfigPlan) -> str:
    """The tables of `fp8rl plan --learner`."""
    plan, work, count = found.plan, found.work, found.planned.mesh.size
    recipe = found.planned.resolved.learner_recipe.name
    rows = found.work.micro_batches * found.work.rows * sharding.batch_divisor(found.planned.mesh)
    memory = [
        ("masters, float32", plan.masters),
        ("Adam's moments", plan.moments),
        ("reference policy, states, batch", plan.others),
        ("gradients, float32", plan.gradients),
        (f"own weights, {recipe}", plan.own_weights),
        ("inputs of the layers, about", plan.layer_inputs),
        ("embedding and head, gathered", plan.tables),
        ("at work: the head, about", plan.head),
        ("at work: the largest layer, about", plan.layer),
        ("at work: the optimiser, about", plan.optimizer),
        ("fragments, a tenth of the temporary", plan.fragments),
        ("together, with the largest at work", plan.needed),
        ("usable, 92% of the memory", found.usable),
    ]
    if plan.host_moments:
        memory.append(("Adam's moments, in the host's memory", plan.host_moments))
    hosts = f"on {found.hosts} host{'s' * (found.hosts > 1)}"
    return "\n".join(
        [
            f"Learner: {count} {found.gpu.name} of {gib(found.memory)} {hosts} (mesh: "
            f"{found.planned.mesh_text}); an estimate, figures of each device.",
            f"An update: {rows} sequences of {work.prompt + work.response} tokens at most; a "
            f"device takes {work.rows} at a time, in {work.micro_batches} micro-batch"
            f"{'es' * (work.micro_batches > 1)}; remat {work.remat}.",
            "",
            *text_table(*((name, gib(size)) for name, size in memory)),
            "",
            *_format_cost(found),
        ]
    )


def _format_cost(found: LearnerConfigPlan) -> Iterator[str]:
    cost, gpu = found.cost, found.gpu
    flops = [(name, f"{value:.3g}") for name, value in cost.flops.items()]
    yield from text_table(("of an update", "FLOPs"), *flops)
    yield ""
    if cost.transfers:
        received = [(f"{t.axis}: {t.what}", gib(t.inside), gib(t.between)) for t in cost.transfers]
        yield from text_table(("received over", "inside hosts", "between hosts"), *received)
        yield ""
    times = [(name, f"{seconds:.3g} s") for name, seconds in cost.seconds.items()]
    yield from text_table(("takes at least", ""), *times)
    rate = cost.tokens / cost.least_seconds
    yield (
        f"An update takes {cost.least_seconds:.3g} s if all this overlaps, bound by {cost.bound}, "
        f"and {cost.most_seconds:.3g} s if nothing does; at best {rate:,.0f} tokens/s."
    )
    efficiency = ", ".join(f"{name} {value:.0%}" for name, value in EFFICIENCY.items())
    host = f", {HOST_LINK / 1e9:.0f} GB/s from its host" * (found.plan.host_moments > 0)
    yield (
        f"Constants ({gpu.name}'s data sheet): {gpu.speed}; a GPU receives "
        f"{NVLINK / 1e9:.0f} GB/s by NVLink, {NETWORK / 1e9:.0f} GB/s from other hosts{host}; "
        f"assumed to be reached: {efficiency}. Nothing here was measured on a GPU."
    )


def check_fits(found: LearnerConfigPlan) -> str:
    """The verdict.

    Raises:
      UserError: the train step does not fit; the sentence says what would make it fit.
    """
    text = f"{gib(found.plan.needed)} a device, and {gib(found.usable)} are usable"
    if found.fits:
        return f"The train step fits: it needs {text}."
    fixes = [f"{words} ({gib(needed)})" for words, needed in find_fixes(found)]
    advice = "write " + ", or ".join(fixes) if fixes else "no larger mesh that was tried is enough"
    raise UserError(f"the train step needs {text}: {advice}")


def find_fixes(found: LearnerConfigPlan) -> list[tuple[str, int]]:
    """(fields to write, bytes that the plan then has) of changes that fit, by price.

    A single micro-batch needs more activations but one gradient less; more of them gather weights
    more often. Rematerialisation computes each layer once more; offloaded moments go to the host
    and back in every update. A smaller `fsdp` helps where it is too large for the experts to be
    stored over it. A larger `fsdp` or `expert` takes devices from `data`, or more of them. The
    smallest change of each kind that fits is named, after a trial of the whole plan. If none does
    alone, the mesh is changed after the cheaper three.
    """
    kinds = (_micro_batches, _remat, _offload, _smaller_fsdp, _larger("fsdp"), _larger("expert"))
    fixes = [fix for kind in kinds for fix in _first_that_fits(found, kind(_written(found)))]
    if fixes:
        return fixes
    least = _written(found)
    least.learner.gradient_accumulation_steps *= found.work.rows
    least.learner.remat, least.learner.offload = "full", "moments"
    return [fix for kind in kinds[3:] for fix in _first_that_fits(found, kind(least))]


def _written(found: LearnerConfigPlan) -> ml_collections.ConfigDict:
    """The config with the sizes of its mesh in the place of -1."""
    config = found.planned.config.copy_and_resolve_references()
    config.mesh.update(dict(found.planned.mesh.shape))
    return config


def _first_that_fits(
    found: LearnerConfigPlan, tried: Iterator[ml_collections.ConfigDict]
) -> Iterator[tuple[str, int]]:
    """The first of some configs whose plan fits: what was changed, and its bytes."""
    before = _written(found)
    for config in tried:
        try:
            planned = read_planned(config)
        except UserError:  # the batch does not divide, or the experts do not
            continue
        needed = _memory(planned).needed
        if needed <= found.usable:
            changed = [
                f"{section}.{name}={config[section][name]}"
                for section, name in _CHANGED
                if config[section][name] != before[section][name]
            ]
            more = f" on {planned.mesh.size} devices" * (planned.mesh != found.planned.mesh)
            yield " ".join(changed) + more, needed
            return


def _micro_batches(config: ml_collections.ConfigDict) -> Iterator[ml_collections.ConfigDict]:
    """One, which needs no second gradient to add to; then more and more."""
    parts = config.learner.gradient_accumulation_steps
    rows = (
        config.rollout.prompts_per_step * config.rollout.group_size // config.algo.num_minibatches
    )
    for count in (1, *range(2 * parts, rows + 1, parts)):
        if rows % count == 0 and count != parts:
            yield _changed(config, {"learner.gradient_accumulation_steps": count})


def _remat(config: ml_collections.ConfigDict) -> Iterator[ml_collections.ConfigDict]:
    if config.learner.remat != "full":
        yield _changed(config, {"learner.remat": "full"})


def _offload(config: ml_collections.ConfigDict) -> Iterator[ml_collections.ConfigDict]:
    if config.learner.offload == "none":
        yield _changed(config, {"learner.offload": "moments"})


def _smaller_fsdp(config: ml_collections.ConfigDict) -> Iterator[ml_collections.ConfigDict]:
    """Devices that go from `fsdp` to `data`."""
    for factor in _FACTORS:
        if config.mesh.fsdp % factor == 0:
            sizes = config.mesh.data * factor, config.mesh.fsdp // factor
            yield _changed(config, dict(zip(("mesh.data", "mesh.fsdp"), sizes, strict=True)))


def _larger(axis: str) -> Callable[..., Iterator[ml_collections.ConfigDict]]:
    """Configs with more devices along an axis, and where these are more in all, with as many rows
    for each device as before as far as the batch allows it."""

    def tried(config: ml_collections.ConfigDict) -> Iterator[ml_collections.ConfigDict]:
        for factor in _FACTORS:
            changes = {f"mesh.{axis}": config.mesh[axis] * factor}
            if config.mesh.data % factor == 0:
                changes["mesh.data"] = config.mesh.data // factor
            larger = _changed(config, changes)
            count = math.prod(larger.mesh[name] for name in sharding.BATCH_AXES)
            for section, name in (("rollout", "prompts_per_step"), ("eval", "batch_size")):
                larger[section][name] += -larger[section][name] % count
            rollout, parts = larger.rollout, larger.learner.gradient_accumulation_steps
            rows = rollout.prompts_per_step * rollout.group_size // larger.algo.num_minibatches
            fitting = math.gcd(parts, rows // count)
            yield _changed(larger, {"learner.gradient_accumulation_steps": fitting})

    return tried


def _changed(
    config: ml_collections.ConfigDict, fields: dict[str, int | str]
) -> ml_collections.ConfigDict:
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(fields)
    return config
