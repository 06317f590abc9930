"""Writes a run's newest weights in Hugging Face's format: `fp8rl convert RUN_DIR DST`."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Callable, Collection

import jax

from fp8rl_jax.base.errors import UserError, refused
from fp8rl_jax.config import default_config
from fp8rl_jax.config.model_source import pretrained_config
from fp8rl_jax.data import tokenizer_path
from fp8rl_jax.data.tokenizer import read_reader
from fp8rl_jax.models import hf
from fp8rl_jax.models.hf.convert import copy_tokenizer
from fp8rl_jax.models.hf.writer import Unread, check_target, check_type
from fp8rl_jax.models.lora import trained
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
    path, target = pathlib.Path(directory), pathlib.Path(target)
    check_target(target, max_shard_gb)
    config = run_config(path, permitted)
    config.run.dir, config.mesh = str(path), default_config().mesh
    if average_last is not None:
        config.eval.average_last = average_last
    count = config.eval.average_last
    found = open_trained(make_runtime(config, with_questions=False), path, count)
    runtime = found.runtime
    check_type(runtime.resolved.model, dtype)
    read = found.read_params()
    note(found.text)
    begun = config.model.checkpoint
    fields = pretrained_config(begun) if begun else None
    tokenizer = tokenizer_path(config.data.tokenizer, begun)
    also: Callable | None = functools.partial(_copy_tokenizer, tokenizer, config.data)
    if tokenizer == "byte":
        also = None
        note(
            "without a tokenizer: that of the run is 'byte', which has no file; "
            "`fp8rl sample --config.data.tokenizer=byte` goes with the directory"
        )
    if not config.data.chat:
        note(
            "its prompts end with a line feed: other programs must write it too (docs/sampling.md)"
        )
    params = jax.tree_util.tree_map_with_path(
        lambda keys, x: Unread(x.shape, x.dtype, functools.partial(read, path_of(keys))),
        runtime.layout.param_shapes,
    )
    target = hf.save(
        target,
        runtime.resolved.model,
        params,
        dtype=dtype,
        max_shard_gb=max_shard_gb,
        fields=fields,
        also=also,
    )
    found.checkpoints.close()
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
    path, target = pathlib.Path(directory), pathlib.Path(target)
    check_target(target)
    config = run_config(path, permitted)
    config.run.dir, config.mesh = str(path), default_config().mesh
    if not config.lora.rank:
        raise UserError(
            f"{path} trained all weights (lora.rank is 0) and has no adapter: leave --adapter out, "
            "and write --dtype=bf16"
        )
    found = open_trained(make_runtime(config, with_questions=False), path)
    adapters, model = jax.device_get(trained(found.state().params)), found.runtime.resolved.model
    found.checkpoints.close()
    base = config.model.checkpoint
    return hf.peft.save_adapter(target, model, adapters, alpha=config.lora.alpha, base=base)


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
    names = {kind: data[kind] for kind in ("bos_token", "eos_token", "pad_token")}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
