"""`fp8rl drift`: where the sampler's program and the learner's differ, if they do."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    a_path,
    argument,
    keep_programs,
    note,
    read_config,
    recorded_config,
    whole,
    writable,
    writing,
)


def _drift_config(values: argparse.Namespace):
    """Returns the configuration of --config, or of the run that --checkpoint names."""
    if values.config or values.checkpoint is None:
        return read_config("fp8rl drift", values)
    from fp8rl_jax.config import override
    from fp8rl_jax.policy.source import directory_config

    config = directory_config(
        values.checkpoint, values.allow_import, needed=("precision", "env", "algo")
    )
    override(config, values.overrides)
    keep_programs(config.run.compilation_cache)
    return config


def _step_or_sample(values: argparse.Namespace) -> tuple[dict, pathlib.Path]:
    """Returns the analysis of a step of a run, or of new samples, and the directory for it."""
    from fp8rl_jax.drift.command import analyse_drift
    from fp8rl_jax.replay.drifting_step import analyse_step, is_analysed, largest_drift

    step = values.step
    if not (step or values.config or values.prompts or values.overrides or not values.checkpoint):
        step = largest_drift(pathlib.Path(values.checkpoint))
        if step is not None and not is_analysed(recorded_config(values.checkpoint, values)):
            step = None
    if step is None:
        config = _drift_config(values)
        place = values.out or values.checkpoint or f"{config.run.dir}_drift"
        directory = writable("fp8rl drift", place)
        return analyse_drift(config, values.checkpoint, values.prompts, note), directory
    run = pathlib.Path(values.checkpoint)
    config = recorded_config(run, values)
    directory = writable("fp8rl drift", values.out or values.checkpoint)
    with tempfile.TemporaryDirectory(prefix="fp8rl-drift-") as into:
        return analyse_step(run, step, config, pathlib.Path(into), note), directory


def _drift(values: argparse.Namespace) -> int:
    if values.prompts is not None and values.prompts < 1:
        raise UserError(f"fp8rl drift: --prompts is {values.prompts}; write at least 1")
    if values.fail_above is not None and not values.fail_above >= 0:
        raise UserError(
            f"fp8rl drift: --fail-above is {values.fail_above}; write a number of at least 0"
        )
    if values.checkpoint is not None and not os.path.isdir(values.checkpoint):
        raise UserError(
            f"fp8rl drift: --checkpoint={values.checkpoint} is no directory; name that of a run"
        )
    if values.step is not None and (values.config or values.checkpoint is None):
        raise UserError("fp8rl drift: --step names a step of --checkpoint, and takes no --config")
    from fp8rl_jax.drift.render import print_analysis, write_analysis
    from fp8rl_jax.report.metrics import DRIFT_MAX

    result, directory = _step_or_sample(values)
    print_analysis(result)
    with writing("fp8rl drift", directory):
        paths = write_analysis(result, directory)
    print(*paths, sep="\n")
    largest = result["headline"][DRIFT_MAX]
    if values.fail_above is not None and not largest <= values.fail_above:
        print(
            f"failed: the largest |dlogp| is {largest:.3g}, above --fail-above="
            f"{values.fail_above:g}",
            file=sys.stderr,
        )
        return 1
    return 0


DRIFT = Command(
    "drift",
    "where rollout and learner differ, if they do: compares the two programs bit by bit",
    _drift,
    (
        argument(
            "--checkpoint",
            "directory of a run, with its configuration: analyse its step with the largest drift, "
            "or its newest weights if none has drifted, its two sides differ on purpose, or its "
            "steps are of conversations or ahead; with --config only its newest weights",
            "RUN_DIR",
            type=a_path,
        ),
        argument("--step", "analyse this RL step of the run", "N", type=whole(1)),
        argument(
            "--prompts",
            "number of questions to sample with the newest weights (default: those of an RL step)",
            "N",
            type=int,
        ),
        ALLOW_IMPORT,
        argument(
            "--out",
            "directory of drift.json and drift.html (default: --checkpoint, else run.dir "
            "with _drift at its end)",
            "DIR",
            type=a_path,
        ),
        argument("--fail-above", "exit with status 1 if a |dlogp| is above this", "X", type=float),
    ),
    config=True,
    starts="loads the weights and compiles two programs; about a minute",
)
