"""Compiled programs on disk: where they lie, that they have the bits of fresh ones, and what a
killed process or an unusable directory does."""

from __future__ import annotations

import functools
import pathlib
import pwd

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from random_model import initial_params
from small_models import NARROW
from tiny_run import CONFIG

from fp8rl_jax import cli
from fp8rl_jax.base import compilation_cache
from fp8rl_jax.base.compilation_cache import (
    ENVIRONMENT,
    found_programs,
    use_compilation_cache,
    without_compilation_cache,
)
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.config import load_config
from fp8rl_jax.kernels.reference import probe
from fp8rl_jax.models import ModelConfig, Tokens, forward, rope_tables
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.training.sft import cache_directory

_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """A process that has not chosen a cache yet."""
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(compilation_cache, "_counts", {"wanted": 0, "found": 0})
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.jax_cache.reset_cache()


def _directory() -> pathlib.Path | None:
    found = jax.config.jax_compilation_cache_dir
    return None if found is None else pathlib.Path(found).parent


@pytest.mark.parametrize("home", [None, "/proc/none", "relative"])
def test_a_user_without_a_home(home, monkeypatch):
    """Neither account nor HOME, or one in which nothing can be written: nothing is kept, no word
    is said, and no directory called `~` is made."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", dict[int, None]().__getitem__)  # KeyError: no account
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    there = set(pathlib.Path().iterdir())
    assert use_compilation_cache() is None and _directory() is None
    config = load_config(str(CONFIG))
    assert cache_directory(config) is None
    config.run.cache_dir = "somewhere"
    assert cache_directory(config).parent == pathlib.Path("somewhere")
    monkeypatch.setattr(probe, "choose", lambda: probe.EXACT)
    assert probe.cpu_way.__wrapped__() == probe.EXACT
    assert set(pathlib.Path().iterdir()) == there
    monkeypatch.setenv(ENVIRONMENT, "~/x")
    if home is None:
        with pytest.raises(UserError, match=f"{ENVIRONMENT} is '~/x', and this user has no home"):
            use_compilation_cache()


def test_where_programs_are_kept(tmp_path, monkeypatch):
    """The field, then the environment, then JAX's own setting, then the user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert use_compilation_cache() is None
    assert _directory() == tmp_path / "home" / "fp8rl_jax" / "compilation"
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs" / "cpu"))
    assert use_compilation_cache() is None
    assert _directory() == tmp_path / "theirs"
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "environment"))
    assert use_compilation_cache() is None
    assert _directory() == tmp_path / "environment"
    assert use_compilation_cache(str(tmp_path / "field")) is None
    assert _directory() == tmp_path / "field"
    compilation_cache._counts["wanted"] = 2
    assert str(tmp_path / "field") in found_programs()
    assert use_compilation_cache("off") is None
    assert _directory() is None
    assert found_programs() is None


def _gradient(model: ModelConfig, recipe: str):
    """A program with what a train step has: scans, quantisers, custom derivatives."""

    def value(params, tokens, rope):
        out = forward(params, Tokens.of(tokens, rope), model, get_recipe(recipe))
        return jnp.square(out.logits).mean(), out.logits

    return exact_jit(jax.value_and_grad(value, has_aux=True))


@pytest.mark.parametrize("recipe", ["bf16", slow("fp8")])
def test_a_program_from_the_cache_has_the_bits_of_a_fresh_one(recipe, tmp_path):
    params = initial_params(NARROW)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)
    given = params, tokens, rope_tables(NARROW, 9)
    use_compilation_cache(str(tmp_path))
    with without_compilation_cache():
        fresh = _gradient(NARROW, recipe)(*given)
        assert not list(tmp_path.rglob("*-cache"))
    found = []
    for _ in range(2):
        jax.clear_caches()
        compilation_cache._counts.update(wanted=0, found=0)
        found.append(_gradient(NARROW, recipe)(*given))
        line = found_programs()
    wanted = compilation_cache._counts["wanted"]
    assert line == (
        f"compilation cache: {wanted} of {wanted} programs found in "
        f"{jax.config.jax_compilation_cache_dir}"
    )
    for kept in found:
        jax.tree.map(np.testing.assert_array_equal, kept, fresh)


def test_a_program_that_was_not_written_to_its_end_is_compiled_again(tmp_path):
    use_compilation_cache(str(tmp_path))
    program = functools.partial(jax.jit, lambda x: jnp.tanh(x) * 3)
    x = jnp.arange(8.0)
    expected = program()(x)
    kept = next(path for path in tmp_path.rglob("*-cache") if "lambda" in path.name)
    kept.with_name(kept.name.removesuffix("-cache") + "-atime").unlink()
    kept.write_bytes(kept.read_bytes()[:100])
    jax.clear_caches()
    assert use_compilation_cache(str(tmp_path)) is None
    assert not kept.exists()
    np.testing.assert_array_equal(program()(x), expected)
    assert kept.stat().st_size > 100


def test_a_directory_that_cannot_be_used_is_named_and_done_without(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    problem = use_compilation_cache(str(file))
    assert problem.startswith(f"compiled programs are not kept: {file}")
    assert _directory() is None
    config = CONFIG
    fields = [f"--config.run.compilation_cache={file}", "--config.rollout.group_size=1"]
    assert cli.run(["train", "--config", str(config), *fields]) == 2
    notes = capsys.readouterr().err.splitlines()
    assert notes[0].startswith("compiled programs are not kept") and len(notes) == 2


def test_the_cache_is_bounded(tmp_path, monkeypatch):
    """The program that was not used for the longest time goes first."""
    monkeypatch.setattr(compilation_cache, "MAX_BYTES", 30_000)
    use_compilation_cache(str(tmp_path))
    for i in range(12):
        jax.jit(lambda x, i=i: jnp.sin(x) + i)(jnp.arange(8.0))
        size = sum(path.stat().st_size for path in tmp_path.rglob("*-cache"))
        assert 0 < size <= 30_000
    assert len(list(tmp_path.rglob("*-cache"))) < 12
