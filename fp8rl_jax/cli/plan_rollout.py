"""`fp8rl plan --rollout`: what a config's rollout needs of a device, without that device.

The same plan by which a run allocates (rollout/memory_plan.py), for GPUs of a given memory and a
mesh of any size, in the config's own recipe and beside it in FP8 and BF16; and what that predicts
of the times of decoding (training/decode_cost.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.rollout import CASES
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.cli.planned import Planned
from fp8rl_jax.config.combinations import check_planned
from fp8rl_jax.models import PAGE, pages_of
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Batching, Loop, SamplerConfig
from fp8rl_jax.rollout.memory_plan import RolloutPlan, gib, plan_rollout
from fp8rl_jax.training.decode_cost import decode_seconds
from fp8rl_jax.training.step_cost import EFFICIENCY, Gpu

_BESIDE = ("fp8", "bf16")  # names of CASES


@dataclasses.dataclass(frozen=True)
class ConfigPlan:
    """The plans of a config on a mesh.

    Attributes:
      planned: the whole configuration, and the mesh.
      plans: {name of a recipe: its plan}; the first is the config's own.
      cases: {name of CASES: its plan}, the learner in the same recipe.
    """

    planned: Planned
    plans: dict[str, RolloutPlan]
    cases: dict[str, RolloutPlan]

    @property
    def own(self) -> RolloutPlan:
        return next(iter(self.plans.values()))

    @property
    def half(self) -> int:
        """Half of the tokens that a sequence can have."""
        return math.ceil(self.own.tokens / 2)

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
    others = ("tensor parallelism", "routing replay")
    check_planned(resolved, "continuous batching", others, "fp8rl plan --rollout")
    sampler = SamplerConfig(rollout.max_new_tokens, rollout.group_size, (), 0)
    slots = rollout.slots or rollout.prompts_per_step * rollout.group_size
    sizes = Batching(slots, rollout.pages, prefill_chunk=rollout.prefill_chunk)

    def plan(recipe: Recipe, learner: Recipe) -> RolloutPlan:
        on_gpu = dataclasses.replace(recipe, kernels="triton")
        return plan_rollout(
            Loop(resolved.model, on_gpu, sampler),
            learner,
            mesh,
            prompt_tokens=rollout.max_prompt_tokens,
            batching=sizes,
            memory=memory,
            reference=resolved.algorithm.needs_reference,
            offload=planned.config.learner.offload,
        )

    own = resolved.rollout_recipe
    plans = {f"{own.name} *": plan(own, resolved.learner_recipe)}
    recipes = {name: make() for name, make in CASES.items()}
    cases = {name: plan(recipe, recipe) for name, recipe in recipes.items()}
    for name in _BESIDE:
        recipe = recipes[name]
        if recipe != dataclasses.replace(own, kernels=recipe.kernels):
            plans[recipe.name] = cases[name]
    return ConfigPlan(planned, plans, cases)


def format_plans(found: ConfigPlan) -> str:
    """The table of `fp8rl plan --rollout`."""
    own, count, half = found.own, found.planned.mesh.size, found.half
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
    return "\n".join(
        [
            f"{count} device{'s' * (count > 1)} of {gib(own.memory or 0)} (mesh: "
            f"{found.planned.mesh_text}); figures of each.",
            f"A sequence: {own.tokens} tokens at most, {pages_of(own.tokens)} pages of {PAGE}. A "
            f"step: {found.samples} samples, of which {own.slots} decode at a time.",
            "",
            *text_table(("", *found.plans), *rows),
            "",
            "* the config's own recipe (precision.rollout)",
        ]
    )


def _decode_rows(
    found: ConfigPlan, gpu: Gpu, label: str, sequences: list[int]
) -> Iterator[tuple[str, ...]]:
    """Rows of a decode step with so many sequences in each of CASES; dashes for none."""
    model, mesh = found.planned.resolved.model, found.planned.mesh
    steps = [
        decode_seconds(model, CASES[case](), mesh, plan, count, found.half, gpu)
        for (case, plan), count in zip(found.cases.items(), sequences, strict=True)
    ]
    yield label, *(f"{count:,}" for count in sequences)

    def row(name: str, figures: Iterable[float], form: str) -> tuple[str, ...]:
        pairs = zip(figures, sequences, strict=True)
        return f"  {name}", *(form.format(x) if count else "-" for x, count in pairs)

    for part in steps[0]:
        yield row(part, (1e3 * step[part] for step in steps), "{:.3g} ms")
    totals = [sum(step.values()) for step in steps]
    yield row("a step", (1e3 * total for total in totals), "{:.3g} ms")
    rates = [count / total for count, total in zip(sequences, totals, strict=True)]
    if rates[0]:
        times = (rates[0] / x if x else 0.0 for x in rates)
        yield row("time of a token over bf16's", times, "{:.2f}")
        yield row("tokens/s over bf16's", (x / rates[0] for x in rates), "{:.2f}")


def format_decode(found: ConfigPlan, gpu: Gpu) -> str:
    """The predicted times of decoding: equal numbers of sequences, and as many as fit."""
    fitting = [plan.slots_of(found.half) or 0 for plan in found.cases.values()]
    reached = ", ".join(f"{n} {EFFICIENCY[n]:.0%}" for n in ("memory", "products", "attention"))
    return "\n".join(
        [
            f"Decoding on each {gpu.name}, sequences of {found.half} tokens on average: a "
            "prediction from bytes and FLOPs, not a measurement.",
            "",
            *text_table(
                ("", *found.cases),
                *_decode_rows(found, gpu, "equal sequences", [found.own.slots] * len(fitting)),
                *_decode_rows(found, gpu, "sequences that fit", fitting),
            ),
            "",
            "fp8_linears: weights and activations of linear layers in FP8 (W8A8); fp8_kv: the KV "
            "cache alone; fp8: both.",
            f"Constants ({gpu.name}'s data sheet): {gpu.speed}; assumed to be reached: {reached}.",
        ]
    )


def describe_allocation(found: ConfigPlan) -> str:
    """What the sampler allocates for the config as it is.

    Raises:
      UserError: it cannot.
    """
    own, devices = found.own, found.planned.mesh.size
    rollout, pages = found.planned.config.rollout, own.pages
    if not rollout.slots:
        needed = found.samples * pages_of(own.tokens)
        cache = (
            f"rollout.slots is 0: the sampler allocates a cache for all {found.samples} samples at "
            f"once, {gib(needed * own.page)} a device"
        )
        if needed <= (own.room or 0):
            return f"{cache}, which fits"
        fitting = own.slots_of(found.half) or 1  # at half the length
        return (
            f"{cache}, which does not fit; continuous batching would do best with "
            f"rollout.slots={devices * min(found.samples, fitting)}"
        )
    pages = rollout.pages // devices or pages
    if pages > (own.room or 0):
        raise UserError(
            f"rollout.pages is {rollout.pages}, {pages} a device, and {own.room} fit: write at "
            f"most {(own.room or 0) * devices}, or 0"
        )
    return (
        f"The sampler allocates {own.slots} slots and {pages} pages a device, "
        f"{gib(pages * own.page)} ({own.wanted} pages would hold every slot's whole sequence)"
    )
