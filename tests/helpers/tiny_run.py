"""The run of tiny_config.py: its command line, and what of its files is the same at every run.

The fixture `tiny_run` of conftest.py makes one for all tests; others start where it does and share
its compiled programs.
"""

from __future__ import annotations

import pathlib

from fp8rl_jax.training.logs import read_jsonl, without_times

CONFIG = pathlib.Path(__file__).parent / "tiny_config.py"
FILES = ("metrics", "sft", "eval", "samples")


def overrides(directory: pathlib.Path, **more) -> list[str]:
    """Arguments of a run in `directory`; `more` are fields with their values."""
    fields = {"run.dir": directory / "run", "run.cache_dir": directory / "cache", **more}
    return [f"--config.{name}={value}" for name, value in fields.items()]


def reproducible(directory: pathlib.Path) -> dict[str, list[dict]]:
    """The records of the run in `directory` without times."""
    return {
        name: [without_times(r) for r in read_jsonl(directory / "run" / f"{name}.jsonl")]
        for name in FILES
    }
