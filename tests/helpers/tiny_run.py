"""The run of tiny_config.py: its command line, and what of its files is the same at every run.

The fixture `tiny_run` of conftest.py makes one for all tests; others start where it does and share
its compiled programs.
"""

from __future__ import annotations

import pathlib
from typing import Any
from unittest import mock

from fp8rl_jax import train
from fp8rl_jax.config import load_config
from fp8rl_jax.report.metrics import find
from fp8rl_jax.rollout import ContinuousSampler, HalvedSampler
from fp8rl_jax.training.engine import JaxEngine
from fp8rl_jax.training.logs import read_jsonl

CONFIG = pathlib.Path(__file__).parent / "tiny_config.py"
FILES = ("metrics", "sft", "eval", "samples", "rewards", "digests")
ONE_STEP = {
    "sft.steps": 0,
    "run.steps": 1,
    "run.checkpoint_every": 1,
    "model.num_hidden_layers": 1,
    "model.hidden_size": 64,
    "model.intermediate_size": 128,
}
# The run whose digests are in tests/golden/bits.json: the same on every CPU.
BITS = {
    **ONE_STEP,
    "precision.rollout": "fp8",
    "precision.learner": "fp8",
    "precision.cpu_products": "exact",
}
TIME_PREFIXES = ("time_", "tokens_per_s_", "calibrate_frac")  # not reproducible
_OF_CONFIG = ("made_with", "chain")  # not those of a run with another configuration
_PROGRAMS = ("sampler", "eval_sampler", "compiled_score", "compiled_refit", "compiled_calibrate")


def overrides(directory: pathlib.Path, **more) -> list[str]:
    """Arguments of a run in `directory`; `more` are fields with their values."""
    fields = {"run.dir": directory / "run", "run.cache_dir": directory / "cache", **more}
    return [f"--config.{name}={value}" for name, value in fields.items()]


def reproducible(directory: pathlib.Path) -> dict[str, list[dict]]:
    """The records of the run in `directory` without times; each key is in the table of metrics."""
    records = {name: read_jsonl(directory / "run" / f"{name}.jsonl") for name in FILES}
    for name, rows in records.items():
        assert not [key for row in rows for key in row if find(name, key) is None]
    return {name: [without_times(row) for row in rows] for name, rows in records.items()}


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """The reproducible part of a record, without what its run was made with."""
    kept = {k: v for k, v in record.items() if not k.startswith(TIME_PREFIXES)}
    return {k: v for k, v in kept.items() if k not in _OF_CONFIG}


def compilations(program) -> int:
    """How often a jitted function, or the programs of a sampler, were compiled."""
    if isinstance(program, ContinuousSampler):
        return program._advance._cache_size()
    if isinstance(program, HalvedSampler):
        return len(program._compiled) + program._program._cache_size()
    return program._cache_size()


def train_counting(arguments: list[str]) -> tuple[train.Outcome, dict[str, int]]:
    """A run, and how often each program of its RL phase was compiled."""
    runtimes, steps = [], []
    make, make_step = train.make_runtime, JaxEngine.train_step

    def kept_runtime(config):
        runtimes.append(make(config))
        return runtimes[-1]

    def kept_step(self, *more, **options):
        steps.append(make_step(self, *more, **options))
        return steps[-1]

    with (
        mock.patch.object(train, "make_runtime", kept_runtime),
        mock.patch.object(JaxEngine, "train_step", kept_step),
    ):
        outcome = train.train(load_config(str(CONFIG), arguments))
    (runtime,) = runtimes
    programs = vars(runtime.engine)
    made = {n.removeprefix("compiled_"): programs[n] for n in _PROGRAMS if n in programs}
    made["train_step"] = steps[-1]
    return outcome, {name: compilations(program) for name, program in made.items()}
