"""The kernels lowered for CUDA by the installed JAX, without a GPU: one kernel, no other dot."""

import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")

from hopper import lower, products

from fp8rl_jax.kernels import head_logprobs as head
from fp8rl_jax.kernels import matmul as kernels
from fp8rl_jax.kernels import norm

E4M3 = jnp.float8_e4m3fn
ONE = {"triton_kernel_call": 1}


def _shape(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("rows, columns, depth", [(1, 4096, 1024), (300, 520, 1000)])
@pytest.mark.parametrize("by_column", [False, True], ids=["blocks", "columns"])
def test_fp8(rows, columns, depth, by_column):
    blocks = -(-depth // 128)
    scales = columns if by_column else -(-columns // 128)
    text = lower(
        lambda *a: kernels.matmul(*a, dtype=jnp.bfloat16),
        _shape(rows, depth, dtype=E4M3), _shape(depth, columns, dtype=E4M3),
        _shape(rows, blocks), _shape(blocks, scales),
    )  # fmt: skip
    assert products(text) == ONE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_unscaled(dtype):
    operands = _shape(64, 576, dtype=dtype), _shape(576, 1000, dtype=dtype)
    assert products(lower(kernels.matmul, *operands)) == ONE


def test_batch_is_one_kernel_in_a_loop():
    operands = _shape(3, 64, 576), _shape(3, 576, 1000)
    text = lower(jax.vmap(kernels.matmul), *operands)
    assert products(text) == ONE and "stablehlo.while" in text


def test_grouped():
    x, w, experts = _shape(5, 64, 256, dtype=E4M3), _shape(4, 256, 384, dtype=E4M3), _shape(5)
    text = lower(
        kernels.grouped_matmul, x, w, jax.ShapeDtypeStruct(experts.shape, jnp.int32),
        _shape(5, 64, 2), _shape(4, 2, 3),
    )  # fmt: skip
    assert products(text) == ONE


def test_grouped_wgrad():
    x, dy = _shape(5, 128, 256, dtype=E4M3), _shape(5, 128, 384, dtype=E4M3)
    text = lower(
        lambda x, dy, experts, *scales: kernels.grouped_wgrad(x, dy, experts, 4, *scales),
        x, dy, _shape(5, dtype=jnp.int32), _shape(5, 1, 256), _shape(5, 1, 384),
    )  # fmt: skip
    assert products(text) == ONE


_ROWS = _shape(300, 1000, dtype=jnp.bfloat16)
_PASSES = {
    "rms_norm": lambda x: norm.rms_norm(x, x[0], 1e-6),
    "rms_norm_quantized": lambda x: norm.rms_norm_quantized(x, x[0], 1e-6),
    "rms_norm_quantized alone": lambda x: norm.rms_norm_quantized(x, x[0], 1e-6, keep=False),
    "gated_silu": lambda x: norm.gated_silu(x, x),
    "gated_silu_quantized": lambda x: norm.gated_silu_quantized(x, x, jnp.float8_e5m2, True),
    "quantize_rows": norm.quantize_rows,
    "quantize_columns": norm.quantize_columns,
}


@pytest.mark.parametrize("function", _PASSES.values(), ids=_PASSES)
def test_pass_over_memory(function):
    text = lower(function, _ROWS)
    assert products(text) == ONE
    assert "stablehlo.reduce" not in text and "stablehlo.divide" not in text


def test_quantised_rows_enter_a_matmul_as_they_are():
    """The two transposes of the scale follow one another: XLA removes them."""

    def f(x, w, w_scale):
        q, scale = norm.quantize_rows(x)
        return kernels.matmul(q, w, scale.T, w_scale)

    text = lower(f, _ROWS, _shape(1000, 512, dtype=E4M3), _shape(8, 4))
    assert products(text) == {"triton_kernel_call": 2}


def _head_case(rows: int, columns: int, depth: int, dtype):
    per_row = _shape(rows, dtype=jnp.int32), _shape(rows)
    return _shape(rows, depth, dtype=dtype), _shape(depth, columns, dtype=dtype), *per_row


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows, columns, depth", [(1, 4096, 576), (300, 1001, 100)])
def test_head_is_two_kernels_and_its_logits_are_nowhere(rows, columns, depth, dtype):
    text = lower(head.head_logprobs, *_head_case(rows, columns, depth, dtype))
    assert products(text) == {"triton_kernel_call": 2}
    assert f"tensor<{rows}x{columns}x" not in text
    text = lower(head.logprobs_of_logits, _shape(rows, columns), *_head_case(rows, 1, 1, dtype)[2:])
    assert products(text) == {"triton_kernel_call": 2}


@pytest.mark.parametrize("rows", [8, 9000])
def test_gradients_of_the_head_are_three_kernels_over_chunks(rows):
    case = _head_case(rows, 5120, 576, jnp.bfloat16)
    text = lower(head.head_logprobs_vjp, *case, _shape(rows), _shape(rows))
    assert products(text) == {"triton_kernel_call": 3}
    assert ("stablehlo.while" in text) == (rows > head.CHUNK)
    chunk = str(min(rows, head.CHUNK))
    assert set(re.findall(r"tensor<(\d+)x5120xbf16>", text)) == {chunk, "576"}
    assert set(re.findall(r"tensor<(\d+)x5120xf32>", text)) == {"576"}  # the head's gradient
