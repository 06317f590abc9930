"""Writes a run's newest weights in Hugging Face's format, or its adapter in PEFT's: `fp8rl convert
RUN_DIR DST`."""

from __future__ import annotations

import contextlib
import dataclasses
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
from fp8rl_jax.policy.load import Trained, open_trained
from fp8rl_jax.policy.provenance import Form, Provenance, chain_at
from fp8rl_jax.training.run_directory import run_config
from fp8rl_jax.training.runtime import make_runtime


def export_run(
    directory: str | pathlib.Path,
    target: str | pathlib.Path,
    form: Form,
    permitted: Collection[str],
    note: Callable[[str], None],
) -> pathlib.Path:
    """Writes the parameters of a run's checkpoint, or the mean of several, with the run's
    tokenizer; or its adapter alone. provenance.json names the run.

    Of parameters it holds one array in memory at a time, and nothing of the optimiser. With dtype
    'fp8' the file has the bytes that the sampler uses under the recipe `fp8`.

    Args:
      directory: the run's directory.
      target: the directory to make.
      form: what to write, and how.
      permitted: functions or modules that the run's configuration may name (`run_config`).
      note: called with a line on the weights, and on what the export lacks.

    Returns:
      The path of the written directory.

    Raises:
      UserError: the run has no such checkpoint or no adapter, or the target cannot be made.
    """
    directory = pathlib.Path(directory)
    target = pathlib.Path(target)
    check_target(target, form.max_shard_gb)
    config = _config_on_one_device(directory, permitted)
    if form.adapter and not adapters.trains_adapters(config):
        raise UserError(
            f"{directory} trained all weights (lora.rank is 0) and has no adapter: leave --adapter "
            "out, and write --dtype=bf16"
        )
    count = config.eval.average_last if form.average_last is None else form.average_last
    config.eval.average_last = 1 if form.adapter else count
    runtime = make_runtime(config, with_questions=False)
    chosen = open_trained(runtime, directory, config.eval.average_last, form.checkpoint)
    with contextlib.closing(chosen.checkpoints):
        note(chosen.text)
        if form.adapter:
            _write_adapter(chosen, target, form)
        else:
            _write_model(chosen, target, form, _beside(config, note))
    return target


def _write_model(chosen: Trained, target: pathlib.Path, form: Form, beside: hf.Beside) -> None:
    """Writes the parameters of the chosen checkpoints."""
    model = chosen.runtime.resolved.model
    check_type(model, form.dtype)
    read = chosen.read_params()
    params = jax.tree_util.tree_map_with_path(
        lambda keys, x: Unread(x.shape, x.dtype, functools.partial(read, path_of(keys))),
        chosen.runtime.layout.param_shapes,
    )

    def add_files(exported: pathlib.Path) -> None:
        beside.add_files(exported)
        _provenance(chosen, form).write(exported)

    hf.save(
        target,
        model,
        params,
        dtype=form.dtype,
        max_shard_gb=form.max_shard_gb,
        beside=hf.Beside(beside.fields, add_files),
    )


def _write_adapter(chosen: Trained, target: pathlib.Path, form: Form) -> None:
    """Writes the adapters of the chosen checkpoint."""
    config = chosen.runtime.config
    hf.peft.save_adapter(
        target,
        chosen.runtime.resolved.model,
        jax.device_get(trained(chosen.state().params)),
        alpha=config.lora.alpha,
        base=config.model.checkpoint,
        add_files=_provenance(chosen, form).write,
    )


def _provenance(chosen: Trained, form: Form) -> Provenance:
    """Returns what names the run and the checkpoints, without the exported files."""
    form = dataclasses.replace(
        form, average_last=len(chosen.numbers), checkpoint=chosen.numbers[-1]
    )
    chain = chain_at(chosen.directory, chosen.phase, chosen.step)
    return Provenance(chain, chosen.phase, chosen.step, form, {})


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
