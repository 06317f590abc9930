"""Loads the policy that a configuration names: the newest checkpoint in `run.dir`, or a released
model. Either gets a Runtime and a refit, so that the training sampler's program can sample it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax
from flax import traverse_util

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import of_sequences
from fp8rl_jax.config.functions import named_functions
from fp8rl_jax.data import Prompt, encode_prompt, encode_text, pad_rows
from fp8rl_jax.learner import TrainState
from fp8rl_jax.models.masters import is_adapted, merged
from fp8rl_jax.models.stacks import Path, path_of
from fp8rl_jax.policy.source import is_released
from fp8rl_jax.quant.kv import is_fresh, scales_in, with_scales
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.run_directory import as_options, as_saved, differences, run_config
from fp8rl_jax.training.runtime import Runtime, make_runtime

_ROUND = 16  # prompt slots are multiples of this, so that fewer programs are compiled
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy with its prompts, for `generate` and `evaluate`.

    Attributes:
      runtime: Runtime whose prompt slots hold the longest prompt.
      weights: rollout weights, from refit.
      rows: token ids of each prompt.
      phase, step: training phase and step of the weights; 'rl' and 0 for a released model.
    """

    runtime: Runtime
    weights: Any
    rows: list[list[int]]
    phase: str
    step: int


def load_policy(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    note: Note = lambda text: None,
    as_questions: bool = False,
) -> Policy:
    """Loads the policy in `run.dir` for some prompts.

    Args:
      runtime: made from the policy's configuration (`load_config` or `directory_config`).
      prompts: texts, or questions of a task, which may be conversations.
      note: called with a line on the source of the weights.
      as_questions: encode prompts as a task's questions; if False, a released model without a chat
        template gets them as texts to continue.

    Raises:
      UserError: the checkpoint or a prompt cannot be used.
    """
    config = runtime.config
    released = is_released(config)
    plain = released and runtime.chat is None and not as_questions
    rows = [
        encode_text(text, runtime.tokenizer)
        if plain and isinstance(text, str)
        else encode_prompt(text, runtime.tokenizer, runtime.chat)
        for text in prompts
    ]
    runtime = runtime.with_slots(max_prompt_tokens=round_slots(max(map(len, rows))))
    if released:
        state = runtime.engine.new_state(runtime.engine.initial_params(), optax.identity())
        phase = "rl"
        note(f"weights of {config.model.checkpoint}")
    else:
        state, phase = load_trained(
            runtime, pathlib.Path(config.run.dir), note, config.eval.average_last
        )
    if not is_fresh(state.scaling_state, int(state.step)):
        state = runtime.engine.calibrate(
            state, of_sequences(*pad(runtime, rows[: config.eval.batch_size]))
        )
    return Policy(runtime, runtime.engine.refit(state).weights, rows, phase, int(state.step))


class Trained(NamedTuple):
    """The newest checkpoints of a run.

    Attributes:
      directory: the run's directory.
      runtime: Runtime of the run's saved configuration, on the requested mesh.
      checkpoints: the run's checkpoints; the caller closes them.
      numbers: numbers of the checkpoints whose mean weights were asked for, the newest last.
      phase, step: training phase and step of the newest.
    """

    directory: pathlib.Path
    runtime: Runtime
    checkpoints: Checkpoints
    numbers: list[int]
    phase: str
    step: int

    @property
    def like(self) -> TrainState:
        """What a checkpoint's state is restored as."""
        return self.runtime.engine.like(optimizer_of_phase(self.runtime.config, self.phase))

    @property
    def text(self) -> str:
        """The source of the weights, as a line of progress."""
        of = f", the mean of {len(self.numbers)} checkpoints, the last" if self.numbers[1:] else ""
        return f"weights of {self.directory}{of} after {self.phase} step {self.step}"

    def state(self) -> TrainState:
        """Returns the newest checkpoint's state."""
        return self.checkpoints.restore(self.numbers[-1], self.like)

    def read_params(self) -> Callable[[Path], np.ndarray]:
        """Returns `Checkpoints.read_params` of the newest checkpoint, or of the mean of several,
        which is summed in float64."""
        like = self.like
        if is_adapted(like.params):
            params = self.checkpoints.restore(self.numbers[-1], like).params
            flat = traverse_util.flatten_dict(jax.device_get(exact_jit(merged)(params)))
            return flat.__getitem__
        reads = [self.checkpoints.read_params(number, like) for number in self.numbers]

        def mean(path: Path) -> np.ndarray:
            total = reads[0](path).astype(np.float64)
            for read in reads[1:]:
                total += read(path)
            return (total / len(reads)).astype(np.float32)

        return mean if reads[1:] else reads[0]


