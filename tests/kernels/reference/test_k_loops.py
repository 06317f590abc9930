"""Forms of the loop over K that may stand for each other, at every number of threads."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8rl_jax import kernels
from fp8rl_jax.kernels.reference import matmul

_FORMS = ("unrolled", "looped")


def _hashes(threads: int) -> dict:
    script = str(pathlib.Path(__file__).with_name("k_loops.py"))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "NPROC": str(threads)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_forms_are_equal_at_every_number_of_threads():
    """One hash for both forms and 1, 2, 16 and 64 threads; rows do not see each other."""
    found = [_hashes(threads) for threads in (1, 2, 16, 64)]
    assert len({result[form][0] for result in found for form in _FORMS}) == 1
    assert all(result[form][1] for result in found for form in _FORMS)
    assert found[-1]["threads"] > found[0]["threads"] + 30, "NPROC must really set the threads"


@pytest.mark.parametrize("depth", [128 * (matmul._UNROLL_K + 1), 18_432])
def test_the_program_does_not_grow_with_k(depth):
    """Two dots, one before the loop and one in it, at 9 blocks of K as at 144."""
    x, w = jnp.zeros((8, depth)), jnp.zeros((depth, 128))
    text = jax.jit(kernels.block_matmul).lower(x, w).as_text()
    assert text.count("stablehlo.dot_general") == 2
    assert text.count("stablehlo.while") == 1
