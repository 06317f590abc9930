"""The tests of tests/gpu on a CPU: they hold in Triton's interpreter, and fail where they must."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_if, slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")

import gpu_attention
import gpu_checks
import test_gpu_attention as attention
import test_gpu_attention_gradient as gradient
import test_gpu_experts as experts
import test_gpu_head as head
import test_gpu_layer as layer
import test_gpu_matmul as products
import test_gpu_norm as norms
from gpu_attention import Attention
from test_gpu_matmul import Dense

from fp8rl_jax.bench import kernel_shapes
from fp8rl_jax.bench.kernel_shapes import Product
from fp8rl_jax.bench.kernel_times import Source
from fp8rl_jax.kernels.gpu import attention as strict_attention
from fp8rl_jax.kernels.gpu import attention_inputs, embedding, fast_attention, matmul, norm
from fp8rl_jax.kernels.gpu import head as head_logprobs


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


@pytest.fixture
def interpreted(monkeypatch, interpreter):
    """The Triton kernels in Triton's interpreter, which adds within FP8 blocks in float32."""
    attentions = strict_attention, fast_attention, attention_inputs
    for module in (matmul, norm, head_logprobs, embedding, *attentions):
        monkeypatch.setattr(module, "triton_call", interpreter.triton_call)


_EXPERTS = Product("experts", "fprop", "fp8", 24, 136, 96, 4, 2)
_WGRAD = Product("experts", "fprop", "fp8", 150, 64, 32, 3, 2)
_PAGES = Attention("fp8", 1, (3, 65, 130), 4, 2, 32)
_GRADIENT = Attention("fp8", 20, (70, 70), 4, 2, 64, paged=False)
_DENSE = functools.partial(products.test_float64, Dense("fp8", 10, 256, 40))
_ROWS = functools.partial(products.test_rows, "fp8", (1, 65))
_PIECE = functools.partial(
    attention.test_pages_or_one_piece, heads=(2, 1), lengths=(3, 70), width=32
)
_PAGES_OR_PIECE = functools.partial(_PIECE, 5, None, "fp8")
_ATTENTION = functools.partial(attention.test_float64, _PAGES)
_UNDER_LOAD = functools.partial(
    products.test_the_same_bits_under_load, "fp8", 3, size=136, repeats=4, load=8
)
_GIVEN_EXPERTS = functools.partial(experts.test_products, _EXPERTS)
_GIVEN_WGRAD = functools.partial(experts.test_weight_gradients, _WGRAD)
_GRADIENTS = functools.partial(gradient.test_float64, _GRADIENT)
_NORM = functools.partial(norms.test_rows_and_quantisation, "rms_norm", 200, rows=66)
_HEAD = functools.partial(head.test_log_probabilities, shape=(65, 32, 130))
_INPUTS = functools.partial(layer.test_attention_inputs, heads=(4, 2), width=32, tokens=16)
_AT_ONCE = layer.test_products_at_once
# Every test of tests/gpu that compares, as a function of the random operands. A few are quick: the
# kernels have quick tests of their own.
_BODIES = [
    slow(_DENSE),
    slow(functools.partial(products.test_float64, Dense("fp8", 1, 128, 40, left="float8_e5m2"))),
    slow(functools.partial(products.test_float64, Dense("fp8", 70, 200, 40, by_column=True))),
    slow(functools.partial(products.test_float64, Dense("bf16", 70, 300, 40, "bfloat16"))),
    slow(functools.partial(products.test_float64, Dense("float32", 70, 300, 40))),
    slow(functools.partial(products.test_tiles, "fp8", (10, 136, 40))),
    slow(_ROWS),
    slow(_UNDER_LOAD),
    slow(_GIVEN_EXPERTS),
    slow(_GIVEN_WGRAD),
    _NORM,
    slow(functools.partial(norms.test_rows_and_quantisation, "gated_activation", 200, rows=70)),
    slow(functools.partial(norms.test_quantiser, 200, rows=70)),
    slow(_HEAD),
    _ATTENTION,
    slow(functools.partial(attention.test_float64, Attention("bf16", 5, (5, 70), 4, 2, 32))),
    slow(functools.partial(attention.test_float64, Attention("float32", 1, (64, 65), 2, 1, 32))),
    slow(functools.partial(attention.test_float64, Attention("fp8", 1, (3, 70), 4, 1, 64, 16))),
    slow(functools.partial(_INPUTS, quantised=True, biased=False)),
    slow(functools.partial(_INPUTS, quantised=False, biased=False)),
    slow(functools.partial(_INPUTS, quantised=True, biased=True)),
    functools.partial(_AT_ONCE, kind="fp8", rows=3, depth=200, columns=(136, 24, 40)),
    slow(functools.partial(_AT_ONCE, kind="bf16", rows=70, depth=72, columns=(136, 40, 40))),
    slow(functools.partial(layer.test_gradient_of_the_embedding, tokens=40, width=30, count=60)),
    slow(functools.partial(attention.test_alone_or_among_all, "fp8", 65, heads=(2, 1), width=64)),
    slow(
        functools.partial(
            attention.test_windows_and_sinks, "int8", 65, window=20, heads=(2, 1), width=64
        )
    ),
    slow(_PAGES_OR_PIECE),
    slow(functools.partial(_PIECE, 1, True, "bf16")),
    slow(functools.partial(_PIECE, 1, False, "fp8")),
    slow(functools.partial(_PIECE, 1, None, "int8")),
    slow(functools.partial(attention.test_float64, Attention("int8", 1, (3, 65, 130), 4, 2, 32))),
    slow(functools.partial(attention.test_alone_or_among_all, "int8", 65, heads=(2, 1), width=64)),
    _GRADIENTS,
    slow(
        functools.partial(
            gradient.test_float64, Attention("float32", 33, (33,), 2, 1, 32, paged=False)
        )
    ),
]


