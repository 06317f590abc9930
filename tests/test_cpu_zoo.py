"""CPUs that are not at hand: their way of multiplying is found, and the promise holds in it."""

from __future__ import annotations

import functools
import shutil

import cpu_zoo
import pytest

# One thread, three and many of each way to multiply; two are those of `this one` or less.
_LEFT_OUT = ("AVX2", "AVX2, 16 threads", "2 threads", "16 threads")
_NATIVE = [
    name for name, (_, emulated) in cpu_zoo.CPUS.items() if not emulated and name not in _LEFT_OUT
]
_tried = functools.cache(cpu_zoo.try_one)


def test_a_capped_cpu():
    """No instruction for bf16, oneDNN's AVX2 code: a vocabulary of 14."""
    found = cpu_zoo.try_one("AVX2, 3 threads", short=True)
    assert isinstance(found, dict), found
    assert found["way"] == "float32"
    assert found["canary"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", _NATIVE)
def test_native(name):
    found, here = _tried(name), _tried(_NATIVE[0])
    assert isinstance(found, dict), found
    assert isinstance(here, dict), here
    assert found["canary"] == found["auto"]["drift"] == found["exact"]["drift"] == 0
    assert found["exact"]["record"] == here["exact"]["record"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs qemu-user")
@pytest.mark.parametrize("name", ["QEMU Haswell", "QEMU EPYC-Milan"])
def test_emulated(name):
    found = cpu_zoo.try_one(name)
    assert isinstance(found, dict), found
    assert found["way"] == "float32" and found["canary"] == 0


@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs qemu-user")
def test_without_avx_jax_says_so():
    found = cpu_zoo.try_one("QEMU Nehalem")
    assert isinstance(found, str) and "AVX" in found
