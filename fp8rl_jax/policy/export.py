"""Writes a run's newest weights in Hugging Face's format: `fp8rl convert RUN_DIR DST`."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable, Collection

import jax
import ml_collections

from fp8rl_jax.base.errors import UserError, refused
from fp8rl_jax.config import adapters, default_config
from fp8rl_jax.config.model_source import pretrained_config
from fp8rl_jax.data import tokenizer_path
from fp8rl_jax.data.tokenizer import read_reader
from fp8rl_jax.models import hf
from fp8rl_jax.models.hf.convert import copy_tokenizer
from fp8rl_jax.models.hf.writer import Unread, check_target, check_type
from fp8rl_jax.models.masters import trained
from fp8rl_jax.models.stacks import path_of
from fp8rl_jax.policy.load import open_trained
from fp8rl_jax.training.run_directory import run_config
from fp8rl_jax.training.runtime import make_runtime


def export_run(
    directory: str | pathlib.Path,
    target: str | pathlib.Path,
    dtype: str,
    max_shard_gb: float,
    permitted: Collection[str],
    note: Callable[[str], None],
    average_last: int | None = None,
) -> pathlib.Path:
    """Writes the parameters of a run's newest checkpoint, or the mean of several, and the run's
    tokenizer.

    Holds one array of parameters in memory at a time, and nothing of the optimiser. With dtype
    'fp8' the file has the bytes that the sampler uses under the recipe `fp8`.

    Args:
      directory: the run's directory.
      target, dtype, max_shard_gb: as for `hf.convert`.
      permitted: functions or modules that the run's configuration may name (`run_config`).
      note: called with a line on the weights, and on what the export lacks.
      average_last: number of newest checkpoints whose mean weights to write; by default the run's
        `eval.average_last`.

    Returns:
      The path of the written directory.

    Raises:
      UserError: the run has no checkpoint, or the target cannot be made.
    """
    directory = pathlib.Path(directory)
    target = pathlib.Path(target)
    check_target(target, max_shard_gb)
    config = _config_on_one_device(directory, permitted)
    if average_last is not None:
        config.eval.average_last = average_last
    runtime = make_runtime(config, with_questions=False)
    newest = open_trained(runtime, directory, config.eval.average_last)
    model = newest.runtime.resolved.model
    check_type(model, dtype)
    read = newest.read_params()
    note(newest.text)
    beside = _beside(config, note)
    params = jax.tree_util.tree_map_with_path(
        lambda keys, x: Unread(x.shape, x.dtype, functools.partial(read, path_of(keys))),
        newest.runtime.layout.param_shapes,
    )
    hf.save(target, model, params, dtype=dtype, max_shard_gb=max_shard_gb, beside=beside)
    newest.checkpoints.close()
    return target


def export_adapter(
    directory: str | pathlib.Path, target: str | pathlib.Path, permitted: Collection[str]
) -> pathlib.Path:
    """Writes the adapters of a run's newest checkpoint in PEFT's format.

    Args:
      directory: the run's directory.
      target: the directory to make.
      permitted: as for `export_run`.

    Returns:
      The path of the written directory.

    Raises:
      UserError: the run has no adapters or no checkpoint, or the target cannot be made.
    """
    directory = pathlib.Path(directory)
    target = pathlib.Path(target)
    check_target(target)
    config = _config_on_one_device(directory, permitted)
    if not adapters.trains_adapters(config):
        raise UserError(
            f"{directory} trained all weights (lora.rank is 0) and has no adapter: leave --adapter "
            "out, and write --dtype=bf16"
        )
    newest = open_trained(make_runtime(config, with_questions=False), directory)
    state = newest.state()
    newest.checkpoints.close()
    return hf.peft.save_adapter(
        target,
        newest.runtime.resolved.model,
        jax.device_get(trained(state.params)),
        alpha=config.lora.alpha,
        base=config.model.checkpoint,
    )


def _config_on_one_device(
    directory: pathlib.Path, permitted: Collection[str]
) -> ml_collections.ConfigDict:
    """Returns a run's saved configuration, for one device and the directory where the run is."""
    config = run_config(directory, permitted)
    config.run.dir = str(directory)
    config.mesh = default_config().mesh
    return config


def _beside(config: ml_collections.ConfigDict, note: Callable[[str], None]) -> hf.Beside:
    """Returns the fields of config.json that a run began with, and its tokenizer; notes what the
    export lacks."""
    begun = config.model.checkpoint
    fields = pretrained_config(begun) if begun else None
    beside = hf.Beside(fields)
    tokenizer = tokenizer_path(config.data.tokenizer, begun)
    if tokenizer == "byte":
        note(
            "without a tokenizer: that of the run is 'byte', which has no file; "
            "`fp8rl sample --config.data.tokenizer=byte` goes with the directory"
        )
    else:
        beside = hf.Beside(fields, functools.partial(_copy_tokenizer, tokenizer, config.data))
    if not config.data.chat:
        note(
            "its prompts end with a line feed: other programs must write it too (docs/sampling.md)"
        )
    return beside


def _copy_tokenizer(tokenizer: str, data, directory: pathlib.Path) -> None:
    """Copies the tokenizer of a directory. For a tokenizer that is one file, writes a
    tokenizer.json that puts `data.bos_token` before a text, as the run did, and a
    tokenizer_config.json with the special tokens of `data`."""
    if os.path.isdir(tokenizer):
        copy_tokenizer(pathlib.Path(tokenizer), directory)
        return
    from tokenizers import processors

    reader = read_reader(pathlib.Path(tokenizer))
    with refused(f"data.bos_token: {data.bos_token!r} cannot be put in front of a text"):
        begin = (data.bos_token, reader.token_to_id(data.bos_token))
        reader.post_processor = processors.TemplateProcessing(
            single=[data.bos_token, "$A"], special_tokens=[begin]
        )
    reader.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": data.bos_token,
        "eos_token": data.eos_token,
        "pad_token": data.pad_token,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
