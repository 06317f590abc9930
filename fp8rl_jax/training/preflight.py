"""Checks before a run compiles or writes: memory, disk space, directory, files."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from fp8rl_jax.base import processes
from fp8rl_jax.config.adapters import check_adapters
from fp8rl_jax.plan.refuse import check_train_memory
from fp8rl_jax.training.environment import environment
from fp8rl_jax.training.lock import RunLock
from fp8rl_jax.training.questions import few_held_out
from fp8rl_jax.training.run_directory import check_rooms, check_run, check_shared, open_run
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.sinks import logger_names

_Checked = TypeVar("_Checked")


@contextlib.contextmanager
def preflight(
    runtime: Runtime, resume: bool, check: Callable[[], _Checked]
) -> Iterator[tuple[RunLock, list[str], _Checked]]:
    """Checks a run and opens its directory, with the same outcome in all processes.

    Args:
      runtime: the run.
      resume: whether an existing run may be continued.
      check: a last check, which may compile; called before `open_run` writes files.

    Yields:
      The lock of the directory, held during the run; lines to show, on the data, on changes since
      the run's last start, and of `check`; and the result of `check`.

    Raises:
      UserError: the run cannot work here, or `run.dir` holds another run.
    """
    resolved = runtime.resolved
    config = resolved.config
    logger_names(config)
    check_train_memory(resolved, runtime.mesh, runtime.rollout_mesh)
    if not resume:  # a run's own checkpoints have its adapters
        processes.decided(lambda: check_adapters(config, resolved.model))
    directory = pathlib.Path(config.run.dir)
    processes.decided(lambda: check_rooms(resolved))
    check_shared(directory)
    with RunLock(directory) as lock:
        now = environment(config)
        changes = processes.decided(lambda: check_run(resolved, resume, runtime.data_digest, now))
        checked = check()
        processes.decided(lambda: open_run(resolved, runtime.data_digest, now))
        few = few_held_out(runtime.questions["eval"]) if runtime.data_note else ""
        lines = [str(line) for line in (runtime.data_note, few, changes, checked) if line]
        yield lock, lines, checked
