"""A policy by its configuration: the newest checkpoint in `run.dir`, or a released model.

Both go through a Runtime and refit, so they are sampled by the program that training samples with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from fp8rl_jax.config import checks, saved_config
from fp8rl_jax.data import Prompt, encode_prompt, encode_text, pad_rows
from fp8rl_jax.errors import UserError
from fp8rl_jax.policy.source import is_released
from fp8rl_jax.quant import KVScales
from fp8rl_jax.rollout import is_fresh
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.run_directory import as_saved, first_difference, read_saved_config
from fp8rl_jax.training.runtime import Runtime, make_runtime

_ROUND = 16  # prompt slots come in multiples of this, so that fewer programs are compiled
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run's newest checkpoint holds of its policy.

    Attributes:
      params: float32 parameters.
      scaling_state: of the learner's scaling policies; None under another recipe than the run's.
      kv_scales: calibrated on these parameters; None if there are none, or other recipes.
      phase, step: of training.
    """

    params: Any
    scaling_state: dict | None
    kv_scales: KVScales | None
    phase: str
    step: int


@dataclasses.dataclass(frozen=True)
class Policy:
    """What `generate` and `evaluate` take.

    Attributes:
      runtime: with prompt slots for the prompts.
      weights: rollout weights, from refit.
      rows: token ids of each prompt.
      phase, step: of training; 'rl' and 0 of a released model.
    """

    runtime: Runtime
    weights: Any
    rows: list[list[int]]
    phase: str
    step: int


@contextlib.contextmanager
def load_policy(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    note: Note = lambda text: None,
    as_questions: bool = False,
) -> Iterator[Policy]:
    """The policy in `run.dir`, ready for some prompts, under its mesh.

    Args:
      runtime: made from the configuration of the policy (`load_config` or `directory_config`).
      prompts: texts; of a task also conversations.
      note: told where the weights come from.
      as_questions: prompts are a task's questions; else those of a released model are text to go
        on with.

    Raises:
      UserError: something in the checkpoint or a prompt cannot work.
    """
    config = runtime.config
    released = is_released(config)
    plain = released and runtime.chat is None and not as_questions
    rows = [
        encode_text(text, runtime.tokenizer)
        if plain
        else encode_prompt(text, runtime.tokenizer, runtime.chat)
        for text in prompts
    ]
    for text, row in zip(prompts, rows, strict=True):
        if not row:
            raise UserError(f"the prompt {text!r} has no token: write something")
    longest = max(map(len, rows))
    checks.check_positions(runtime, longest + config.rollout.max_new_tokens)
    runtime = runtime.with_prompt_slots(_round_slots(longest))
    with jax.set_mesh(runtime.mesh):
        if released:
            trained = Trained(runtime.initial_params(), None, None, "rl", 0)
            note(f"weights of {config.model.checkpoint}")
        else:
            trained = load_trained(runtime, pathlib.Path(config.run.dir), note)
        state = runtime.new_state(trained.params, optax.identity(), trained.scaling_state)
        if trained.kv_scales is not None:
            state = dataclasses.replace(state, kv_scales=trained.kv_scales)
        else:
            few = rows[: config.eval.batch_size]
            state = runtime.calibrate_state(state, *pad(runtime, few))
        weights = runtime.refit_state(state)[0]
        yield Policy(runtime, weights, rows, trained.phase, trained.step)


def load_trained(runtime: Runtime, directory: pathlib.Path, note: Note) -> Trained:
    """The newest checkpoint of a run; recipes and mesh of `runtime` may be others than the run's.

    Raises:
      UserError: there is none, or it is damaged or of another model.
    """
    if not (directory / "checkpoints").is_dir():
        raise UserError(
            f"{directory} holds no checkpoints: train first, or name the directory of a run with "
            "--checkpoint or --config.run.dir"
        )
    config = runtime.config
    theirs = read_saved_config(directory / "config.json")
    ours = as_saved(config)
    difference = first_difference(
        *({section: c.get(section, {}) for section in ("model", "data")} for c in (theirs, ours))
    )
    if difference:
        name, before, now = difference
        raise UserError(
            f"the run in {directory} was trained with {name} = {before!r}, and the config says "
            f"{now!r}: set it back"
        )
    saved_as = saved_config(theirs, f"{directory}/config.json")
    saved_as.mesh = ml_collections.ConfigDict(config.mesh.to_dict())
    saved = make_runtime(saved_as, with_questions=False)
    checkpoints = Checkpoints(directory / "checkpoints", saved_as.run.keep_checkpoints)
    number = checkpoints.latest()
    if number is None:
        raise UserError(f"{directory / 'checkpoints'} holds no complete checkpoint: train first")
    meta = checkpoints.read_meta(number)
    like = saved.new_state(saved.init_params(), optimizer_of_phase(saved_as, meta["phase"])[0])
    state = checkpoints.restore(number, like)
    checkpoints.close()
    note(f"weights of {directory} after {meta['phase']} step {meta['step']}")
    same = runtime.learner_recipe == saved.learner_recipe
    # Between two evaluations of the supervised stage scales are of older weights.
    fresh = runtime.rollout_recipe == saved.rollout_recipe and is_fresh(
        state.kv_scales, int(state.step)
    )
    return Trained(
        state.params, state.scaling_state if same else None, state.kv_scales if fresh else None,
        meta["phase"], meta["step"],
    )  # fmt: skip


def _round_slots(length: int) -> int:
    """Prompt slots for prompts of up to `length` tokens."""
    return -(-length // _ROUND) * _ROUND


def pad(runtime: Runtime, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded (B, slots) int32 and lengths (B,) of rows of tokens; the last row is repeated
    until B divides over the mesh."""
    count = len(rows) + -len(rows) % batch_divisor(runtime.mesh)
    rows = rows + rows[-1:] * (count - len(rows))
    return pad_rows(rows, _round_slots(max(map(len, rows))), runtime.tokenizer.pad_id)