@pytest.mark.parametrize("body", _BODIES)
def test_holds(body, source, interpreted):
    body(source=source)


@pytest.mark.slow
def test_a_bit_that_differs_once_is_seen(source, interpreted, monkeypatch):
    calls = []
    product = Dense.product

    def at_times(case):
        right = product(case)

        def call(*operands):
            calls.append(operands)
            y = right(*operands)
            return y.at[0, 5].multiply(1 + 2**-7) if len(calls) == 4 else y

        return call

    monkeypatch.setattr(Dense, "product", at_times)
    with pytest.raises(AssertionError, match="1 elements had other bits in 4 repeats"):
        _UNDER_LOAD(source=source)


def test_published_matrices_are_all_compared(source, monkeypatch):
    """Of a model: each matrix, its weights' gradient, and each stack of experts."""
    found = []
    monkeypatch.setattr(products, "test_float64", lambda case, source: found.append(case))
    for name in ("test_products", "test_weight_gradients"):
        monkeypatch.setattr(experts, name, lambda case, source: found.append(case))
    products.test_published_matrices("qwen3_30b_a3b", source)
    experts.test_published_matrices("qwen3_30b_a3b", source)
    published = kernel_shapes.matrices("qwen3_30b_a3b")
    compared = {(c.kind, c.depth, c.columns) for c in found}
    assert {(m.kind, m.depth, m.columns) for m in published} <= compared
    assert sum(isinstance(c, Dense) and c.by_column for c in found) == 3
    assert (768, 2048, 128, 8) in {(m.depth, m.columns, m.experts, m.top_k) for m in published}


def _half_a_block(*operands, **options):
    lhs, rhs, lhs_scale, rhs_scale = operands
    return matmul.matmul(lhs, rhs, lhs_scale, rhs_scale.at[0, 0].multiply(0.5), **options)


def _swapped(*operands, **options):
    y = matmul.matmul(*operands, **options)
    return y.at[0].set(y[-1]).at[-1].set(y[0])


def _nan(*operands, **options):
    return matmul.matmul(*operands, **options).at[3, 5].set(jnp.nan)


def _by_count(*operands, **options):
    """Rounds otherwise where there are few rows."""
    y = matmul.matmul(*operands, **options)
    return y if y.shape[0] > 8 else y * jnp.float32(1 + 2e-7)


def _next_expert(x, w, ids, *scales):
    return matmul.grouped_matmul(x, w, (ids + 1) % w.shape[0], *scales)


def _left_over(x, w, ids, *scales):
    return matmul.grouped_matmul(x, w, ids, *scales) + (ids >= w.shape[0])[:, None, None]


def _no_zeros(*operands):
    return matmul.grouped_wgrad(*operands).at[1, 0, 0].set(1)


def _shifted(logits, *rest, right=head_logprobs.logprobs_of_logits):
    return right(logits + jnp.float32(1e-6), *rest)


def _one_key_less(positions, **others):
    return strict_attention.attention(positions=positions - 1, **others)


def _first_page_of_a_neighbour(table=None, **others):
    if table is not None:
        table = table.at[:, 0].set(jnp.roll(table[:, 0], 1))
    return strict_attention.attention(table=table, **others)


