"""The estimate of what a first step compiles: a table, then what this machine measured."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from fp8rl_jax.base import compilation_cache, compiling
from fp8rl_jax.config import default_config
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.sharding import make_mesh
from fp8rl_jax.training.compile_times import CompileTimes


def _times(directory):
    config = default_config()
    config.run.cache_dir = str(directory)
    resolved = resolve_config(config)
    return CompileTimes(
        types.SimpleNamespace(config=config, resolved=resolved, mesh=make_mesh(dict(config.mesh)))
    )


@pytest.fixture
def compiled():
    """A function that compiles a program, and returns the seconds that this took."""

    def compile_one():
        before = compiling.compile_seconds()
        with compilation_cache.without_compilation_cache():  # another test may have set one
            jax.jit(lambda x: x @ x + 1)(np.ones((3, 3), np.float32))
        assert compiling.compile_seconds() > before
        return compiling.compile_seconds() - before

    return compile_one


def test_a_first_step_is_kept_for_the_next_run(tmp_path, compiled):
    times = _times(tmp_path)
    table = times.expected("SFT"), times.expected("RL")
    times.begin()
    taken = compiled()
    assert times.left("RL") == pytest.approx(table[1] - taken)
    times.end("RL")
    again = _times(tmp_path)
    assert again.expected("RL") == pytest.approx(taken)
    assert again.expected("SFT") == table[0]


def test_a_step_with_cached_programs_is_not_kept(tmp_path, compiled, monkeypatch):
    times = _times(tmp_path)
    table = times.expected("RL")
    times.begin()
    compiled()
    monkeypatch.setitem(compilation_cache._counts, "found", compilation_cache.found_count() + 1)
    times.end("RL")
    assert _times(tmp_path).expected("RL") == table
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", ["", "[1]", '{"RL": null}', '{"RL": 1'])
def test_a_damaged_file_gives_the_table(content, tmp_path, compiled):
    times = _times(tmp_path)
    table = times.expected("RL")
    times.begin()
    compiled()
    times.end("RL")
    (kept,) = tmp_path.iterdir()
    kept.write_text(content)
    assert _times(tmp_path).expected("RL") == table
