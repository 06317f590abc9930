"""What a decode step runs in one launch has the bits of several, which the learner runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_checks import assert_bitwise_equal, reports

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench.kernel_times import blocks
from fp8rl_jax.kernels.gpu import attention_inputs, embedding, matmul, mosaic_decode
from fp8rl_jax.kernels.gpu.attention_inputs import Cache, Kept

pytestmark = pytest.mark.gpu
_EPS = 1e-6


@pytest.mark.parametrize(
    ("quantised", "biased"),
    [(True, False), (False, False), (True, True)],
    ids=["fp8", "bf16", "fp8 biased"],
)
def test_attention_inputs(source, quantised, biased, heads=(32, 8), width=128, tokens=512):
    """Biases, norm, rotation and quantiser, one after another for all tokens of a sequence; then at
    once for every eighth token, as a decode step writes it to a page."""
    dtype, counts = jnp.float32 if biased else jnp.bfloat16, (*heads, heads[1])
    q, k, v = (source.take(dtype, 1, tokens, n, width) for n in counts)
    biases = [source.take(jnp.float32, n * width) for n in counts] if biased else None
    rope = tuple(source.take(jnp.float32, 1, tokens, width // 2) for _ in "cs")
    gains = tuple(source.take(jnp.float32, width) for _ in "qk")

    @exact_jit
    def one_by_one(q, k, v, rope, gains, biases):
        if biases is not None:
            q, k, v = (
                (x + bias.reshape(x.shape[2:])).astype(jnp.bfloat16)
                for x, bias in zip((q, k, v), biases, strict=True)
            )
        q, k = (
            attention_inputs.rotate(attention_inputs.rms_norm(x, gain, _EPS), *rope)
            for x, gain in zip((q, k), gains, strict=True)
        )
        if not quantised:
            return q, k, (k, None), (v, None)
        return q, k, *(attention_inputs.quantize(x, None, False) for x in (k, v))

    @exact_jit
    def at_once(q, k, v, rope, gains, biases):
        batch, bits = q.shape[0], jnp.uint8 if quantised else jnp.uint16
        pool = jnp.zeros((3 * batch, 64, heads[1], width), bits)
        scale = jnp.zeros(pool.shape[:3]) if quantised else None
        table = jnp.arange(3 * batch, dtype=jnp.int32).reshape(3, batch, 1)
        place = Cache((pool, pool, scale, scale), jnp.int32(1), jnp.full((batch, 1), 5), table)
        stack = tuple(jnp.stack([-gain, gain, gain]) for gain in gains)
        how = "row" if quantised else "none"
        kept = Kept(k=how, v=how)
        run = attention_inputs.attention_inputs
        more = {}
        if biases is not None:
            stacks = tuple(jnp.stack([-bias, bias, bias]) for bias in biases)
            more = {"biases": stacks, "dtype": jnp.bfloat16}
        q, k, _, _, *stored = run(q, k, v, rope, stack, kept, eps=_EPS, cache=place, **more)
        return q, k, *(x if x is None else x[batch : 2 * batch, 5:6] for x in stored)

    q_whole, k_whole, (k8, k_scale), (v8, v_scale) = one_by_one(q, k, v, rope, gains, biases)
    some = np.arange(0, tokens, 8)
    rows = [x[0, some][:, None] for x in (q, k, v)]
    found = at_once(*rows, tuple(x[0, some][:, None] for x in rope), gains, biases)
    bits = jnp.uint8 if quantised else jnp.uint16
    wanted = [q_whole, k_whole, *(jax.lax.bitcast_convert_type(x, bits) for x in (k8, v8))]
    wanted += [k_scale, v_scale] if quantised else []
    wanted = [x[0, some][:, None] for x in wanted]
    assert_bitwise_equal("attention's inputs", [x for x in found if x is not None], wanted)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_products_at_once(source, kind, rows, depth=4096, columns=(4096, 1024, 1024)):
    """Three products in one launch, from the second layer of a stack; and one with a residual."""
    dtype = {"fp8": jnp.float8_e4m3fn, "bf16": jnp.bfloat16}[kind]
    x = source.take(dtype, rows, depth)
    weights = [source.take(dtype, 2, n, depth).swapaxes(1, 2) for n in columns]
    x_scale = source.scales(rows, blocks(depth)) if kind == "fp8" else None
    scales = None
    if kind == "fp8":
        scales = [source.scales(2, blocks(depth), blocks(n)) for n in columns]
    residual = source.take(jnp.bfloat16, rows, columns[0])
    layer = jnp.int32(1)

    @exact_jit
    def at_once(x, weights, layer, x_scale, scales):
        return matmul.layer_matmuls(x, weights, layer, x_scale, scales, jnp.bfloat16)

    @exact_jit
    def added(x, weight, layer, x_scale, scales, residual):
        run = matmul.layer_matmuls
        return run(x, [weight], layer, x_scale, scales, jnp.bfloat16, residual)[0]

    @exact_jit
    def alone(x, weights, x_scale, scales, residual):
        scales = [None] * len(weights) if scales is None else [s[1] for s in scales]
        pairs = zip(weights, scales, strict=True)
        found = [matmul.matmul(x, w[1], x_scale, s, jnp.bfloat16) for w, s in pairs]
        total = residual.astype(jnp.float32) + found[0].astype(jnp.float32)
        return found, total.astype(jnp.bfloat16)

    found, total = alone(x, weights, x_scale, scales, residual)
    assert_bitwise_equal("at once", at_once(x, weights, layer, x_scale, scales), found)
    first = None if scales is None else scales[:1]
    sums = added(x, weights[0], layer, x_scale, first, residual)
    assert_bitwise_equal("with a residual", sums, total)


@reports
@pytest.mark.parametrize("rows", [1, 64, 130])
@pytest.mark.parametrize("columns", [(4096, 1024, 1024), (12_288, 12_288), (4096,)], ids=str)
def test_mosaic_products(source, rows, columns, depth=4096):
    """The option `mosaic`: the bits of Triton's kernel, by every tile that divides the columns."""
    fp8 = jnp.float8_e4m3fn
    x, layer = source.take(fp8, rows, depth), jnp.int32(1)
    weights = [source.take(fp8, 2, n, depth).swapaxes(1, 2) for n in columns]
    x_scale = source.scales(rows, blocks(depth))
    scales = [source.scales(2, blocks(depth), blocks(n)) for n in columns]
    residual = source.take(jnp.bfloat16, rows, columns[0]) if len(columns) == 1 else None
    operands = x, weights, layer, x_scale, scales, jnp.bfloat16, residual
    want = exact_jit(matmul.layer_matmuls, static_argnums=5)(*operands)
    for tile in mosaic_decode.TILES:
        if all(n % tile.columns == 0 for n in columns):
            run = exact_jit(mosaic_decode.layer_matmuls, static_argnums=(5, 7))
            assert_bitwise_equal(str(tile), run(*operands, tile), want)


def test_gradient_of_the_embedding(source, tokens=4096, width=4096, count=151_936):
    """Against numpy's sum in the order of the tokens, a third of which are one token."""
    rows = source.take(jnp.bfloat16, tokens, width)
    ids = np.random.default_rng(0).integers(0, count, tokens).astype(np.int32)
    ids[::3] = 11
    add = exact_jit(embedding.embedding_gradient, static_argnums=2)
    found = add(jnp.asarray(ids), rows, count)
    wanted = np.zeros((count, width), np.float32)
    for token, row in zip(ids, np.asarray(rows, np.float32), strict=True):
        wanted[token] += row
    assert_bitwise_equal("gradient of the embedding", found, wanted)
