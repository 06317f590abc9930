"""The kernels lowered for CUDA by the installed JAX, without a GPU: one kernel, no other dot."""

import re

import jax
import jax.numpy as jnp
import pytest
from marks import slow

pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")

from hopper import lower, products

from fp8rl_jax.kernels.gpu import attention as strict_attention
from fp8rl_jax.kernels.gpu import attention_gradient, attention_inputs, fast_attention, head, norm
from fp8rl_jax.kernels.gpu import matmul as kernels

E4M3 = jnp.float8_e4m3fn
ONE = {"triton_kernel_call": 1}


def _shape(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("rows, columns, depth", [slow(1, 4096, 1024), (300, 520, 1000)])
@pytest.mark.parametrize("by_column", [False, True], ids=["blocks", "columns"])
def test_fp8(rows, columns, depth, by_column):
    blocks = -(-depth // 128)
    scales = columns if by_column else -(-columns // 128)
    text = lower(
        lambda *a: kernels.matmul(*a, dtype=jnp.bfloat16),
        _shape(rows, depth, dtype=E4M3),
        _shape(depth, columns, dtype=E4M3),
        _shape(rows, blocks),
        _shape(blocks, scales),
    )
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
        kernels.grouped_matmul,
        x,
        w,
        jax.ShapeDtypeStruct(experts.shape, jnp.int32),
        _shape(5, 64, 2),
        _shape(4, 2, 3),
    )
    assert products(text) == ONE


def test_grouped_wgrad():
    x, dy = _shape(5, 128, 256, dtype=E4M3), _shape(5, 128, 384, dtype=E4M3)
    text = lower(
        lambda x, dy, experts, *scales: kernels.grouped_wgrad(x, dy, experts, 4, *scales),
        x,
        dy,
        _shape(5, dtype=jnp.int32),
        _shape(5, 1, 256),
        _shape(5, 1, 384),
    )
    assert products(text) == ONE


_ROWS = _shape(300, 1000, dtype=jnp.bfloat16)
_PASSES = {
    "rms_norm": lambda x: norm.rms_norm(x, x[0], 1e-6),
    "rms_norm, quantised": lambda x: norm.rms_norm(x, x[0], 1e-6, quantisation=norm.Quantisation()),
    "gated_activation": lambda x: norm.gated_activation(x, x),
    "gated_activation, quantised": lambda x: norm.gated_activation(
        x, x, quantisation=norm.Quantisation(jnp.float8_e5m2, True)
    ),
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
@pytest.mark.parametrize("rows, columns, depth", [slow(1, 4096, 576), (300, 1001, 100)])
def test_head_is_two_kernels_and_its_logits_are_nowhere(rows, columns, depth, dtype):
    text = lower(head.head_logprobs, *_head_case(rows, columns, depth, dtype))
    assert products(text) == {"triton_kernel_call": 2}
    assert f"tensor<{rows}x{columns}x" not in text
    text = lower(head.logprobs_of_logits, _shape(rows, columns), *_head_case(rows, 1, 1, dtype)[2:])
    assert products(text) == {"triton_kernel_call": 2}


def test_a_loop_leaves_out_chunks_of_the_head():
    case = _head_case(9000, 1001, 100, jnp.bfloat16)
    text = lower(head.head_logprobs, *case, _shape(dtype=jnp.int32))
    assert products(text) == {"triton_kernel_call": 2} and "stablehlo.while" in text


@pytest.mark.parametrize("rows", [slow(8), 9000])
def test_gradients_of_the_head_are_three_kernels_over_chunks(rows):
    case = _head_case(rows, 5120, 576, jnp.bfloat16)
    text = lower(head.head_logprobs_vjp, *case, _shape(rows), _shape(rows))
    assert products(text) == {"triton_kernel_call": 3}
    assert ("stablehlo.while" in text) == (rows > head.CHUNK)
    chunk = str(min(rows, head.CHUNK))
    assert set(re.findall(r"tensor<(\d+)x5120xbf16>", text)) == {chunk, "576"}
    assert set(re.findall(r"tensor<(\d+)x5120xf32>", text)) == {"576"}  # the head's gradient


def _attention_case(batch, queries, slots, keys, width=128, q_dtype=jnp.bfloat16):
    kv = _shape(batch, slots, 8, width, dtype=keys)
    scale = _shape(batch, slots, 8) if keys == E4M3 else None
    case = _shape(batch, queries, 32, width, dtype=q_dtype), kv, kv
    return *case, _shape(batch, queries, dtype=jnp.int32), scale, scale


def _attention(q, k, v, positions, k_scale, v_scale):
    return strict_attention.attention(
        q, k, v, positions, scale=0.1, k_scale=k_scale, v_scale=v_scale
    )


@pytest.mark.parametrize("keys", [E4M3, slow(jnp.bfloat16)])
@pytest.mark.parametrize(
    ("batch", "queries", "slots", "kernels"),
    [
        (8, 1, 4096, 2),
        (2, 700, 700, 1),
        *(slow(*c) for c in ((8, 1, 300, 1), (128, 1, 4096, 2), (1, 4, 1000, 2))),
    ],
)
def test_attention(batch, queries, slots, kernels, keys):
    """A decode step, or few tiles, over more than one split: a kernel for the splits, one that
    joins them."""
    text = lower(_attention, *_attention_case(batch, queries, slots, keys))
    assert products(text) == {"triton_kernel_call": kernels}
    # Queries, keys and values enter as they lie.
    assert "stablehlo.transpose" not in text and "stablehlo.convert" not in text


def test_attention_in_float32():
    case = _attention_case(2, 70, 70, jnp.float32, q_dtype=jnp.float32)
    assert products(lower(_attention, *case)) == ONE


@pytest.mark.slow
def test_attention_over_latents():
    def f(q, latent, scale, positions, q_rope, k_rope):
        return strict_attention.attention(
            q,
            latent,
            latent,
            positions,
            scale=0.1,
            k_scale=scale,
            v_scale=scale,
            q_rope=q_rope,
            k_rope=k_rope,
        )

    bf16 = jnp.bfloat16
    text = lower(
        f,
        _shape(2, 1, 128, 512, dtype=bf16),
        _shape(2, 900, 1, 512, dtype=E4M3),
        _shape(2, 900, 1),
        _shape(2, 1, dtype=jnp.int32),
        _shape(2, 1, 128, 64, dtype=bf16),
        _shape(2, 900, 1, 64, dtype=bf16),
    )
    assert products(text) == {"triton_kernel_call": 2}
    assert "tensor<2x1x128x512xf32>" in text


@pytest.mark.parametrize("keys", [E4M3, slow(jnp.bfloat16)])
@pytest.mark.parametrize("batch, queries, kernels", [(8, 1, 2), slow(128, 1, 2), slow(2, 700, 1)])
def test_attention_over_pages(batch, queries, kernels, keys):
    """The pool enters as it lies: no sequence's cache is gathered."""
    q, _, _, positions, *_ = _attention_case(batch, queries, 64, keys)
    pages = _shape(9000, 64, 8, 128, dtype=keys)
    scale = _shape(9000, 64, 8) if keys == E4M3 else None
    table = _shape(batch, 64, dtype=jnp.int32)

    def f(q, k, v, positions, k_scale, v_scale, table):
        return strict_attention.attention(
            q, k, v, positions, scale=0.1, k_scale=k_scale, v_scale=v_scale, table=table
        )

    text = lower(f, q, pages, pages, positions, scale, scale, table)
    assert products(text) == {"triton_kernel_call": kernels}
    for name in ("gather", "transpose", "convert", "dynamic_slice"):
        assert f"stablehlo.{name}" not in text


def _gradients(q, k, v, positions, k_scale, v_scale):
    cotangent = jnp.ones(q.shape, jnp.float32)
    return attention_gradient.attention_vjp(
        q, k, v, positions, cotangent, scale=0.1, k_scale=k_scale, v_scale=v_scale
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "keys"),
    [*(slow(*case) for case in ((96, jnp.bfloat16), (256, E4M3), (256, jnp.bfloat16))), (96, E4M3)],
)
def test_fast_attention_and_gradients(keys, width):
    """No other product, nothing of queries by keys, no copies of keys or values in float32."""
    case = _attention_case(2, 700, 700, keys, width)

    def fast(q, k, v, positions, k_scale, v_scale):
        named = {"scale": 0.1, "k_scale": k_scale, "v_scale": v_scale}
        return fast_attention.forward(fast_attention.prepare(q, k, v, positions, **named))

    assert products(lower(fast, *case)) == ONE
    text = lower(_gradients, *case)
    assert products(text) == {"triton_kernel_call": 3}
    assert "stablehlo.transpose" not in text and "700x700" not in text
    assert not re.search(rf"convert .*-> tensor<2x700x8x{width}xf32>", text)


def test_gradients_over_latents_are_not_kernels():
    """576 features: in jnp, by blocks."""
    bf16 = jnp.bfloat16
    q, k, v = (_shape(2, 700, n, m, dtype=bf16) for n, m in ((16, 576), (1, 576), (1, 512)))
    text = lower(
        lambda *x: attention_gradient.attention_vjp(*x, scale=0.1),
        q,
        k,
        v,
        _shape(2, 700, dtype=jnp.int32),
        _shape(2, 700, 16, 512),
    )
    assert "triton_kernel_call" not in products(text) and "700x700" not in text


def test_a_cache_of_keys_with_scales_and_values_without():
    """INT8 and bf16: each array that is there comes back with its shape, written in place."""
    cache = [_shape(6, 128, 2, 64, dtype=dtype) for dtype in (jnp.int8, jnp.uint16)]
    cache.append(_shape(6, 128, 2))
    rows = [_shape(2, 1, heads, 64, dtype=jnp.bfloat16) for heads in (4, 2, 2)]
    kept = attention_inputs.Kept("none", "row", "none")

    def f(rows, arrays, layer, positions):
        cache = attention_inputs.Cache((*arrays, None), layer, positions)
        return attention_inputs.attention_inputs(*rows, None, None, kept, cache=cache)

    numbers = _shape(dtype=jnp.int32), _shape(2, 1, dtype=jnp.int32)
    *_, k, v, k_scale, v_scale = jax.eval_shape(f, rows, cache, *numbers)
    assert [(x.shape, x.dtype) for x in (k, v, k_scale)] == [(x.shape, x.dtype) for x in cache]
    assert v_scale is None
    assert products(lower(f, rows, cache, *numbers)) == ONE


def _devices():
    """Four along 'data'; Auto is not every JAX version's default."""
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((4,), ("data",), axis_types=auto)


def test_attention_under_shard_map():
    """Each device's own sequences; typed so, which shard_map checks."""
    mesh = _devices()
    spec = jax.sharding.PartitionSpec("data")

    def f(*arguments):
        return jax.shard_map(_attention, mesh=mesh, in_specs=spec, out_specs=spec)(*arguments)

    out = jax.eval_shape(f, *_attention_case(8, 1, 4096, E4M3))
    assert out.shape == (8, 1, 32, 128) and out.dtype == jnp.float32


def test_gradients_under_shard_map():
    mesh = _devices()
    spec = jax.sharding.PartitionSpec("data")

    def f(*arguments):
        return jax.shard_map(_gradients, mesh=mesh, in_specs=spec, out_specs=spec)(*arguments)

    grads = jax.eval_shape(f, *_attention_case(8, 40, 40, E4M3))
    assert [x.shape for x in grads] == [(8, 40, 32, 128), *[(8, 40, 8, 128)] * 2]
