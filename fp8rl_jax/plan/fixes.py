"""Searches for changes of a configuration with which its train step fits, by `plan_learner`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import ml_collections

from fp8rl_jax import sharding
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.batch import slots_of
from fp8rl_jax.config import flatten
from fp8rl_jax.plan.learner import plan_learner, workload
from fp8rl_jax.plan.planned import Planned, read_planned

_FACTORS = (2, 4, 8, 16)  # by which sizes of mesh axes are changed
_PARTS = "learner.gradient_accumulation_steps"
_CAPACITY = "learner.tokens_per_batch"
Change = dict[str, int | str]  # {field: value}, in the order of the message


def find_fixes(planned: Planned) -> list[tuple[str, int]]:
    """Returns (fields to write, bytes that are then needed) of changes that fit, cheapest first.

    A single micro-batch needs more activations but one gradient less; more micro-batches gather
    weights more often. Rematerialisation computes each layer once more; offloaded moments go to the
    host and back in every update. A smaller `fsdp` helps if `fsdp` does not divide the experts. A
    larger `fsdp` or `expert` takes devices from `data`, or needs more devices. Every changed
    configuration is checked and planned again; of each kind the smallest change that fits is
    returned. If none fits, changes of the mesh are tried together with the other three kinds.
    """
    sizes = {f"mesh.{axis}": size for axis, size in planned.mesh.shape.items()}
    config = _changed(planned.config, sizes)
    fixes = [fix for kind in _kinds(config) for fix in _first_that_fits(planned, config, kind)]
    if fixes:
        return fixes
    work = workload(planned.resolved, planned.mesh)
    smallest: Change = {_PARTS: work.micro_batches * work.rows}
    if work.capacity:
        smallest = {_CAPACITY: slots_of(work.prompt + work.response)}
    cheaper: Change = {**smallest, "learner.remat": "full", "learner.offload": "moments"}
    for kind in _kinds(_changed(config, cheaper))[3:]:
        fixes += _first_that_fits(planned, config, [cheaper | change for change in kind])
    return fixes


def _changed(config: ml_collections.ConfigDict, change: Change) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict(config.to_dict())
    config.update_from_flattened_dict(change)
    return config


def _first_that_fits(
    planned: Planned, config: ml_collections.ConfigDict, kind: list[Change]
) -> Iterator[tuple[str, int]]:
    """Yields the first change of a kind whose plan fits, as text, and its bytes."""
    before = flatten(config)
    for change in kind:
        try:
            tried = read_planned(_changed(config, change))
        except UserError:  # the batch does not divide, or the experts do not
            continue
        needed = plan_learner(tried.resolved, tried.mesh).needed
        if needed <= planned.usable:
            words = [
                f"{field}={value}" for field, value in change.items() if value != before[field]
            ]
            more = f" on {tried.mesh.size} devices" * (tried.mesh != planned.mesh)
            yield " ".join(words) + more, needed
            return


def _kinds(config: ml_collections.ConfigDict) -> list[list[Change]]:
    """Lists the changes of each kind, cheapest kind first: micro-batches, remat, offload, a smaller
    `fsdp`, a larger `fsdp`, a larger `expert`."""
    mesh = config.mesh
    parts = config.learner.gradient_accumulation_steps
    rollout = config.rollout
    rows = rollout.prompts_per_step * rollout.group_size // config.algo.num_minibatches
    counts = (1, *range(2 * parts, rows + 1, parts))
    fewer: list[Change] = [{_PARTS: n} for n in counts if rows % n == 0 and n != parts]
    if capacity := config.learner.tokens_per_batch:
        least = slots_of(rollout.max_prompt_tokens + rollout.max_new_tokens)
        sizes = range(capacity // least * least, 0, -least)
        fewer = [{_CAPACITY: size} for size in sizes if size != capacity]
    return [
        fewer,
        [{"learner.remat": "full"}] * (config.learner.remat != "full"),
        [{"learner.offload": "moments"}] * (config.learner.offload == "none"),
        [
            {"mesh.data": mesh.data * factor, "mesh.fsdp": mesh.fsdp // factor}
            for factor in _FACTORS
            if mesh.fsdp % factor == 0
        ],
        *([_larger(config, axis, factor) for factor in _FACTORS] for axis in ("fsdp", "expert")),
    ]


def _larger(config: ml_collections.ConfigDict, axis: str, factor: int) -> Change:
    """Returns the change to `factor` times as many devices along an axis, taken from `data` if
    `factor` divides it. Batches grow to a multiple of the devices, and the number of micro-batches
    shrinks to a divisor of a device's rows."""
    sizes = {name: config.mesh[name] for name in sharding.BATCH_AXES}
    sizes[axis] *= factor
    if sizes["data"] % factor == 0:
        sizes["data"] //= factor
    count = math.prod(sizes.values())
    prompts, questions = (
        size + -size % count for size in (config.rollout.prompts_per_step, config.eval.batch_size)
    )
    rows = prompts * config.rollout.group_size // config.algo.num_minibatches
    return {
        _PARTS: math.gcd(config.learner.gradient_accumulation_steps, rows // count),
        **{f"mesh.{name}": size for name, size in sizes.items()},
        "rollout.prompts_per_step": prompts,
        "eval.batch_size": questions,
    }
