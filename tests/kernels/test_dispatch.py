"""Which implementation a product takes."""

import dataclasses
import functools
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.kernels import block_matmul, by_platform, resolve, triton_installed
from fp8rl_jax.kernels.dispatch import IMPLEMENTATIONS
from fp8rl_jax.kernels.reference.matmul import block_matmul as reference
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.quant.operands import Activation
from fp8rl_jax.quant.products import layer_matmuls
from fp8rl_jax.quant.qarray import QArray

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
        want = reference(lhs, rhs, way=cpu_way()).astype(dtype)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


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
        ("mosaic", 64, "mosaic_gpu_v2"),
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


@pytest.mark.parametrize(
    ("implementation", "target"), [("mosaic", "mosaic_gpu_v2"), ("gpu", "triton_kernel_call")]
)
def test_gradients_of_weights_are_one_kernel(implementation, target):
    """Products with a scale for every column."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    from hopper import lower, products

    *operands, _ = _case(512, 256, 512)
    scale = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    text = lower(functools.partial(block_matmul, implementation=implementation), *operands, scale)
    assert set(products(text)) == {target}


@pytest.mark.parametrize("name", ["mosaic", "gpu"])
def test_a_layer_of_a_stack_is_multiplied_by_the_named_kernel(name):
    """Quantised rows by Mosaic, rows in bf16 by Triton whatever the name."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    from hopper import lower, products

    recipe = dataclasses.replace(get_recipe("fp8"), kernels=name)
    lhs, _, lhs_scale, _ = _case(64, 256, 512)
    stack = QArray(
        jax.ShapeDtypeStruct((3, 512, 256), E4M3),
        jax.ShapeDtypeStruct((3, 4, 2), jnp.float32),
        (128, 128),
    )
    value = jax.ShapeDtypeStruct(lhs.shape, jnp.bfloat16)
    rows = Activation(value, QArray(lhs, lhs_scale, (1, 128)))

    def run(recipe, rows, stack, layer):
        return layer_matmuls(recipe, rows, [stack, stack], layer, jnp.bfloat16)

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    target = {"mosaic": "mosaic_gpu_v2", "gpu": "triton_kernel_call"}[name]
    assert products(lower(functools.partial(run, recipe), rows, stack, layer)) == {target: 1}
    plain = functools.partial(run, dataclasses.replace(get_recipe("bf16"), kernels=name))
    values = jax.ShapeDtypeStruct(stack.shape, jnp.bfloat16)
    text = lower(plain, Activation(value), values, layer)
    assert products(text) == {"triton_kernel_call": 1}