def open_trained(
    runtime: Runtime, directory: pathlib.Path, count: int = 1, newest: int | None = None
) -> Trained:
    """Opens the `count` newest checkpoints of a run, or those up to number `newest`, without
    reading arrays.

    Raises:
      UserError: there are not as many checkpoints of the newest's phase, or model or data settings
        differ from `runtime`'s.
    """
    if not os.path.isdir(directory / "checkpoints"):
        raise UserError(
            f"{directory} holds no checkpoints: train first, or name the directory of a run with "
            "--checkpoint or --config.run.dir"
        )
    config = runtime.config
    # The functions that the requested configuration names have been permitted already.
    saved_as = run_config(directory, named_functions(config))
    sides = as_saved(saved_as), as_saved(config)
    changed = differences(*({name: c[name] for name in ("model", "data")} for c in sides))
    if changed:
        raise UserError(
            f"the run in {directory} was trained with another config {as_options(changed)}, or "
            f"--checkpoint={directory} without a config"
        )
    saved_as.mesh = ml_collections.ConfigDict(config.mesh.to_dict())
    saved = make_runtime(saved_as, with_questions=False)
    checkpoints = Checkpoints(directory / "checkpoints", saved_as.run.keep_checkpoints)
    numbers = checkpoints.newest(count, newest)
    if not numbers:
        raise UserError(f"{directory / 'checkpoints'} holds no complete checkpoint: train first")
    metas = [checkpoints.read_meta(number) for number in numbers]
    phase = metas[-1]["phase"]
    there = sum(meta["phase"] == phase for meta in metas)
    if there < count:
        raise UserError(
            f"eval.average_last is {count}, and {directory / 'checkpoints'} holds {there} of phase "
            f"{phase}: set eval.average_last={there}, or save more often "
            "(run.checkpoint_every) and keep them (run.keep_checkpoints)"
        )
    return Trained(directory, saved, checkpoints, numbers, phase, metas[-1]["step"])


def load_trained(
    runtime: Runtime, directory: pathlib.Path, note: Note, count: int = 1
) -> tuple[TrainState, str]:
    """Returns the state in a run's newest checkpoint, without the optimiser's, and its phase. The
    weights are the mean of the `count` newest.

    `runtime` may have other recipes and another mesh than the run. With another recipe, scaling
    states begin anew, and scales of keys and values are left out.

    Raises:
      UserError: as for `open_trained`, or the checkpoint is damaged.
    """
    found = open_trained(runtime, directory, count)
    saved = found.runtime
    state = found.state()
    if averaged := len(found.numbers) > 1:
        read = found.read_params()
        state = dataclasses.replace(state, opt_state=None)
        state = dataclasses.replace(
            state,
            params=jax.tree_util.tree_map_with_path(
                lambda keys, x: processes.place(read(path_of(keys)), x.sharding), state.params
            ),
        )
    found.checkpoints.close()
    note(found.text)
    same = runtime.resolved.learner_recipe == saved.resolved.learner_recipe
    scaling_state = state.scaling_state if same else None
    loaded = runtime.engine.new_state(state.params, optax.identity(), scaling_state)
    kept: dict[str, Any] = {"step": state.step}
    # Fine-tuning calibrates KV scales at evaluations only; between them the scales are outdated.
    same = runtime.resolved.rollout_recipe == saved.resolved.rollout_recipe and not averaged
    if same and is_fresh(state.scaling_state, int(state.step)):
        kept["scaling_state"] = with_scales(loaded.scaling_state, scales_in(state.scaling_state))
    return dataclasses.replace(loaded, **kept), found.phase


def round_slots(length: int) -> int:
    """Returns the number of prompt slots for prompts of up to `length` tokens."""
    return -(-length // _ROUND) * _ROUND


def pad(runtime: Runtime, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens as right-padded (B, slots) int32, and lengths (B,); repeats the last
    row until the mesh divides B."""
    count = len(rows) + -len(rows) % batch_divisor(runtime.mesh)
    rows = rows + rows[-1:] * (count - len(rows))
    return pad_rows(rows, round_slots(max(map(len, rows))), runtime.tokenizer.pad_id)
