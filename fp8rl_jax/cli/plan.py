"""`fp8rl plan`: predicts memory and times of a config's rollout and learner on GPUs that this
machine need not have."""

from __future__ import annotations

import argparse
import math

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import note, read_config
from fp8rl_jax.cli.plan_learner import check_fits, format_compiled, format_learner
from fp8rl_jax.cli.plan_rollout import describe_allocation, format_decode, format_plans
from fp8rl_jax.plan.gpus import GPUS
from fp8rl_jax.plan.learner import plan_learner
from fp8rl_jax.plan.planned import Planned, read_planned
from fp8rl_jax.plan.rollout import RolloutPlan, plan_rollouts
from fp8rl_jax.plan.times import StepCost, decode_seconds, step_cost


def _check(values: argparse.Namespace) -> None:
    """Raises UserError for options out of bounds or that contradict each other."""
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


def _describe_step(planned: Planned, rollout: RolloutPlan, cost: StepCost) -> str:
    """Returns the predicted times of an RL step (decoding, then updates) and the run, as text."""
    config = planned.config
    sampling = planned.sampling
    decode_step = decode_seconds(
        planned.resolved.model,
        planned.resolved.rollout_recipe,
        sampling.mesh,
        rollout.slots,
        rollout.half,
        planned.gpu,
    )
    count = math.ceil(sampling.samples / rollout.slots) * config.rollout.max_new_tokens
    decoding = count * sum(decode_step.values())
    updates = config.algo.epochs * config.algo.num_minibatches
    steps = config.run.steps
    join = max if config.mesh.rollout and config.rollout.ahead else sum  # at the same time
    least = join((decoding, updates * cost.least_seconds))
    most = join((decoding, updates * cost.most_seconds))
    return (
        f"An RL step takes {least:.3g} to {most:.3g} s: {decoding:.3g} s for {count:,} decode "
        "steps (responses of the greatest length), "
        f"{updates * cost.least_seconds:.3g} to {updates * cost.most_seconds:.3g} s for {updates} "
        f"update{'s' * (updates > 1)}.\n"
        f"The run's {steps:,} steps take {least * steps / 3600:.3g} to {most * steps / 3600:.3g} "
        "hours.\n"
        "Predicted from bytes, FLOPs and launches, not measured; left out: prefill, scores of old "
        "or reference log-probabilities, rewards, evaluations, checkpoints, compilation."
    )


def plan(values: argparse.Namespace) -> int:
    """Runs `fp8rl plan`; returns the exit status.

    Raises:
      UserError: something in the configuration cannot work, or does not fit.
    """
    _check(values)
    both = not (values.rollout or values.learner)
    planned = read_planned(
        read_config("fp8rl plan", values),
        values.devices,
        values.hosts,
        GPUS[values.gpu],
        values.memory_gb,
    )
    problems = []
    rollout = None
    if values.rollout or both:
        try:
            sampling = planned.sampling
            rollout, cases = plan_rollouts(sampling)
            print(format_plans(sampling, rollout, cases))
            print(f"\n{format_decode(sampling, rollout, cases)}\n")
            print(describe_allocation(sampling, rollout))
        except UserError as error:  # the learner is printed all the same
            problems.append(str(error))
    if values.learner or both:
        if not values.learner or values.rollout:
            print()
        learner = plan_learner(planned.resolved, planned.mesh)
        cost = step_cost(planned, learner)
        print(format_learner(planned, learner, cost))
        if values.compile:
            print()
            print("\n".join(format_compiled(planned, learner, note)))
        try:
            print(check_fits(planned, learner))
        except UserError as error:
            problems.append(str(error))
        if rollout and not problems:
            print(f"\n{_describe_step(planned, rollout, cost)}")
    if problems:
        raise UserError("; ".join(problems))
    return 0
