"""Which implementation a product takes."""

import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.kernels import block_matmul, by_platform, resolve, triton_installed
from fp8rl_jax.kernels.dispatch import IMPLEMENTATIONS
from fp8rl_jax.kernels.reference.matmul import block_matmul as reference

E4M3 = jnp.float8_e4m3fn


def _case(rows: int, columns: int, depth: int):
    blocks = -(-depth // 128), -(-columns // 128)
    return (
        jax.ShapeDtypeStruct((rows, depth), E4M3),
        jax.ShapeDtypeStruct((depth, columns), E4M3),
        jax.ShapeDtypeStruct((rows, blocks[0]), jnp.float32),
        jax.ShapeDtypeStruct(blocks, jnp.float32),
    )


def test_a_program_for_a_cpu_is_the_reference():
    assert resolve("auto") == "reference" and resolve("triton") == "triton"
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((9, 300), (300, 40)))
    for dtype in (jnp.float32, jnp.bfloat16):
        got = block_matmul(lhs, rhs, dtype=dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(got), np.asarray(reference(lhs, rhs).astype(dtype))
        )


def test_unknown_names_are_refused():
    with pytest.raises(AssertionError, match="cublas"):
        block_matmul(jnp.ones((8, 128)), jnp.ones((128, 16)), implementation="cublas")


def test_auto_follows_the_platform(monkeypatch):
    """As on a machine with a GPU: the kernel for CUDA, the reference for what runs on its CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("fp8rl_jax.kernels.dispatch.triton_installed", lambda: True)

    def run(x):
        return by_platform("auto", lambda x: x * 2, lambda x: x * 3, x)

    assert jax.jit(run)(jnp.float32(1)) == 3
    hopper = pytest.importorskip("hopper")
    text = hopper.lower(run, jax.ShapeDtypeStruct((), jnp.float32))
    assert "2.0" in text and "3.0" not in text


def test_without_jax_triton_auto_is_the_reference(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("fp8rl_jax.kernels.dispatch.triton_installed", lambda: False)
    assert resolve("auto") == "reference"


@pytest.mark.parametrize(
    ("version", "runs"),
    [
        ("0.3.1", False),
        ("0.4.0", True),
        ("0.10.0.dev1", True),
        ("1.1+cu13", True),
        ("0.4rc1", True),
    ],
)
def test_jax_triton_is_new_enough(version, runs, monkeypatch):
    """XLA captures kernels into CUDA graphs from 0.4 on."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert triton_installed() is runs
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_installed() is False


@pytest.mark.parametrize(
    ("implementation", "rows", "target"),
    [
        ("triton", 512, "triton_kernel_call"),
        ("gpu", 512, "mosaic_gpu_v2"),
        ("gpu", 64, "triton_kernel_call"),
        ("reference", 512, "dot_general"),
    ],
)
def test_each_name_is_one_kernel(implementation, rows, target):
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    from hopper import lower, products

    def run(*operands):
        return block_matmul(*operands, implementation=implementation, dtype=jnp.bfloat16)

    assert implementation in IMPLEMENTATIONS
    assert set(products(lower(run, *_case(rows, 512, 512)))) == {target}
