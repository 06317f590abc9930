"""Tells what JAX compiles in this process: the program at hand, and the seconds so far.

JAX reports three parts of each program when they end: tracing, lowering (in which Triton kernels
are compiled) and compiling, or loading from the compilation cache. So a program is known from the
end of its tracing on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

import jax

_TRACED, _LOWERED, _COMPILED = (
    f"/jax/core/compile/{part}_duration"
    for part in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
Watcher = Callable[[str, float], None]  # of a program's name and its seconds

_lock = threading.Lock()
_seconds = 0.0
_begun: dict[str, float] = {}  # programs that are traced but not compiled, and when that began
_watchers: list[Watcher] = []


def _heard(event: str, duration_secs: float, **about: str | int) -> None:
    global _seconds
    if event not in (_TRACED, _LOWERED, _COMPILED):
        return
    name = str(about.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
    with _lock:
        _seconds += duration_secs
        begun = _begun.setdefault(name, time.perf_counter() - duration_secs)
        if event == _COMPILED:
            _begun.clear()  # with what was traced for its shapes alone
    if event == _COMPILED:
        for watcher in tuple(_watchers):
            watcher(name, time.perf_counter() - begun)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_heard)


def compile_seconds() -> float:
    """Returns the seconds that this process has spent on tracing, lowering and compiling since the
    first call of a function of this module."""
    _listen()
    return _seconds


def at_hand() -> tuple[str, float] | None:
    """Returns the name of the program that is being compiled, and the seconds since it began."""
    with _lock:
        last = next(reversed(_begun.items()), None)
    return last and (last[0], time.perf_counter() - last[1])


@contextlib.contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Calls `watcher` with each program's name and seconds when it is compiled."""
    _listen()
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
