"""Strict attention: pages against float64 and one piece, decode against a whole sequence, speed.

Bounds, in units of the weighted sum of the values' magnitudes. The kernel rounds weights for the
product with values, to bf16 or float16: up to 2^-8 or 2^-11 of each term. With float32 operands
only float32 roundings remain, of scores above all. A page of another sequence changes a result by
the page's share of the weights, 1/18 for the longest case here.
"""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_attention import Attention, float64, in_one_piece
from gpu_checks import assert_bitwise_equal, assert_close, assert_finite, print_kernels, reports

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench import kernel_shapes, kernel_times, kernels
from fp8rl_jax.bench.kernel_times import DTYPES
from fp8rl_jax.kernels import KV_CHUNK
from fp8rl_jax.kernels.gpu.attention import attention

pytestmark = pytest.mark.gpu

# By the type of keys and values: weights in float16, in bf16, and in float32.
BOUNDS = {"fp8": 1.01 * 2.0**-11, "int8": 1.01 * 2.0**-11, "bf16": 2.0**-8, "float32": 4e-6}
LENGTHS = (1, 64, 96, 97, 128, 129, 513, 1025, 4097)  # keys that a query sees
_LENGTHS = (1, 64, 65, 200, 513, 1100)
CASES = (
    Attention("fp8", 1, _LENGTHS),
    Attention("int8", 1, _LENGTHS),
    Attention("bf16", 1, _LENGTHS),
    Attention("int8", 40, (40, 97, 300)),
    Attention("float32", 3, (3, 65, 130), 4, 2, 64),
    Attention("fp8", 1, (65, 600), 128, 1, 512, 64),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(case, source):
    operands = case.operands(source)
    got = exact_jit(lambda operands: attention(**operands, scale=case.scale))(operands)
    assert_finite(str(case), got)
    want = float64(case, operands)
    assert_close(str(case), got, want["out"], want["size"], BOUNDS[case.kind])


@pytest.mark.parametrize(
    ("kind", "length"), [*itertools.product(["int8", "bf16"], LENGTHS), ("fp8", 97), ("fp8", 1025)]
)
def test_alone_or_among_all(kind, length, source, heads=(8, 2), width=128, **settings):
    """The last query of a sequence, alone as in a decode step, and among all as in a learner's.

    The decode step's cache is longer and holds numbers behind the sequence's end. `settings` are
    further arguments of attention.
    """
    q = source.take(jnp.bfloat16, 1, length, heads[0], width)
    slots = (1, length + 70, heads[1])
    cache = {name: source.take(DTYPES[kind], *slots, width) for name in ("k", "v")}
    if kind in ("fp8", "int8"):
        unit = 1 / 32 if kind == "int8" else 1
        cache |= {name: unit * source.scales(*slots) for name in ("k_scale", "v_scale")}

    def run(q, positions, cache):
        return attention(q, positions=positions, scale=width**-0.5, **cache, **settings)

    positions = jnp.arange(length, dtype=jnp.int32)[None]
    seen = {name: x[:, :length] for name, x in cache.items()}
    whole = exact_jit(run)(q, positions, seen)
    alone = exact_jit(run)(q[:, -1:], positions[:, -1:], cache)
    assert_bitwise_equal(f"attention over {length} keys in {kind}", alone, whole[:, -1:])


@pytest.mark.parametrize("kind", ["int8", "bf16"])
@pytest.mark.parametrize(("length", "window"), [(97, 40), (1025, 500), (4097, 512)])
def test_windows_and_sinks(kind, length, window, source, heads=(8, 2), width=128):
    """As above, of queries that see `window` keys; and that a window and sinks have an effect."""
    settings = {"window": jnp.int32(window), "sinks": source.scales(heads[0])}
    test_alone_or_among_all(kind, length, source, heads, width, **settings)
    q, k, v = (source.take(jnp.bfloat16, 1, length, n, width) for n in (heads[0], *heads[1:] * 2))
    run = functools.partial(attention, positions=jnp.arange(length, dtype=jnp.int32)[None])
    plain, *others = (
        exact_jit(functools.partial(run, scale=width**-0.5, **given))(q, k, v)[:, -1]
        for given in ({}, *({name: x} for name, x in settings.items()))
    )
    assert all(bool((other != plain).mean() > 0.5) for other in others)


@pytest.mark.parametrize("kind", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize(
    ("queries", "one_split"),
    [(1, True), (1, False), (40, None)],
    ids=["a program for each split", "one program", "many queries"],
)
def test_pages_or_one_piece(
    queries, one_split, kind, source, lengths=LENGTHS, heads=(8, 2), width=128
):
    """Sequences' caches in shuffled pages, and in one piece: decode in both of its forms too."""
    case = Attention(kind, queries, tuple(max(n, queries) for n in lengths), *heads, width)
    operands = case.operands(source)
    run = exact_jit(lambda x: attention(**x, scale=case.scale, one_split=one_split))
    assert_bitwise_equal(str(case), run(operands), run(in_one_piece(operands)))


def _uneven(count: int, mean: int, most: int) -> tuple[int, ...]:
    """Lengths of a lognormal distribution, most of them short."""
    drawn = np.random.default_rng(0).lognormal(0, 0.8, count)
    return tuple(int(n) for n in np.clip(drawn * mean / drawn.mean(), 1, most))


_DECODED = {  # lengths of the sequences, and slots of a row of the table
    "64 x 1900": ((1900,) * 64, 4096),
    "64 x 1900, uneven": (_uneven(64, 1900, 20_480), 20_480),
    "96 x 1900": ((1900,) * 96, 4096),
    "64 x 1900, long table": ((1900,) * 64, 20_480),
    "64 x 3950": ((3950,) * 64, 4096),
    "72 x 1900": ((1900,) * 72, 4096),
    "128 x 1900": ((1900,) * 128, 4096),
    "64 x 1900, short table": ((1900,) * 64, 2048),
}


@reports
@pytest.mark.parametrize("kind", ["int8", "bf16"])
@pytest.mark.parametrize("name", _DECODED)
def test_speed_of_lengths(name, kind, source, tmp_path, decoded=_DECODED, **heads):
    """A decode step's attention in a profile, in the form that is taken and with one program for
    all keys of a sequence. A longer table has more programs, which end at once."""
    lengths, slots = decoded[name]
    case = Attention(kind, 1, lengths, **heads)
    operands = case.operands(source)
    behind = slots // KV_CHUNK - operands["table"].shape[1]
    operands["table"] = jnp.pad(operands["table"], ((0, 0), (0, behind)))
    vector = 2 * case.width if kind == "bf16" else case.width + 4  # with its scale
    moved = 2 * sum(lengths) * case.kv_heads * vector
    for number, one_split in enumerate((None, False)):
        way = exact_jit(lambda x, form=one_split: attention(**x, scale=case.scale, one_split=form))
        form = "one program" if number else "as taken"
        text = f"{kind}, {name} of at most {max(lengths)} keys, {slots} slots, {form}"
        print_kernels(text, moved, [(operands,)] * 3, way, tmp_path / str(number))


@reports
@pytest.mark.parametrize("use", ["decode", "prefill"])
def test_speed(use, source, ceilings, record_property):
    """A line for each: decode at the targets' shapes, prefill of 4,096 tokens."""
    for case in kernel_shapes.attention_cases(quick=True):
        if case.use == use:
            row = kernels.row(case, kernel_times.time_case(case, source), ceilings)
            record_property("row", row)
            print(kernels.line(row))