def _a_scale_of_1(v_scale, **others):
    return strict_attention.attention(v_scale=v_scale.at[..., 1].set(1), **others)


def _no_scale_of_values(*arrays, v_scale, right=gradient.attention_vjp, **settings):
    return right(*arrays, v_scale=jnp.ones_like(v_scale), **settings)


_WRONG = {
    "the scale of a block": (products, "matmul", _half_a_block, _DENSE, "error"),
    "rows in other places": (products, "matmul", _swapped, _DENSE, "error"),
    "a number that is none": (products, "matmul", _nan, _DENSE, "not finite"),
    "rounding by the number of rows": (products, "matmul", _by_count, _ROWS, "1 rows alone"),
    "another expert": (experts, "grouped_matmul", _next_expert, _GIVEN_EXPERTS, "0: error"),
    "idle groups": (experts, "grouped_matmul", _left_over, _GIVEN_EXPERTS, "are not zero"),
    "idle experts": (experts, "grouped_wgrad", _no_zeros, _GIVEN_WGRAD, "has a gradient"),
    "log-probabilities": (head_logprobs, "logprobs_of_logits", _shifted, _HEAD, "of logits, or"),
    "a key less": (attention, "attention", _one_key_less, _ATTENTION, "error"),
    "other pages": (attention, "attention", _first_page_of_a_neighbour, _ATTENTION, "error|finite"),
    "a scale": (attention, "attention", _a_scale_of_1, _ATTENTION, "error"),
    "pages and pieces": (
        attention,
        "attention",
        _first_page_of_a_neighbour,
        _PAGES_OR_PIECE,
        "elements differ, first at",
    ),
    "gradients": (gradient, "attention_vjp", _no_scale_of_values, _GRADIENTS, "dq of fp8"),
}
# One a bound, a NaN and bits.
_QUICK = ("a number that is none", "a scale", "pages and pieces")


@pytest.mark.parametrize("fault", quick_if(lambda name: name in _QUICK, _WRONG), ids=str)
def test_wrong_kernels_are_found(fault, source, interpreted, monkeypatch):
    module, name, wrong, body, message = _WRONG[fault]
    monkeypatch.setattr(module, name, wrong)
    jax.clear_caches()  # of the right one
    with pytest.raises(AssertionError, match=message):
        body(source=source)


@pytest.mark.slow
def test_a_quantiser_after_other_rows(source, interpreted, monkeypatch):
    """A norm that sees how many rows there are."""
    plain = norm.rms_norm
    wrong = lambda x, *rest, **more: plain(x * (x.shape[0] > 7), *rest, **more)
    monkeypatch.setattr(norm, "rms_norm", wrong)
    with pytest.raises(AssertionError, match="1 rows alone"):
        _NORM(source=source)


def test_error():
    """In units of the terms' magnitudes; bf16 may round; NaN is no small error."""
    want, size = np.array([1.0, 100.0]), np.array([10.0, 1000.0])
    assert gpu_checks.error(np.float32([1.001, 100]), want, size) == pytest.approx(1e-4, rel=1e-3)
    rounded = jnp.bfloat16([1.0 + 2.0**-8 * 0.9, 100])
    assert gpu_checks.error(rounded, want, size) == 0
    assert gpu_checks.error(jnp.bfloat16([1.02, 100]), want, size) > 1e-3
    with pytest.raises(AssertionError, match="x: error nan, bound 1"):
        gpu_checks.assert_close("x", np.float32([np.nan, 1]), want, size, 1.0)


def test_bitwise_equal():
    """Zeros of two signs differ, NaN of equal bits do not; the first place is named."""
    one = np.float32([[1, 2], [np.nan, 0]])
    gpu_checks.assert_bitwise_equal("x", one, one.copy())
    with pytest.raises(AssertionError, match=r"x: 1 of 4 elements differ, first at \(1, 1\): 0.0"):
        gpu_checks.assert_bitwise_equal("x", one, np.float32([[1, 2], [np.nan, -0.0]]))
    with pytest.raises(AssertionError):
        gpu_checks.assert_bitwise_equal("x", one, one.astype(np.float16))
    with pytest.raises(AssertionError):
        gpu_checks.assert_bitwise_equal("x", one, one[:1])


