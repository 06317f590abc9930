"""`fp8rl plan --rollout`: memory that a config's rollout needs on a device, without that device.

Prints the plan by which a run allocates (plan/rollout.py), for GPUs of a given memory and a mesh of
any size, in the config's recipe, in FP8 and in BF16; and predicts decode times (plan/times.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.models import PAGE, pages_of
from fp8rl_jax.plan.bytes import gib
from fp8rl_jax.plan.gpus import DECODE_GAP, DECODE_KERNEL, DECODE_MEMORY, DECODE_RATES, EFFICIENCY
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.plan.rollout import RolloutPlan
from fp8rl_jax.plan.times import decode_seconds
from fp8rl_jax.rollout.cases import CASES


def format_plans(planned: Planned, plan: RolloutPlan, cases: dict[str, RolloutPlan]) -> str:
    """Returns the table of `fp8rl plan --rollout`; `plan_rollouts` makes `plan` and `cases`."""
    count = planned.mesh.size
    recipe = planned.resolved.rollout_recipe
    plans = {f"{recipe.name} *": plan}
    for name in ("fp8", "bf16"):
        other = CASES[name]()
        if other != dataclasses.replace(recipe, kernels=other.kernels):
            plans[other.name] = cases[name]
    figures: dict[str, Callable[[RolloutPlan], str]] = {
        "weights": lambda p: gib(p.weights),
        "train state": lambda p: gib(p.train_state),
        "workspace, about": lambda p: gib(p.workspace),
        "a page": lambda p: f"{p.page / 2**10:,.1f} KiB",
        "KV of a token": lambda p: f"{p.page / PAGE / 2**10:,.2f} KiB",
        "pages that fit": lambda p: f"{p.fitting:,}",
        f"slots of {plan.tokens} tokens": lambda p: f"{p.slots_of(plan.tokens):,}",
        f"slots of {plan.half} tokens": lambda p: f"{p.slots_of(plan.half):,}",
    }
    return "\n".join(
        [
            f"{count} device{'s' * (count > 1)} of {gib(planned.memory)}, 92% of it usable (mesh: "
            f"{planned.mesh_text}); figures of each.",
            f"A sequence: {plan.tokens} tokens at most, {pages_of(plan.tokens)} pages of {PAGE}. A "
            f"step: {planned.samples} samples, of which {plan.slots} decode at a time.",
            "",
            *text_table(
                [
                    ("", *plans),
                    *((name, *map(figure, plans.values())) for name, figure in figures.items()),
                ]
            ),
            "",
            "* the config's own recipe (precision.rollout)",
        ]
    )


def _decode_rows(
    planned: Planned, half: int, label: str, sequences: list[int]
) -> Iterator[tuple[str, ...]]:
    """Yields the rows of a decode step; `sequences`: their number in each of CASES (0: dashes)."""
    steps = [
        decode_seconds(planned.resolved.model, make(), planned.mesh, count, half, planned.gpu)
        for make, count in zip(CASES.values(), sequences, strict=True)
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


def format_decode(planned: Planned, rollout: RolloutPlan, cases: dict[str, RolloutPlan]) -> str:
    """Returns the predicted times of decoding equal numbers of sequences, and as many as fit."""
    half = rollout.half
    fitting = [plan.slots_of(half) or 0 for plan in cases.values()]
    names = [name for name in EFFICIENCY if name != "links"]
    reached = ", ".join(f"{name} {EFFICIENCY[name]:.0%}" for name in names)
    rates = ", ".join(f"{name} {rate / 1e12:g} TB/s" for name, rate in DECODE_RATES.items())
    return "\n".join(
        [
            f"Decoding on each {planned.gpu.name}, sequences of {half} tokens on average: a "
            "prediction from bytes, FLOPs and launches, not a measurement.",
            "",
            *text_table(
                [
                    ("", *cases),
                    *_decode_rows(planned, half, "equal sequences", [rollout.slots] * len(fitting)),
                    *_decode_rows(planned, half, "sequences that fit", fitting),
                ]
            ),
            "",
            "fp8_linear: weights and activations of linear layers in FP8 (W8A8); fp8_kv: the KV "
            "cache alone; fp8: both.",
            f"Constants ({planned.gpu.name}'s data sheet): {planned.gpu.speed}; reached, as on one "
            f"H200: {reached}; in decoding {rates}, at most {DECODE_MEMORY:.0%} of the memory's; "
            f"{1e6 * DECODE_KERNEL:g} us for another kernel, {1e6 * DECODE_GAP:g} us for a launch.",
        ]
    )


def describe_allocation(planned: Planned, plan: RolloutPlan) -> str:
    """Returns a sentence on what the sampler allocates for the configuration.

    Raises:
      UserError: `rollout.pages` do not fit.
    """
    rollout = planned.config.rollout
    devices = planned.mesh.size
    pages = plan.pages
    if not rollout.slots:
        needed = planned.samples * pages_of(plan.tokens)
        cache = (
            "rollout.slots is 0: the sampler allocates a cache for all "
            f"{planned.samples} samples at once, {gib(needed * plan.page)} a device"
        )
        if needed <= (plan.fitting or 0):
            return f"{cache}, which fits"
        fitting = plan.slots_of(plan.half) or 1  # at half the length
        return (
            f"{cache}, which does not fit; continuous batching would do best with "
            f"rollout.slots={devices * min(planned.samples, fitting)}"
        )
    pages = rollout.pages // devices or pages
    if pages > (plan.fitting or 0):
        raise UserError(
            f"rollout.pages is {rollout.pages}, {pages} a device, and {plan.fitting} fit: write at "
            f"most {(plan.fitting or 0) * devices}, or 0"
        )
    return (
        f"The sampler allocates {plan.slots} slots and {pages} pages a device, "
        f"{gib(pages * plan.page)} ({plan.wanted} pages would hold every slot's whole sequence)"
    )
