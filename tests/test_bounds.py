"""Bounds of numbers where a function is called by itself, from Python."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

from fp8rl_jax.base.bounds import BOUNDS, shown
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.presets import preset
from fp8rl_jax.quant.scaling import delayed, static
from fp8rl_jax.rl import aggregation, corrections, losses, mismatch, shaping

_FUNCTIONS = [*losses.LOSSES.values(), *corrections.CORRECTIONS.values()]
_ARRAYS = dict.fromkeys(("mask", "lengths", "learner_logp", "rollout_logp"))


def _parameters() -> list:
    """(function, parameter, bounds) of each number that a function of rl/ or a policy takes."""
    found = []
    others = [shaping.overlong_penalty, aggregation.seq_mean_token_sum_norm, delayed, static]
    for function in [*_FUNCTIONS, *others, mismatch.mismatch_metrics]:
        for name in inspect.signature(function).parameters:
            key = f"{function.__name__}.{name}"
            if name not in _ARRAYS:
                found.append((function, name, BOUNDS[key if key in BOUNDS else f"algo.{name}"]))
    return found


@pytest.mark.parametrize(
    ("function", "name", "bounds"), _parameters(), ids=lambda x: getattr(x, "__name__", str(x))
)
def test_numbers_out_of_bounds_are_refused_at_the_call(function, name, bounds):
    """Below, above, far above what a float or an int holds, and what is no number."""
    needed = inspect.signature(function).parameters.values()
    others = {p.name: _ARRAYS.get(p.name, 1) for p in needed if p.default is p.empty}
    for value in (bounds.least - 10, bounds.most * 2 + 1, 10**400, float("nan")):
        with pytest.raises(UserError, match=rf"^{function.__name__}\({name}=.*\): write "):
            function(**{**others, name: value})
    with pytest.raises(TypeError, match=f"{name} is 'much'; write a number"):
        function(**{**others, name: "much"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", 1e37),
        ("rms_norm_eps", 1e-40),
        ("rope_theta", 1.0),
        ("hidden_size", 2**31),
        ("num_hidden_layers", 2**63),
        ("vocab_size", 10**400),
        ("routed_scaling_factor", float("inf")),
        ("rope_factor", float("nan")),
    ],
)
def test_shapes_of_a_model(field, value):
    """The same where a model's shapes are changed by hand or come from a file."""
    with pytest.raises(UserError, match=rf"^model\.{field} is .*; write "):
        dataclasses.replace(preset("qwen3_0p6b"), **{field: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rope_type": "llama3", "rope_low_freq_factor": 4.0},
            r"rope_low_freq_factor .*4\.0.*model\.rope_high_freq_factor",
        ),
        (
            {"rope_type": "yarn", "rope_beta_slow": 33.0},
            r"rope_beta_fast.*model\.rope_beta_slow = 33\.0",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_interleave": True},
            r"partial_rotary_factor is 0\.5 and rope_interleave True.*set rope_interleave=False",
        ),
        ({"pre_norms": False}, r"pre_norms is False and sandwich_norms too.*set one of them"),
    ],
)
def test_rules_that_contradict_each_other(fields, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(preset("qwen3_0p6b"), **fields)


def test_a_number_of_many_digits_has_a_short_sentence():
    """Python refuses to write more than 4,300 digits."""
    assert shown(10**5000) == "a number of about 5001 digits"
    assert shown(-7) == "-7" and shown("a") == "'a'"
    with pytest.raises(UserError, match=r"ppo\(clip_low=a number of about 5001 digits\)"):
        losses.ppo(clip_low=10**5000)


def test_the_buffer_of_a_length_penalty_is_within_the_length():
    with pytest.raises(UserError, match=r"overlong_penalty\(buffer=5\): write at most .* = 4"):
        shaping.overlong_penalty(np.array([1, 4]), 4, 5, 1.0)
