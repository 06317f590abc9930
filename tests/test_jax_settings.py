"""Settings of JAX: none is unknown, and none changes a bit unseen."""

from __future__ import annotations

import enum
import json
import re
import subprocess
import sys

import flax
import jax
import pytest
from harmless_settings import FLAX_HARMLESS, HARMLESS
from refusals import python
from tiny_run import CONFIG, reproducible
from train_process import finish, start

from fp8rl_jax.base import jax_settings as table
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.user_cache import cache_name
from fp8rl_jax.config import load_config
from fp8rl_jax.training.environment import check_environment, environment, keep_environment
from fp8rl_jax.training.runtime import make_runtime

_NAMES = sorted(jax.config.values)
_DEFAULTS = """
import enum, json, flax, jax
plain = lambda x: x.name.lower() if isinstance(x, enum.Enum) else x
print(json.dumps([{k: plain(v) for k, v in values.items()}
                  for values in (jax.config.values, flax.config._values)]))
"""


def _kinds(name: str) -> list[str]:
    """The kinds that the table gives a setting."""
    harmless = any(
        name.startswith(known) if known.endswith("_") else name == known for known in HARMLESS
    )
    tables = {"held": table.HELD, "refused": table.REFUSED, "recorded": table.RECORDED}
    return [kind for kind, names in tables.items() if name in names] + ["harmless"] * harmless


@pytest.mark.parametrize("name", _NAMES)
def test_every_setting_is_judged(name):
    """One that a new version brings is none of the four kinds until it is in the table."""
    assert len(_kinds(name)) == 1, f"{name} is {_kinds(name) or 'unknown'}: see jax_settings.py"


def test_every_setting_of_flax_is_judged():
    known = {*table.FLAX_HELD, *FLAX_HARMLESS}
    assert set(flax.config._values) <= known
    assert not set(table.FLAX_HELD) & set(FLAX_HARMLESS)


def test_what_is_held_is_the_default():
    """A default that changes with a version is to be judged again."""
    command = [sys.executable, "-c", _DEFAULTS]
    found = subprocess.run(command, env={}, capture_output=True, text=True, check=True).stdout
    defaults, of_flax = json.loads(found)
    for name, value in table.HELD.items():
        default = None if "transfer_guard" in name else value  # which is to allow
        assert defaults.get(name, default) == default, name
    for name, value in table.FLAX_HELD.items():
        assert of_flax.get(name, value) == value, name


def _plain(value):
    """A value as `jax.config.update` takes it."""
    return value.name.lower() if isinstance(value, enum.Enum) else value


def _another(name: str):
    """A value of a setting that is not the one that is held."""
    held = table.HELD[name]
    if isinstance(held, bool):
        return not held
    if isinstance(held, int):
        return held + 1
    about = jax.config.meta[name][2]
    choices = about.get("enum_values") or [c.name.lower() for c in about.get("enum_class", ())]
    return next((choice for choice in choices if choice != held), True)


def test_what_is_held_is_set(monkeypatch):
    """Whatever the environment or an earlier import of the process has said."""
    names = [name for name in table.HELD if name in jax.config.values]
    try:
        for name in names:
            jax.config.update(name, _another(name))
            assert _plain(jax.config.values[name]) != table.HELD[name], name
        flax.config.update("flax_return_frozendict", True)
    finally:
        table.hold_settings()
    for name in names:
        assert _plain(jax.config.values[name]) == table.HELD[name], name
    assert not flax.config._values["flax_return_frozendict"]


_CHANGES = """
import jax
jax.config.update({!r}, {!r})
def f(logp, old, advantages, mask):
    return logp, {{}}
def rows():
    return [{{"question": f"{{n}} + 1", "answer": str(n + 1)}} for n in range(400)]
"""


@pytest.mark.parametrize("field", ["algo.loss={}:f", "env.task={}:rows"])
@pytest.mark.parametrize(
    ("name", "value"), [("jax_default_prng_impl", "rbg"), ("jax_enable_x64", True)]
)
def test_modules_that_are_imported_late(field, name, value, tmp_path, monkeypatch):
    """A function's module changes settings: what is held is held again, what is refused named."""
    module = f"changes_{tmp_path.name}_{name}"
    (tmp_path / f"{module}.py").write_text(_CHANGES.format(name, value))
    monkeypatch.syspath_prepend(tmp_path)
    fields = [field.format(module), "sft.steps=0"]
    config = load_config(str(CONFIG), [f"run.dir={tmp_path}", *fields])
    try:
        if name in table.REFUSED:
            with pytest.raises(UserError, match=f"^{name.upper()} is on"):
                make_runtime(config)
        else:
            make_runtime(config)
            assert jax.config.values[name] == table.HELD[name]
        assert module in sys.modules
    finally:
        jax.config.update("jax_enable_x64", False)
        table.hold_settings()


@pytest.mark.parametrize("name", table.REFUSED)
def test_what_is_refused_is_named(name):
    try:
        jax.config.update(name, True)
        with pytest.raises(UserError, match=f"^{name.upper()} is on, and .*: unset it"):
            table.hold_settings()
    finally:
        jax.config.update(name, False)


@pytest.fixture
def another_level():
    before = jax.config.values["jax_optimization_level"]
    yield lambda: jax.config.update("jax_optimization_level", "O1")
    jax.config.update("jax_optimization_level", before)


def test_what_is_recorded_is_compared(tmp_path, another_level, monkeypatch):
    """What may change bits and is the user's: named at --resume, part of caches' names."""
    from fp8rl_jax.config import default_config

    config = default_config()
    keep_environment(tmp_path, environment(config))
    assert check_environment(tmp_path, environment(config)) is None
    name = cache_name("sft", {})
    another_level()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    line = check_environment(tmp_path, environment(config))
    assert "jax_optimization_level was UNKNOWN, is O1" in line
    assert "ONEDNN_MAX_CPU_ISA was , is AVX2; bits may differ" in line
    assert cache_name("sft", {}) != name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_NUMPY_RANK_PROMOTION", "nonsense"),
        ("JAX_ENABLE_X64", "maybe"),
        ("FLAX_RETURN_FROZENDICT", "maybe"),
        ("FLAX_MAX_REPR_DEPTH", "deep"),
    ],
)
def test_a_value_that_jax_does_not_know(name, value):
    """JAX, or Flax, raises where it is imported: one sentence with the name, and status 2."""
    process = python("recipe", "list", **{name: value})
    assert process.returncode == 2 and process.stdout == ""
    assert re.fullmatch(r"error: [^\n]*\n", process.stderr)
    assert name in process.stderr.upper() and "unset it" in process.stderr


_HOSTILE = {
    "FLAX_FIX_RNG_SEPARATOR": "1",
    "FLAX_RETURN_FROZENDICT": "1",
    "JAX_CHECK_STATIC_INDICES": "1",
    "JAX_DEBUG_KEY_REUSE": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_EXPLICIT_X64_DTYPES": "error",
    "JAX_LEGACY_PRNG_KEY": "error",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_RANDOM_SEED_OFFSET": "3",
    "JAX_SOFTMAX_CUSTOM_JVP": "1",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_TRANSFER_GUARD": "disallow",
}


@pytest.mark.slow
def test_a_run_under_hostile_settings(tiny_run, tmp_path, monkeypatch):
    """All of them at once: the records of a run without any."""
    for name, value in _HOSTILE.items():
        assert name.lower() in {*table.HELD, *table.FLAX_HELD}
        monkeypatch.setenv(name, value)
    finish(start(tmp_path))
    assert reproducible(tmp_path) == reproducible(tiny_run[0])
