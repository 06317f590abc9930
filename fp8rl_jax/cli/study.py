"""`fp8rl study` and its subcommands: layers."""

from __future__ import annotations

import argparse
import pathlib

from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    argument,
    directory,
    keep_programs,
    note,
    read_config,
    words,
    writable,
    writing,
)
from fp8rl_jax.errors import UserError


def _study(values: argparse.Namespace) -> int:
    raise UserError("fp8rl study: write `fp8rl study layers` and options after that")


def _layers(values: argparse.Namespace) -> int:
    command = "study layers"
    named = [bool(values.config), values.checkpoint is not None]
    if all(named) or (not any(named) and not values.quick):
        raise UserError(
            f"fp8rl {command}: name one model, by --config FILE or by --checkpoint DIR, or write "
            "--quick for a small one"
        )
    if values.overrides and not values.config:
        raise UserError(
            f"fp8rl {command}: {values.overrides[0]!r} changes a config: name one with --config, "
            "or leave it out"
        )
    if values.checkpoint is not None and not pathlib.Path(values.checkpoint).is_dir():
        raise UserError(
            f"fp8rl {command}: --checkpoint={values.checkpoint} is no directory; name that of a "
            "run, or of a Hugging Face model"
        )
    config = read_config(command, values) if values.config else None
    out = writable(command, values.out)
    from fp8rl_jax.study import layers
    from fp8rl_jax.study.cells import Cells

    cells = Cells(pathlib.Path(values.cells or out / "cells"), values.resume)
    if config is None:
        keep_programs()
    if values.checkpoint is not None:
        from fp8rl_jax.policy.source import directory_config
        from fp8rl_jax.study.subjects import of_directory

        config = directory_config(values.checkpoint, words(values.allow_import))
        subject = of_directory(config, note)
    elif config is not None:
        from fp8rl_jax.study.subjects import of_config

        subject = of_config(config)
    else:
        subject = layers.quick_subject()
    sequences = layers.QUICK_SEQUENCES if values.quick else layers.SEQUENCES
    with writing(command, out):
        result = layers.study(subject, sequences, cells, note)
        paths = layers.write(result, out)
    for verdict in result["hypotheses"]:
        print(verdict["sentence"])
    print(*paths, sep="\n")
    return 0


COMMANDS = (
    Command(
        "study",
        "studies that test hypotheses written beforehand: study layers",
        _study,
        others="write `fp8rl study layers` and options after that; ",
    ),
    Command(
        "study layers",
        "error of every GEMM of a forward and backward pass: FP8, fake FP8 and bf16",
        _layers,
        (
            argument("--checkpoint", metavar="DIR",
                     help="a run, or a Hugging Face model, in the place of a config's"),
            argument("--quick", action="store_true",
                     help="three sequences; without a model, two layers of random weights"),
            argument("--out", type=directory, default="runs/study_layers", metavar="DIR",
                     help="directory of study.json, study.md and study.png (default: %(default)s)"),
            argument("--cells", type=directory, metavar="DIR",
                     help="directory of the finished cells; OUT/cells if left out"),
            argument("--resume", action="store_true", help="use the cells that are there"),
            ALLOW_IMPORT,
        ),
        config=True,
    ),
)  # fmt: skip
