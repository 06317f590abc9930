"""`fp8rl plan --compile`: what XLA plans for train and decode step on H200s that are not there.

Programs of a run (ahead/programs.py), compiled to machine code for described devices. Their memory
and collectives stand beside the estimate.
"""

from __future__ import annotations

from collections.abc import Callable

from fp8rl_jax.ahead.programs import Compiled, compile_for_h200, trace_decode_step, trace_train_step
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.plan.bytes import gib
from fp8rl_jax.plan.learner import LearnerPlan
from fp8rl_jax.plan.planned import Planned


def compile_programs(planned: Planned, plan: LearnerPlan, note: Callable[[str], None]) -> None:
    """Compiles train step and decode step, and prints what XLA planned beside the estimate.

    Args:
      planned: the configuration, and the devices.
      plan: the estimate of the train step.
      note: takes a line that says what is being done.

    Raises:
      UserError: the config asks for another GPU, or JAX's CUDA plugin is not installed.
    """
    if planned.gpu.name != "H200":
        raise UserError(
            f"fp8rl plan: --compile describes an H200, and --gpu is {planned.gpu.name.lower()}: "
            "leave --gpu out, or write --gpu=h200 and --memory-gb for the memory"
        )
    note("compiling the train step for H200s that are not there ...")
    train = compile_for_h200(trace_train_step, planned)
    note("compiling the decode step ...")
    decode = compile_for_h200(trace_decode_step, planned)
    print("\n".join(format_compiled(planned.resolved.model.num_hidden_layers, plan, train, decode)))


def format_compiled(layers: int, plan: LearnerPlan, train: Compiled, decode: Compiled) -> list[str]:
    """The table of what XLA planned."""
    state = plan.state
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
        counts = " and ".join(map(str, train.layers))
        lines.append(
            f"Extrapolated to {layers} layers from programs of {counts} layers; the collectives "
            "stand in the latter's text, where those of a loop run in each of its turns."
        )
    return lines
