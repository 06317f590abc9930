"""Compiled programs on disk, so that a second start compiles nothing: JAX's persistent cache, on by
default in every command but `fp8rl bench`.

Its directory is the first of these that is set:

1. the field `run.compilation_cache`: a directory, or 'off';
2. the environment variable `FP8RL_COMPILATION_CACHE`, likewise;
3. JAX's own settings (`JAX_COMPILATION_CACHE_DIR` and those beside it), which are then left alone;
4. `fp8rl_jax/compilation` in the user's cache directory.

A program of XLA:CPU holds instructions of the CPU that it was compiled on, so every kind of CPU has
a subdirectory of its own. The least recently used programs go when there are more than `MAX_BYTES`.
Reads and writes hold a lock. A program that a killed process did not write to its end is deleted
at the next start. If the directory cannot be used, the command says so and runs without it; a user
who has no home directory has no cache either.
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
_LOCK = ".lockfile"  # the name that JAX's cache locks
_SECONDS_FOR_LOCK = 10
_EVENTS = {
    "/jax/compilation_cache/compile_requests_use_cache": "wanted",
    "/jax/compilation_cache/cache_hits": "found",
}
_counts = dict.fromkeys(_EVENTS.values(), 0)


def _delete_unfinished(directory: pathlib.Path) -> None:
    """Deletes programs without the time of their last use, which JAX writes after the program.

    Raises:
      OSError: the directory cannot be written or locked (`filelock.Timeout` is one).
    """
    directory.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(directory / _LOCK, timeout=_SECONDS_FOR_LOCK):
        for program in directory.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink()


def _count(event: str, **_) -> None:
    if event in _EVENTS:
        _counts[_EVENTS[event]] += 1


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_count)


def found_programs() -> str | None:
    """How many of this process's programs were found, as a line; None without a cache, and where no
    program was wanted."""
    where = jax.config.jax_compilation_cache_dir
    if not where or not _counts["wanted"]:
        return None
    return f"compilation cache: {_counts['found']} of {_counts['wanted']} programs found in {where}"


def use_compilation_cache(setting: str = "") -> str | None:
    """Makes this process keep its compiled programs, and take those that are kept.

    Args:
      setting: the field `run.compilation_cache`; '' where there is no configuration.

    Returns:
      A sentence, if the cache cannot be used; else None.
    """
    _listen()
    setting = setting or os.environ.get(ENVIRONMENT, "")
    if not setting and jax.config.jax_compilation_cache_dir:
        return None
    problem = None
    directory = None
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
    jax_cache.reset_cache()  # what was compiled before may have settled that there is none
    return problem


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Within it every program is compiled, whatever is kept."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    jax_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        jax_cache.reset_cache()
