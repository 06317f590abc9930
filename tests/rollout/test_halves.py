"""A rollout in halves on two threads: the bits of the whole, and errors that arrive."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from random_model import initial_params, quantized
from tiny_run import compilations

from fp8rl_jax import models
from fp8rl_jax.rollout import HalvedSampler, Requests, SamplerConfig, halves, make_sampler

_MODEL = models.ModelConfig(259, 64, 64, 2, 4, 2, 16)
_NEW, _WIDTH, _GROUP = 6, 10, 4
_SETTINGS = SamplerConfig(_NEW, _GROUP, (7, 8), 0, top_p=0.95)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(halves, "available_cores", lambda: 2)


def _arguments(recipe: str, prompts: int) -> tuple:
    """Prompts of different lengths, temperatures and limits."""
    rng = np.random.default_rng(0)
    rows = prompts * _GROUP
    return (
        quantized(initial_params(_MODEL, 1), recipe),
        rng.integers(9, 259, (prompts, _WIDTH)).astype(np.int32),
        Requests(
            rng.integers(1, _WIDTH + 1, prompts).astype(np.int32),
            jax.random.key(3, impl="threefry2x32"),
            np.arange(rows, dtype=np.int32),
            np.where(np.arange(rows) % 3, 1.0, 0.0).astype(np.float32),
            rng.integers(1, _NEW + 1, rows).astype(np.int32),
            tuple(jnp.asarray(t) for t in models.rope_tables(_MODEL, _WIDTH + _NEW)),
        ),
    )


@pytest.mark.parametrize("recipe", ["f32", slow("fp8")])
def test_halves_are_the_whole(recipe):
    """Every field of the rollout, bit for bit; and of an odd number of prompts."""
    sampler, arguments = HalvedSampler(_MODEL, recipe, _SETTINGS), _arguments(recipe, 4)
    whole = jax.device_get(make_sampler(_MODEL, recipe, _SETTINGS)(*arguments))
    assert len(set(whole.mask.sum(1))) > 2 and len(np.unique(whole.tokens)) > 10
    for _ in range(2):
        found = sampler(*arguments)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), whole)
    assert len(sampler._compiled) == compilations(sampler) == 1
    weights, prompts, requests = arguments
    odd = Requests(
        requests.lengths[:3],
        requests.key,
        requests.sample_ids[: 3 * _GROUP],
        requests.temperature[: 3 * _GROUP],
        requests.limits[: 3 * _GROUP],
        requests.rope,
    )
    found = jax.device_get(sampler(weights, prompts[:3], odd))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[: 3 * _GROUP]), found, whole)
    assert (len(sampler._compiled), compilations(sampler)) == (1, 2)


def test_an_error_in_a_thread_arrives(monkeypatch):
    """In the caller's thread, when both threads have ended."""
    sampler, arguments = HalvedSampler(_MODEL, "fp8", _SETTINGS), _arguments("fp8", 4)
    before, called = threading.active_count(), []

    def fails(_, prompts, *others):
        called.append(threading.current_thread())
        if (prompts == arguments[1][2:]).all():
            raise RuntimeError("the second half")
        return ()

    monkeypatch.setattr(sampler, "_compile", lambda _: fails)
    with pytest.raises(RuntimeError, match="the second half"):
        sampler(*arguments)
    assert len(called) == 2 and threading.current_thread() not in called
    assert threading.active_count() == before


def test_parts():
    """Two where there are two cores, an even number of prompts and enough rows."""
    assert halves.parts_of(4, 4, cores=2) == halves.parts_of(2, 8, cores=64) == 2
    assert halves.parts_of(4, 4, cores=1) == halves.parts_of(3, 8, cores=2) == 1
    assert halves.parts_of(2, 7, cores=2) == halves.parts_of(0, 8, cores=2) == 1


def test_taps_are_refused():
    with pytest.raises(ValueError, match="records no taps"):
        HalvedSampler(_MODEL, "fp8", SamplerConfig(_NEW, 1, (), 0, taps=("logits",)))
