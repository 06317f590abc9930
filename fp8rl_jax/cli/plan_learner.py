"""`fp8rl plan --learner`: memory that a config's train step needs on a device, and its cost.

Memory is from plan/learner.py; FLOPs, traffic and times from plan/times.py. If the step does not
fit, the error message names changes of the config with which it does, the cheapest first
(plan/fixes.py). `--compile` adds XLA's plans for train and decode step on H200s (training/aot.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.config.adapters import trains_adapters
from fp8rl_jax.plan.bytes import gib
from fp8rl_jax.plan.fixes import find_fixes
from fp8rl_jax.plan.gpus import EFFICIENCY, HOST_LINK, LAUNCH, NETWORK, NVLINK
from fp8rl_jax.plan.learner import LearnerPlan, Workload
from fp8rl_jax.plan.planned import Planned
from fp8rl_jax.plan.times import StepCost

_MASTERS = {False: "masters, float32", True: "frozen base, and adapters in float32"}


def format_learner(planned: Planned, plan: LearnerPlan, cost: StepCost) -> str:
    """Returns the tables of `fp8rl plan --learner`."""
    work = plan.work
    rows = planned.resolved.minibatch_samples
    memory = [
        (_MASTERS[trains_adapters(planned.config)], plan.masters),
        ("Adam's moments", plan.moments),
        ("reference policy, states, batch", plan.others),
        ("gradients, float32", plan.gradients),
        (f"own weights, {planned.resolved.learner_recipe.name}", plan.own_weights),
        ("inputs and attention of the layers, about", plan.layer_inputs),
        ("embedding and head, gathered", plan.tables),
        ("at work: the head, about", plan.head),
        ("at work: the largest layer, about", plan.layer),
        ("at work: the optimiser, about", plan.optimizer),
        ("fragments, a tenth of the temporary", plan.fragments),
        ("together, with the largest at work", plan.needed),
        ("usable, 92% of the memory", planned.usable),
    ]
    if plan.host_moments:
        memory.append(("Adam's moments, in the host's memory", plan.host_moments))
    hosts = f"on {planned.hosts} host{'s' * (planned.hosts > 1)}"
    return "\n".join(
        [
            f"Learner: {planned.mesh.size} {planned.gpu.name} of {gib(planned.memory)} {hosts} "
            f"(mesh: {planned.mesh_text}); an estimate, figures of each device.",
            f"An update: {rows} sequences of {work.prompt + work.response} tokens at most, "
            f"{rows * (work.prompt + work.response):,} tokens with their padding; "
            f"{_at_a_time(work)}; remat {work.remat}.",
            "",
            *text_table([(name, gib(size)) for name, size in memory]),
            "",
            *_format_cost(planned, plan, cost),
        ]
    )


def _at_a_time(work: Workload) -> str:
    parts = f"{work.micro_batches} micro-batch{'es' * (work.micro_batches > 1)}"
    if work.capacity:
        each = f"{work.capacity:,} tokens at a time, without padding"
        return f"a device takes {each}, in at most {parts}"
    return f"a device takes {work.rows} at a time, in {parts}"


def _format_cost(planned: Planned, plan: LearnerPlan, cost: StepCost) -> Iterator[str]:
    gpu = planned.gpu
    yield from text_table(
        [("of an update", "FLOPs"), *((name, f"{value:.3g}") for name, value in cost.flops.items())]
    )
    yield ""
    if cost.transfers:
        yield from text_table(
            [
                ("received over", "inside hosts", "between hosts"),
                *((axis, *map(gib, sizes)) for axis, sizes in cost.transfers.items()),
            ]
        )
        yield ""
    parts = {**cost.seconds, **cost.moving}
    yield from text_table(
        [("takes about", ""), *((name, f"{seconds:.3g} s") for name, seconds in parts.items())]
    )
    rate = cost.tokens / cost.least_seconds
    yield (
        f"An update takes {cost.least_seconds:.3g} s if transfers overlap with all else, and "
        f"{cost.most_seconds:.3g} s if they do not; at best {rate:,.0f} tokens/s."
    )
    efficiency = ", ".join(f"{name} {value:.0%}" for name, value in EFFICIENCY.items())
    host = f", {HOST_LINK / 1e9:.0f} GB/s from its host" * (plan.host_moments > 0)
    yield (
        f"Constants ({gpu.name}'s data sheet): {gpu.speed}; a GPU receives "
        f"{NVLINK / 1e9:.0f} GB/s by NVLink, {NETWORK / 1e9:.0f} GB/s from other hosts{host}; "
        f"reached, as on one H200 (links: assumed): {efficiency}; {1e6 * LAUNCH:g} us for a launch."
    )


def check_fits(planned: Planned, plan: LearnerPlan) -> str:
    """Returns the verdict that the train step fits.

    Raises:
      UserError: it does not fit; the message says what would make it fit.
    """
    text = f"{gib(plan.needed)} a device, and {gib(planned.usable)} are usable"
    if plan.needed <= planned.usable:
        return f"The train step fits: it needs {text}."
    fixes = [f"{words} ({gib(needed)})" for words, needed in find_fixes(planned)]
    advice = "write " + ", or ".join(fixes) if fixes else "no larger mesh that was tried is enough"
    raise UserError(f"the train step needs {text}: {advice}")


def format_compiled(
    planned: Planned, plan: LearnerPlan, note: Callable[[str], None]
) -> Iterator[str]:
    """Compiles train step and decode step; yields lines that compare XLA's plan with the estimate.

    Args:
      planned: the configuration, and the devices.
      plan: the estimate of the train step.
      note: called with lines of progress.

    Raises:
      UserError: the config asks for another GPU, or JAX's CUDA plugin is not installed.
    """
    if planned.gpu.name != "H200":
        raise UserError(
            f"fp8rl plan: --compile describes an H200, and --gpu is {planned.gpu.name.lower()}: "
            "leave --gpu out, or write --gpu=h200 and --memory-gb for the memory"
        )
    from fp8rl_jax.training import aot

    note("compiling the train step for H200s that are not there ...")
    train = aot.compile_for_h200(aot.trace_train_step, planned)
    note("compiling the decode step ...")
    decode = aot.compile_for_h200(aot.trace_decode_step, planned)
    state = plan.state
    yield from text_table(
        [
            ("compiled for H200", "train step", "estimate", "decode step"),
            ("arguments", gib(train.arguments), gib(state), gib(decode.arguments)),
            ("temporary", gib(train.temporary), gib(plan.needed - state), gib(decode.temporary)),
            ("together", gib(train.needed), gib(plan.needed), gib(decode.needed)),
        ]
    )
    for name, program in (("train step", train), ("decode step", decode)):
        sent = ", ".join(f"{count} {kind}" for kind, count in program.collectives.items())
        yield f"Collectives in the {name}: {sent or 'none'}."
    ratio = plan.needed / train.needed
    yield f"The estimate of the train step is {ratio:.2f} times the compiler's figure."
    if train.layers:
        counts = " and ".join(map(str, train.layers))
        yield (
            f"Extrapolated to {planned.resolved.model.num_hidden_layers} layers from programs of "
            f"{counts} layers; the collectives stand in the latter's text, where those of a loop "
            "run in each of its turns."
        )
