"""With exact products no sum of a train step has an order that instructions or threads choose.

The whole program is read, not one shape run: a test of one shape misses what another shows.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import exact_steps
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from marks import quick_if
from own_sums import own_sums

from fp8rl_jax.kernels import sum_last


@pytest.mark.parametrize("name", quick_if(lambda name: name == "everything", exact_steps.STEPS))
def test_no_sum_is_left_to_xla(name):
    program, arguments = exact_steps.arguments(exact_steps.STEPS[name], shapes=True)
    assert own_sums(program.trace(*arguments).jaxpr) == {}


def test_sums_of_xla_are_seen():
    """Also within loops; but no sum of two numbers, of whole numbers, or in float64."""

    @jax.jit
    def program(x):
        seen = x.sum(), x @ x.T, jnp.cumsum(x), lax.map(lambda row: row.mean(), x)
        return seen, x[:, :2].sum(1), (x > 0).sum(), x.max(), sum_last(x)

    counts = own_sums(program.trace(jnp.ones((3, 16))).jaxpr)
    names = sorted(name.partition(" ")[0] for name in counts)
    assert names == ["cumsum", "dot_general", "reduce_sum", "reduce_sum"]


@pytest.mark.slow
def test_other_products_are_seen():
    """Those of gradients under other ways of multiplying, in the program of the same step."""
    program, arguments = exact_steps.arguments(exact_steps.STEPS["recipe fp8"], "auto", shapes=True)
    assert own_sums(program.trace(*arguments).jaxpr)


_CAP = {"ONEDNN_MAX_CPU_ISA": "AVX2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}


@functools.cache
def _digests(variables: tuple[tuple[str, str], ...]) -> dict:
    script = pathlib.Path(exact_steps.__file__)
    surroundings = {**os.environ, "JAX_PLATFORMS": "cpu", **dict(variables)}
    done = subprocess.run(
        [sys.executable, str(script)], env=surroundings, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"NPROC": "3"}, _CAP, {"NPROC": "1", **_CAP}])
def test_steps_are_equal_on_other_cpus(variables):
    """With adapters, experts' biases, and losses of 12 shapes."""
    here = _digests((("NPROC", "1"),))
    assert _digests(tuple(variables.items())) == here
