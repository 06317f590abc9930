"""Estimates how long the first step of a phase compiles.

The estimate is what the same programs took when they were last compiled on this machine, kept in
the cache directory; before that, a table of one machine. The layers are one loop in each program,
so their number hardly matters; the kind of model and of device do.
"""

from __future__ import annotations

import contextlib
import json
import pathlib

from fp8rl_jax.base import processes
from fp8rl_jax.base.compilation_cache import found_count
from fp8rl_jax.base.compiling import compile_seconds
from fp8rl_jax.base.user_cache import cache_name
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.kernels.machine import backend
from fp8rl_jax.training.run_directory import cache_root
from fp8rl_jax.training.runtime import Runtime

# Seconds of two CPU cores, of an empty cache: CPU measured by runs of configs/tiny_arithmetic.py,
# GPU by compiling Qwen3-8B's continuous rollout and train step for a described H200, where XLA does
# not try variants of its kernels.
_TABLE = {"cpu": {"SFT": 12.0, "RL": 16.0}, "gpu": {"SFT": 40.0, "RL": 60.0}}


class CompileTimes:
    """The seconds that the first steps of a run's phases compile."""

    def __init__(self, runtime: Runtime):
        self._known = dict(_TABLE["cpu" if backend() == "cpu" else "gpu"])
        self._path: pathlib.Path | None = None
        if root := cache_root(runtime.config):
            config = runtime.config
            resolved = runtime.resolved
            depends_on = {
                "model": repr(resolved.model),
                "recipes": [repr(resolved.rollout_recipe), repr(resolved.learner_recipe)],
                "mesh": dict(runtime.mesh.shape),
                "continuous": bool(config.rollout.slots),
                "remat": config.learner.remat,
            }
            self._path = root / (cache_name("compile-times", depends_on) + ".json")
            with contextlib.suppress(OSError, ValueError, TypeError):  # none yet, or damaged
                kept = json.loads(self._path.read_text())
                self._known |= {name: float(kept[name]) for name in self._known if name in kept}

    def expected(self, phase: str) -> float:
        """Returns the seconds that the first step of 'SFT' or 'RL' compiles without a cache."""
        return self._known[phase]

    def begin(self) -> None:
        """Starts to count the seconds of a phase's first step."""
        self._began = compile_seconds()
        self._found = found_count()

    def left(self, phase: str) -> float:
        """Returns the estimated seconds that are left; negative if it takes longer."""
        return self._known[phase] - (compile_seconds() - self._began)

    def end(self, phase: str) -> None:
        """Keeps the seconds since `begin`, if no program came from the compilation cache."""
        if self._path and found_count() == self._found and processes.first():
            self._known[phase] = compile_seconds() - self._began
            with contextlib.suppress(OSError):  # then the next run has the table
                write_whole(self._path, json.dumps(self._known))
