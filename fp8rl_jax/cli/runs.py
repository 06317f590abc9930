"""`fp8rl train`, `fp8rl report` and `fp8rl convert`: a run, its report and its exported weights."""

from __future__ import annotations

import argparse
import os

from fp8rl_jax.base.errors import UserError, refused_by_system
from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    a_path,
    argument,
    keep_programs,
    note,
    read_config,
)
from fp8rl_jax.cli.interrupt import Interrupt
from fp8rl_jax.cli.output import keep_talking

_STOPPED = os.EX_TEMPFAIL  # 75: try again, here with --resume


def _train(values: argparse.Namespace) -> int:
    from fp8rl_jax.base import processes

    with keep_talking():
        with Interrupt() as interrupt:  # around imports too: they may lose a KeyboardInterrupt
            config = read_config("fp8rl train", values)
            directory = os.path.abspath(config.run.dir)
            from fp8rl_jax.report.summary import summarise
            from fp8rl_jax.train import train

            outcome = train(config, "auto" if values.auto_resume else values.resume, interrupt)
        if not outcome.finished:
            return _STOPPED
        if not processes.first():
            return 0
        summary = summarise(directory)
        print(summary["sentence"], *summary["notes"], f"report: {outcome.report}", sep="\n")
        if summary["advice"]:
            print(summary["advice"])
    return 0


def _report(values: argparse.Namespace) -> int:
    if not values.directories:
        raise UserError("fp8rl report: name a run directory, for example runs/tiny_arithmetic")
    from fp8rl_jax.report import write_report

    run_dir, *compared = values.directories
    with refused_by_system(
        f"fp8rl report: {run_dir}/report.html cannot be written",
        "make room for it, or fix its permissions",
    ):
        print(write_report(run_dir, compared))
    return 0


def _convert(values: argparse.Namespace) -> int:
    if len(values.paths) != 2 or (values.dtype is None) != values.adapter:
        raise UserError(
            "fp8rl convert: write `fp8rl convert SRC DST --dtype bf16` or `--dtype fp8`, or of a "
            "run with adapters `fp8rl convert RUN_DIR DST --adapter`"
        )
    keep_programs()
    from fp8rl_jax.config.model_source import pretrained_config
    from fp8rl_jax.models import hf
    from fp8rl_jax.policy.export import export_run
    from fp8rl_jax.policy.provenance import Form

    source, written = values.paths
    is_run = os.path.isdir(os.path.join(source, "checkpoints"))
    is_run = is_run and pretrained_config(source) is None
    for option, value in (("--average-last", values.average_last), ("--adapter", values.adapter)):
        if value not in (None, False) and not is_run:
            raise UserError(f"fp8rl convert: {option} goes with a run, and {source} is none")
    if values.adapter and values.average_last is not None:
        raise UserError("fp8rl convert: --adapter and --average-last exclude each other: leave one")
    if is_run:
        form = Form(values.dtype or "", values.max_shard_gb, values.average_last, values.adapter)
        print(export_run(source, written, form, values.allow_import, note))
    else:
        print(hf.convert(source, written, values.dtype, values.max_shard_gb))
    return 0


TRAIN = Command(
    "train",
    "supervised fine-tuning, then GRPO; writes metrics, checkpoints and report.html to\nrun.dir",
    _train,
    (
        argument("--resume", "continue the run in run.dir, bit for bit", action="store_true"),
        argument(
            "--auto-resume",
            "continue the run in run.dir, or start it: for unattended starts",
            action="store_true",
        ),
    ),
    config=True,
    processes=True,
    starts="loads JAX, reads the config and compiles; about a minute to the first step",
)

REPORT = Command(
    "report",
    "writes RUN_DIR/report.html again, with a comparison if other runs are named",
    _report,
    (
        argument(
            "directories",
            "directory of the run, and of others to compare with it",
            "RUN_DIR",
            nargs="*",
            type=a_path,
        ),
    ),
    starts="reads the run and draws its plots; about ten seconds",
)

CONVERT = Command(
    "convert",
    "writes a checkpoint in Hugging Face's format with weights in another number format",
    _convert,
    (
        argument(
            "paths",
            "SRC: a checkpoint's directory, or a run whose newest weights to export; "
            "DST: a new directory",
            "SRC DST",
            nargs="*",
            type=a_path,
        ),
        argument("--dtype", "number format of the weights", choices=("bf16", "fp8")),
        argument(
            "--adapter",
            "write the adapter alone that a run trained, in PEFT's format",
            action="store_true",
        ),
        argument(
            "--max-shard-gb",
            "largest size of a weight file, in GB (default: 5)",
            "X",
            type=float,
            default=5.0,
        ),
        argument(
            "--average-last",
            "export the mean weights of a run's newest N checkpoints (default: its "
            "eval.average_last)",
            "N",
            type=int,
        ),
        ALLOW_IMPORT,
    ),
    starts="reads and writes all weights; about half a minute for each GB",
)
