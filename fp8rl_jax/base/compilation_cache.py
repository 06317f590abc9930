"""Sets up JAX's persistent compilation cache, on by default except in benchmarks.

Its directory is the first of these that is set:

1. the field `run.compilation_cache`: a directory, or 'off';
2. the environment variable `FP8RL_COMPILATION_CACHE`: the same;
3. JAX's own settings (`JAX_COMPILATION_CACHE_DIR` and related ones), which are then not changed;
4. `fp8rl_jax/compilation` in the user's cache directory.

XLA:CPU compiles for the CPU at hand, so each kind of CPU has its own subdirectory. Beyond
`MAX_BYTES` the least recently used programs are deleted. Reads and writes hold a lock. Programs
that a killed process wrote in part are deleted at the next start. If the directory is unusable, the
command says so and runs without a cache; without a home directory it does so silently.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from fp8rl_jax.base.paths import expanded
from fp8rl_jax.base.user_cache import machine, user_cache

ENVIRONMENT = "FP8RL_COMPILATION_CACHE"
OFF = "off"
MAX_BYTES = 2 * 2**30
_LOCK = ".lockfile"  # the file that JAX's cache locks
_SECONDS_FOR_LOCK = 10
_EVENTS = {
    "/jax/compilation_cache/compile_requests_use_cache": "wanted",
    "/jax/compilation_cache/cache_hits": "found",
}
_counts = dict.fromkeys(_EVENTS.values(), 0)


def _delete_unfinished(directory: pathlib.Path) -> None:
    """Deletes programs without an '-atime' file (time of last use), which JAX writes after them.

    Raises:
      OSError: the directory cannot be written or locked (`filelock.Timeout` is an OSError).
    """
    directory.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(directory / _LOCK, timeout=_SECONDS_FOR_LOCK):
        for program in directory.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink()


@functools.cache
def _listen() -> None:
    def count(event: str, **_) -> None:
        if event in _EVENTS:
            _counts[_EVENTS[event]] += 1

    jax.monitoring.register_event_listener(count)


def found_count() -> int:
    """Returns how many of this process's programs were in the cache."""
    return _counts["found"]


def found_programs() -> str | None:
    """Returns a line that says how many of this process's programs were in the cache; None without
    a cache or before the first program."""
    where = jax.config.values["jax_compilation_cache_dir"]
    if not where or not _counts["wanted"]:
        return None
    return f"compilation cache: {_counts['found']} of {_counts['wanted']} programs found in {where}"


def use_compilation_cache(setting: str = "") -> str | None:
    """Makes this process use the cache.

    Args:
      setting: the field `run.compilation_cache`; '' without a configuration.

    Returns:
      A message if the cache cannot be used; else None.
    """
    _listen()
    setting = setting or os.environ.get(ENVIRONMENT, "")
    if not setting and jax.config.values["jax_compilation_cache_dir"]:
        return None
    problem: str | None = None
    directory: pathlib.Path | None = None
    if setting and setting != OFF:
        directory = pathlib.Path(expanded(setting, ENVIRONMENT))
    elif not setting and (kept := user_cache()):
        directory = kept / "compilation"
    if directory is not None:
        directory = directory.absolute() / machine()
        try:
            _delete_unfinished(directory)
        except OSError as error:
            problem = f"compiled programs are not kept: {directory} cannot be used ({error})"
            directory = None
    jax.config.update("jax_compilation_cache_dir", str(directory) if directory else None)
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax_cache.reset_cache()  # JAX may have initialised it as absent before
    return problem


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Disables the cache within this context: every program is compiled."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    jax_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        jax_cache.reset_cache()
