"""`fp8rl plan --compile`: what XLA plans for train and decode step on H200s that are not there.

Programs of a run (training/described.py), compiled to machine code for described devices. Their
memory and collectives stand beside the estimate. A decoder is a loop over its layers, so a large
model is compiled with few layers and extrapolated: memory is linear in their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from fp8rl_jax import deviceless
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.cli.plan_learner import LearnerConfigPlan
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.rollout.memory_plan import gib
from fp8rl_jax.training.described import described_runtime, lower_decode_step, lower_train_step
from fp8rl_jax.training.runtime import Runtime

LARGE = 40e9  # parameters: above it few layers are compiled
_FEW = (2, 4)  # layers beside the first dense ones


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA planned for a program on each device.

    Attributes:
      arguments, temporary: bytes; results that take no argument's place count as temporary.
      collectives: {'all-gather u8': how many stand in the program}.
      layers: that were compiled, where the bytes are extrapolated from them; () for all.
    """

    arguments: float
    temporary: float
    collectives: dict[str, int]
    layers: tuple[int, ...] = ()

    @property
    def needed(self) -> float:
        """Bytes of arguments and temporary arrays together."""
        return self.arguments + self.temporary


def _compile(lowered: jax.stages.Lowered) -> Compiled:
    program = lowered.compile()
    memory = program.memory_analysis()
    sent = deviceless.collectives(program.as_text())
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes + made, sent)


def compile_whole(
    lower: Callable[[Runtime], jax.stages.Lowered], found: LearnerConfigPlan
) -> Compiled:
    """A program of the planned config for H200s, all layers; extrapolated for a large model.

    Args:
      lower: `lower_train_step` or `lower_decode_step`.
      found: the plan with the config, mesh and hosts.

    Raises:
      UserError: JAX's CUDA plugin is not installed.
    """
    resolved = found.planned.resolved
    mesh = deviceless.h200_mesh(dict(found.planned.mesh.shape), found.hosts)
    model = resolved.model
    recipes = (resolved.learner_recipe, resolved.rollout_recipe)
    if parameter_counts(model).total <= LARGE:
        return _compile(lower(described_runtime(resolved, mesh)))
    # Layers under other rules than most are compiled all.
    first = max(model.dense_layers, *(recipe.first_layers for recipe in recipes))
    kept = first + max(recipe.last_layers for recipe in recipes)
    layers = tuple(kept + few for few in _FEW)
    if layers[-1] >= model.num_hidden_layers:
        return _compile(lower(described_runtime(resolved, mesh)))
    few, more = (_compile(lower(described_runtime(resolved, mesh, count))) for count in layers)

    def extrapolated(name: str) -> float:
        slope = (getattr(more, name) - getattr(few, name)) / (layers[1] - layers[0])
        return getattr(more, name) + slope * (model.num_hidden_layers - layers[1])

    return Compiled(extrapolated("arguments"), extrapolated("temporary"), more.collectives, layers)


def compile_programs(found: LearnerConfigPlan, note: Callable[[str], None]) -> None:
    """Compiles train step and decode step, and prints what XLA planned beside the estimate.

    Args:
      found: the plan of the learner.
      note: takes a line that says what is being done.

    Raises:
      UserError: the config asks for another GPU, or JAX's CUDA plugin is not installed.
    """
    if found.gpu.name != "H200":
        raise UserError(
            f"fp8rl plan: --compile describes an H200, and --gpu is {found.gpu.name.lower()}: "
            "leave --gpu out, or write --gpu=h200 and --memory-gb for the memory"
        )
    note("compiling the train step for H200s that are not there ...")
    train = compile_whole(lower_train_step, found)
    note("compiling the decode step ...")
    decode = compile_whole(lower_decode_step, found)
    print("\n".join(format_compiled(found, train, decode)))


def format_compiled(found: LearnerConfigPlan, train: Compiled, decode: Compiled) -> list[str]:
    """The table of what XLA planned."""
    plan, state = found.plan, found.plan.state
    columns = [
        ("compiled for H200", "train step", "estimate", "decode step"),
        ("arguments", gib(train.arguments), gib(state), gib(decode.arguments)),
        ("temporary", gib(train.temporary), gib(plan.needed - state), gib(decode.temporary)),
        ("together", gib(train.needed), gib(plan.needed), gib(decode.needed)),
    ]
    lines = text_table(*columns)
    for name, program in (("train step", train), ("decode step", decode)):
        sent = ", ".join(f"{count} {kind}" for kind, count in program.collectives.items())
        lines.append(f"Collectives in the {name}: {sent or 'none'}.")
    ratio = plan.needed / train.needed
    lines.append(f"The estimate of the train step is {ratio:.2f} times the compiler's figure.")
    if train.layers:
        total = found.planned.resolved.model.num_hidden_layers
        counts = " and ".join(map(str, train.layers))
        lines.append(
            f"Extrapolated to {total} layers from programs of {counts} layers; the collectives "
            "stand in the latter's text, where those of a loop run in each of its turns."
        )
    return lines
