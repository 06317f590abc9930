"""`fp8rl plan`: what a config's rollout and learner need of GPUs that need not be there."""

from __future__ import annotations

import argparse
import math

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import note, read_config
from fp8rl_jax.cli.plan_learner import (
    LearnerConfigPlan,
    check_fits,
    format_learner,
    plan_learner_config,
)
from fp8rl_jax.cli.plan_rollout import (
    ConfigPlan,
    describe_allocation,
    format_decode,
    format_plans,
    plan_config,
)
from fp8rl_jax.cli.planned import Planned, read_planned
from fp8rl_jax.training.decode_cost import decode_seconds
from fp8rl_jax.training.described import on_gpu
from fp8rl_jax.training.step_cost import GPUS, HOST_DEVICES, Gpu


def _check(values: argparse.Namespace) -> None:
    """Raises UserError for a number that says nothing."""
    if values.memory_gb is not None and not 0 < values.memory_gb < 2**20:
        raise UserError(
            f"fp8rl plan: --memory-gb is {values.memory_gb}; write the memory of a GPU, such as 80"
        )
    if values.compile and values.rollout and not values.learner:
        raise UserError(
            "fp8rl plan: --compile sets the compiler's figures beside the learner's estimate: "
            "leave --rollout out, or write --learner"
        )
    for name in ("devices", "hosts"):
        value = getattr(values, name)
        if value is not None and value < 1:
            raise UserError(f"fp8rl plan: --{name} is {value}; write at least 1")


def _hosts(values: argparse.Namespace, planned: Planned) -> int:
    """Hosts of the devices, in equal numbers; by default of eight devices each, or of fewer.

    Raises:
      UserError: `--hosts` does not divide the devices.
    """
    count = planned.mesh.size
    least = math.ceil(count / HOST_DEVICES)
    hosts = values.hosts or next(n for n in range(least, count + 1) if count % n == 0)
    if count % hosts:
        raise UserError(
            f"fp8rl plan: --hosts is {hosts}, which does not divide the {count} devices of the "
            "mesh: write a number that does"
        )
    return hosts


def _plan_rollout(planned: Planned, memory: int, gpu: Gpu) -> ConfigPlan:
    found = plan_config(planned, memory)
    print(format_plans(found))
    print()
    print(format_decode(found, gpu))
    print()
    print(describe_allocation(found))
    return found


def _describe_step(rollout: ConfigPlan, learner: LearnerConfigPlan) -> str:
    """The predicted times of an RL step and of the run: decoding, then the updates."""
    planned, own, cost = learner.planned, rollout.own, learner.cost
    algo, steps = planned.config.algo, planned.config.run.steps
    decode_step = decode_seconds(
        planned.resolved.model,
        on_gpu(planned.resolved.rollout_recipe),
        planned.mesh,
        own,
        own.slots,
        rollout.half,
        learner.gpu,
    )
    count = math.ceil(rollout.samples / own.slots) * planned.config.rollout.max_new_tokens
    decoding, updates = count * sum(decode_step.values()), algo.epochs * algo.num_minibatches
    least, most = (decoding + updates * x for x in (cost.least_seconds, cost.most_seconds))
    return (
        f"An RL step takes {least:.3g} to {most:.3g} s: {decoding:.3g} s for {count:,} decode "
        "steps (responses of the greatest length), "
        f"{updates * cost.least_seconds:.3g} to {updates * cost.most_seconds:.3g} s for {updates} "
        f"update{'s' * (updates > 1)}.\n"
        f"The run's {steps:,} steps take {least * steps / 3600:.3g} to {most * steps / 3600:.3g} "
        "hours.\n"
        "Predicted from bytes and FLOPs, not measured; left out: prefill, scores of old or "
        "reference log-probabilities, rewards, evaluations, checkpoints, compilation."
    )


def _plan_learner(found: LearnerConfigPlan, compiles: bool) -> list[str]:
    """Prints the learner's half; what is wrong with it, if anything is."""
    print(format_learner(found))
    if compiles:
        from fp8rl_jax.cli.plan_compile import compile_programs

        print()
        compile_programs(found, note)
    try:
        print(check_fits(found))
    except UserError as error:
        return [str(error)]
    return []


def plan(values: argparse.Namespace) -> int:
    """`fp8rl plan`; returns the exit status.

    Raises:
      UserError: something in the configuration cannot work, or does not fit.
    """
    _check(values)
    both = not (values.rollout or values.learner)
    planned = read_planned(read_config("plan", values), values.devices)
    gpu, hosts = GPUS[values.gpu], _hosts(values, planned)
    memory = int((values.memory_gb or gpu.memory) * 2**30)
    problems, rollout = [], None
    if values.rollout or both:
        try:
            rollout = _plan_rollout(planned, memory, gpu)
        except UserError as error:  # the learner is printed all the same
            problems.append(str(error))
    if values.learner or both:
        if not values.learner or values.rollout:
            print()
        learner = plan_learner_config(planned, memory, gpu, hosts)
        problems += _plan_learner(learner, values.compile)
        if rollout and not problems:
            print(f"\n{_describe_step(rollout, learner)}")
    if problems:
        raise UserError("; ".join(problems))
    return 0
