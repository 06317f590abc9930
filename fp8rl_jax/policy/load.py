"""A policy by its directory: a run's newest checkpoint, or a Hugging Face model as it was released.

Both need no config file. A run has saved its own; for a Hugging Face directory the defaults hold,
with the shapes and the tokenizer that it has. Everything else is the same: a Runtime, refit, and
the sampler of training.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from fp8rl_jax.config import default_config, override, saved_config
from fp8rl_jax.config.model_source import check_positions, pretrained_config
from fp8rl_jax.data import encode_prompt, encode_text, pad_rows
from fp8rl_jax.data.pretrained import read_object
from fp8rl_jax.envs import Question, make_questions
from fp8rl_jax.errors import UserError
from fp8rl_jax.policy.inference import trained_params
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.run_directory import read_saved_config
from fp8rl_jax.training.runtime import Runtime, make_runtime

_NEW_TOKENS = 256
_ROUND = 16  # prompt slots come in multiples of this, so that fewer programs are compiled


def policy_config(
    directory: str, fields: Mapping[str, Any], overrides: Sequence[str] = ()
) -> ml_collections.ConfigDict:
    """The configuration that a directory is used under.

    Args:
      directory: of a run, or of a Hugging Face model.
      fields: {'section.field': value} to change.
      overrides: ``--config.section.field=value`` arguments, which win.

    Raises:
      UserError: the directory is neither, or a field is wrong.
    """
    path = pathlib.Path(directory)
    released = pretrained_config(path)
    if released is not None:
        config = default_config()
        config.model.checkpoint, config.data.tokenizer = directory, "checkpoint"
        config.warmup.steps = 0
        most = released.get("max_position_embeddings")
        known = most if isinstance(most, int) else 2 * _NEW_TOKENS
        config.rollout.max_new_tokens = max(min(_NEW_TOKENS, known // 2), 1)
        config.rollout.max_prompt_tokens = 2  # as many as the prompts turn out to need
        _as_released(config, path)
    elif (path / "config.json").is_file():
        saved = path / "config.json"
        config = saved_config(read_saved_config(saved), str(saved))
    else:
        raise UserError(
            f"--checkpoint: {directory} holds no config.json: name the directory of a run, or of a "
            "Hugging Face model"
        )
    config.run.dir = directory
    for name, value in fields.items():
        section, _, field = name.partition(".")
        config[section][field] = value
    override(config, overrides)
    return config


def _as_released(config: ml_collections.ConfigDict, path: pathlib.Path) -> None:
    """top-k and top-p of generation_config.json."""
    settings = read_object(path / "generation_config.json")
    if settings.get("do_sample"):
        for name in ("top_k", "top_p"):
            value = settings.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                config.rollout[name] = type(config.rollout[name])(value)


def usual_temperature(config: ml_collections.ConfigDict) -> float:
    """What a policy is sampled at when nobody says: a run at `rollout.temperature`, a Hugging Face
    model as its generation_config.json says, which is greedily (0) without do_sample."""
    if not is_released(config):
        return config.rollout.temperature
    settings = read_object(pathlib.Path(config.model.checkpoint) / "generation_config.json")
    if not settings.get("do_sample"):
        return 0.0
    value = settings.get("temperature", 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def is_released(config: ml_collections.ConfigDict) -> bool:
    """Whether `policy_config` was given a Hugging Face directory, and not that of a run (which may
    have begun from one)."""
    return pretrained_config(config.run.dir) is not None


@contextlib.contextmanager
def prepare(
    config: ml_collections.ConfigDict,
    prompts: Sequence[str],
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Runtime, Any, list[list[int]], float]]:
    """Everything that `generate` takes, under the mesh of the configuration.

    Yields:
      runtime; rollout weights; token ids of each prompt; the temperature when nobody says one.

    Raises:
      UserError: something in the configuration or a prompt cannot work.
    """
    runtime = make_runtime(config, with_questions=False)
    rows = encode_prompts(runtime, prompts)
    padded = pad(runtime, rows)
    with jax.set_mesh(runtime.mesh):
        weights = load_weights(runtime, *padded, note)
        yield runtime, weights, rows, usual_temperature(config)


def encode_prompts(runtime: Runtime, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts: a run's as its questions, a released model's as text to go on with, or
    either as the user's message under data.chat.

    Raises:
      UserError: a prompt has no token, or prompt and response are longer than the model knows.
    """
    plain = is_released(runtime.config) and runtime.chat is None
    rows = [
        encode_text(text, runtime.tokenizer)
        if plain
        else encode_prompt(text, runtime.tokenizer, runtime.chat)
        for text in texts
    ]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise UserError(f"the prompt {text!r} has no token: write something")
    longest = max(map(len, rows))
    check_positions(runtime.config, longest + runtime.config.rollout.max_new_tokens)
    return rows


def round_slots(length: int) -> int:
    """Prompt slots for prompts of up to `length` tokens."""
    return -(-length // _ROUND) * _ROUND


def load_weights(runtime: Runtime, prompts, lengths, note: Callable[[str], None]):
    """Rollout weights of the directory that `policy_config` was made of.

    Args:
      runtime: of that configuration.
      prompts, lengths: (P, Tp) and (P,), which calibrate KV scales where a recipe needs them.
      note: told where the weights come from.
    """
    config = runtime.config
    if is_released(config):
        params, scaling = runtime.initial_params(), None
        note(f"weights of {config.model.checkpoint}")
    else:
        params, scaling = trained_params(config, pathlib.Path(config.run.dir), note)
    state = runtime.new_state(params, optax.identity(), scaling)
    state = runtime.calibrate_state(state, prompts, lengths)
    return runtime.refit_state(state)[0]


def evaluate_policy(
    config: ml_collections.ConfigDict, note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Accuracy of a policy on held-out questions of `env.task`.

    Prompt slots are as many as the questions need.

    Args:
      config: of `policy_config`.
      note: told what is being done.

    Returns:
      accuracy_greedy, accuracy_sampled (at temperature 1), questions, response_len_mean (sampled),
      tokens_per_s_eval, with the names of checkpoint, task and recipe.

    Raises:
      UserError: something in the configuration cannot work.
    """
    runtime = make_runtime(config, with_questions=False)
    asked = make_questions(
        config.env.task, config.env.task_options.to_dict(), {"eval": config.eval.questions},
        config.run.seed,
    )["eval"]  # fmt: skip
    rows = [encode_prompt(q.text, runtime.tokenizer, runtime.chat) for q in asked]
    config.rollout.max_prompt_tokens = round_slots(max(map(len, rows)))
    config.rollout.cache_slots = 0
    check_positions(config, max(map(len, rows)) + config.rollout.max_new_tokens)
    runtime.questions["eval"] = asked
    first: list[Question] = asked[: config.eval.batch_size]
    padded = first + first[-1:] * (config.eval.batch_size - len(first))
    with jax.set_mesh(runtime.mesh):
        weights = load_weights(runtime, *runtime.pad_prompts(padded), note)
        record, _ = evaluate(runtime, weights, "rl", 0)
    return {
        "checkpoint": config.run.dir,
        "task": config.env.task,
        "precision": runtime.rollout_recipe.name,
        **{name: value for name, value in record.items() if name not in ("phase", "step")},
    }


def pad(runtime: Runtime, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded (B, slots) int32 and lengths (B,) of rows of tokens; the last row is repeated
    until B divides over the mesh."""
    count = len(rows) + -len(rows) % batch_divisor(runtime.mesh)
    rows = rows + rows[-1:] * (count - len(rows))
    return pad_rows(rows, round_slots(max(map(len, rows))), runtime.tokenizer.pad_id)