@pytest.mark.parametrize("depth", [128, 512, 4096])
def test_bound_of_a_tensor_core(depth):
    """A model of the tensor core's 14 bits stays within the bound, one wrong scale does not.

    Of 32 products and the sum so far, each is cut to a multiple of 2^-13 of the largest's power of
    two.
    """
    rng = np.random.default_rng(depth)
    fp8 = np.dtype(jnp.float8_e4m3fn)
    left, right = (rng.standard_normal((depth, 48)).astype(fp8).astype(float) for _ in range(2))
    terms = left[:, :, None] * right[:, None, :]
    total = np.zeros((48, 48))
    for block in terms.reshape(-1, 4, 32, 48, 48):
        partial = np.zeros((1, 48, 48))
        for some in block:
            addends = np.concatenate([some, partial])
            unit = 2.0 ** (np.floor(np.log2(np.abs(addends).max(0))) - 13)
            partial = (np.trunc(addends / unit) * unit).sum(0, keepdims=True)
        total += partial[0]
    size, bound = np.abs(terms).sum(0), gpu_checks.BOUNDS["fp8"]
    assert 1e-7 < (np.abs(total - terms.sum(0)) / size).max() < bound
    wrong = total - 0.5 * terms[:128].sum(0)
    assert (np.abs(wrong - terms.sum(0)) / size).max() > 2 * bound


def test_pages():
    """Every slot of a sequence once, in pages of its own; NaN everywhere else."""
    lengths = (1, 64, 130)
    table, used = gpu_attention.pages(lengths)
    mine = [set(row[row < 10**9]) for row in table]
    assert [len(m) for m in mine] == [1, 1, 3] and len(set.union(*mine)) == 5
    assert used.sum() == sum(lengths) and used.shape == (8, 64)
    case = Attention("fp8", 1, lengths, 2, 1, 16)
    whole = np.asarray(gpu_attention.in_one_piece(case.operands(Source()))["k"], np.float32)
    for row, length in zip(whole, lengths, strict=True):
        assert np.isfinite(row[:length]).all()
        assert np.isnan(row[length : -(-length // 64) * 64]).all()


_CEILINGS = {"copy_gbps": 4000.0, "bf16_tflops": 700.0}


def test_speed(source, monkeypatch, record_property, capsys):
    """Each prints a line; off a GPU XLA's products are timed and ours are errors."""
    small = [Product("one", "fprop", "fp8", 8, 128, 128)]
    monkeypatch.setattr(kernel_shapes, "cases", lambda models, quick: small)
    for name in ("IN_FLIGHT", "ROTATED"):
        monkeypatch.setattr(kernel_shapes, name, 1e-9)
    products.test_speed("model", source, _CEILINGS, record_property)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("one fprop fp8 8 x 128 x 128") and "Error" in line
    monkeypatch.setattr(kernel_shapes, "attention_cases", lambda quick: [])
    attention.test_speed("decode", source, _CEILINGS, record_property)


@pytest.mark.slow
def test_speed_beside_a_library(source, interpreted, monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "seconds_per_call", _once)
    norms.test_speed("rms_norm", source, 8, 128)
    norms.test_speed("gated_activation", source, 8, 128)
    head.test_speed(source, (8, 32, 130))
    gradient.test_speed("fp8", source, 16)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("us, spread" in x and ", XLA 1.00" in x for x in lines)


@pytest.mark.slow
def test_speed_in_a_profile(source, interpreted, monkeypatch, tmp_path, capsys):
    """Every implementation for a GPU; both forms of attention over a table with room behind."""
    for module in (products, attention):
        monkeypatch.setattr(module, "print_kernels", _called)
    products.test_speed_of_few_rows((3, 136, 40), source, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    names = [line.rpartition(", ")[2] for line in lines[::2]]
    assert names == ["gpu", "triton", "mosaic"]
    assert set(lines[1::2]) == {"  elements with other bits: 0"}
    decoded = {"two": ((3, 70), 256)}
    small = {"heads": 4, "kv_heads": 2, "width": 32}
    attention.test_speed_of_lengths("two", "int8", source, tmp_path, decoded, **small)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("two of at most 70 keys, 256 slots" in line for line in lines)


def test_lengths_of_a_decode_step():
    """As long as their table, and uneven ones are of one mean."""
    for lengths, slots in attention._DECODED.values():
        assert max(lengths) <= slots and not slots % 64
    uneven, slots = attention._DECODED["64 x 1900, uneven"]
    assert 1700 < np.mean(uneven) < 2000 < max(uneven)


def _called(what, moved, calls, way, directory):
    """In the place of `print_kernels`: runs one call."""
    assert moved > 0
    jax.block_until_ready(way(*calls[0]))
    print(what)


def _once(function, operands, programs):
    """In the place of `seconds_per_call`: runs one call."""
    assert programs >= 1 and len(operands) >= 2
    jax.block_until_ready(jax.jit(function)(*operands[0]))
    return 1e-3, 0.01
