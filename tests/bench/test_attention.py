"""Attention in `fp8rl bench kernels`: its oracle, its cases, its targets; what must fail."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from fp8rl_jax import deviceless
from fp8rl_jax.bench import attention_checks as checks
from fp8rl_jax.bench import attention_times as times
from fp8rl_jax.bench import gradient_checks, kernel_data, kernels
from fp8rl_jax.bench.attention_checks import Attention
from fp8rl_jax.bench.gradient_checks import FastAttention
from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.bench.kernel_times import L2
from fp8rl_jax.errors import UserError
from fp8rl_jax.kernels.gpu import attention as strict_attention
from fp8rl_jax.kernels.gpu import fast_attention
from fp8rl_jax.kernels.reference import attention as reference

_SMALL = (
    Attention("fp8", 1, (1, 65, 130), 4, 2, 32),
    Attention("bf16", 5, (5, 70), 4, 2, 32),
    Attention("float32", 1, (64, 65), 2, 1, 32),
    Attention("fp8", 1, (3, 70), 4, 1, 64, 16),
)


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(1 << 18)


@pytest.mark.parametrize("case", [_SMALL[0], *map(slow, _SMALL[1:])], ids=str)
def test_reference_holds(case, source):
    outcome = checks.check_attention(case, source, "reference")
    assert outcome.ok and outcome.error is not None and 0 < outcome.error < 2e-6, outcome


def test_kernels_in_the_interpreter(source, monkeypatch, interpreter):
    monkeypatch.setattr(strict_attention, "triton_call", interpreter.triton_call)
    outcomes = [checks.check_attention(case, source, "triton") for case in _SMALL]
    assert all(o.ok for o in outcomes), outcomes
    assert [o.error > 1e-5 for o in outcomes] == [True, True, False, True]  # weights in bf16


_FAST = (FastAttention("fp8", 2, 20, 70, 4, 2, 64), FastAttention("float32", 1, 33, 33, 2, 1, 32))


@pytest.mark.parametrize("case", [slow(_FAST[0]), _FAST[1]], ids=str)
def test_reference_of_gradients_holds(case, source):
    """Fast attention is the reference on a CPU; both have float32's errors."""
    outcomes = list(gradient_checks.check(case, source, "reference"))
    assert len(outcomes) == 2 and all(o.ok and 0 < o.error < 2e-6 for o in outcomes), outcomes


def test_fast_kernels_and_gradients_in_the_interpreter(source, monkeypatch, interpreter):
    monkeypatch.setattr(fast_attention, "triton_call", interpreter.triton_call)
    outcomes = [o for case in _FAST for o in gradient_checks.check(case, source, "triton")]
    assert all(o.ok for o in outcomes), outcomes
    assert [o.error > 2e-5 for o in outcomes] == [True, True, False, False]


def test_wrong_gradients_are_found(source, monkeypatch):
    """A scale of values forgotten by the gradients alone."""
    right = gradient_checks.attention_vjp

    def forgets(*arrays, v_scale, **settings):
        return right(*arrays, v_scale=jnp.ones_like(v_scale), **settings)

    monkeypatch.setattr(gradient_checks, "attention_vjp", forgets)
    result, gradients = gradient_checks.check(_FAST[0], source, "reference")
    assert result.ok and not gradients.ok and gradients.detail == "too large an error"


def test_wrong_attention_is_found(source, monkeypatch):
    """Pages of a neighbour; one key too many; a scale forgotten; under the bound of a GPU."""
    monkeypatch.setattr(checks, "bound", lambda *_: 2.0**-8)
    right, case = checks._in_one_piece, _SMALL[0]

    def fails(change) -> bool:
        monkeypatch.setattr(checks, "_in_one_piece", lambda operands: right(change(operands)))
        return not checks.check_attention(case, source, "reference").ok

    assert not fails(lambda operands: operands)
    assert fails(lambda operands: operands | {"table": jnp.roll(operands["table"], 1, 0)})
    assert fails(lambda operands: operands | {"positions": operands["positions"] - 1})
    assert fails(lambda operands: operands | {"v_scale": operands["v_scale"].at[..., 1].set(1)})


def test_a_kernel_that_raises_is_a_failed_check(source):
    """Off a GPU, that is the Triton kernel."""
    outcome = checks.check_attention(_SMALL[0], source, "triton")
    assert not outcome.ok and "Error" in outcome.detail


def test_pages():
    """Every slot of a sequence once, in pages of its own; garbage everywhere else."""
    lengths = (1, 64, 130)
    layout = kernel_data.pages(lengths)
    mine = [set(row[row < 10**9]) for row in layout.table]
    assert [len(m) for m in mine] == [1, 1, 3] and len(set.union(*mine)) == 5
    assert layout.used.sum() == sum(lengths) and layout.used.shape == (8, 64)
    pool = jnp.arange(8 * 64 * 2, dtype=jnp.float32).reshape(8, 64, 2)
    whole = np.asarray(kernel_data.in_one_piece(layout.fill(pool), jnp.asarray(layout.table)))
    for row, length in zip(whole, lengths, strict=True):
        assert np.isfinite(row[:length]).all()
        assert np.isnan(row[length : -(-length // 64) * 64]).all()


def test_cases():
    """The targets' first; each shape in FP8 and bf16; programs beyond the L2, not too large."""
    found, quick = times.cases(), times.cases(quick=True)
    assert len(found) == len(set(found)) == 28 and len(quick) == 8
    assert found[:6] == quick[:6] and set(quick) < set(found)
    assert all(times.decides(c.batch, c.length) for c in quick if c.use == "decode")
    for case in found:
        count, programs = case.calls
        assert count >= 1 and programs >= 1
        if case.use == "decode":
            assert count * case.bytes > 3.9 * L2 and count * case.cache_bytes < 35e9, case


def test_work_and_bytes():
    """By hand."""
    fp8 = times.Case("decode", "fp8", 8, 4096)
    assert fp8.pages == 512 and fp8.cache_bytes == 8 * 4096 * 8 * 2 * (128 + 4)
    assert fp8.flops == 4 * 8 * 32 * 128 * 4096
    bf16 = dataclasses.replace(fp8, kind="bf16")
    assert bf16.bytes == 8 * 4096 * 8 * 2 * 256 + 8 * 32 * 128 * 6
    assert times.Case("prefill", "bf16", 1, 4).flops == 4 * 32 * 128 * (1 + 2 + 3 + 4)


class _Recorded:
    """Shapes in place of random numbers."""

    def take(self, dtype, *shape):
        return jnp.zeros(shape, dtype)

    def scales(self, *shape):
        return jnp.ones(shape)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("use", ["decode", "prefill"])
def test_operands(use, kind, monkeypatch):
    """Calls share a pool and no page of it; what is timed equals the reference's shapes."""
    monkeypatch.setattr(times, "ROTATED", 3e6)
    monkeypatch.setattr(times, "_PAGES_DRAWN", 2)
    case = times.Case(use, kind, 2 if use == "decode" else 1, 256)
    run, operands = times.prepared(case, _Recorded())
    assert len(operands) == case.calls[0] > 1
    monkeypatch.setattr(times, "attention", _without_table)
    out = jax.eval_shape(run, *operands[0])
    assert out.shape == (case.batch, case.queries, times.HEADS, times.WIDTH)
    positions, cached = operands[0][2:]
    assert int(positions[0, -1]) == case.length - 1
    assert ("k_scale" in cached) == (kind == "fp8")
    if use == "decode":
        ids = np.concatenate([np.asarray(table).ravel() for _, table, *_ in operands])
        assert sorted(ids) == list(range(len(cached["k"])))
        assert cached["k"].shape[1:] == (64, times.KV_HEADS, times.WIDTH)


def test_only_the_kernels_are_timed(monkeypatch):
    """Compiled for an H200, a program gathers and copies nothing."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    try:
        mesh = deviceless.h200_mesh({})
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(times, "ROTATED", 9e6)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    run, operands = times.prepared(times.Case("decode", "fp8", 2, 1024), _Recorded())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), operands
    )
    with jax.set_mesh(mesh):
        program = jax.jit(lambda all_: [run(*one) for one in all_])
        text = program.lower(shapes).compile().as_text()
    found = {kind: len(names) for kind, names in deviceless.products(text).items()}
    assert found == {"triton_kernel_call": 2 * len(operands)}  # splits, and what joins them
    assert not re.findall(r" (transpose|copy|fusion|gather)\(", text)


def _without_table(q, table, one_split, **named):
    del one_split  # the reference has one form
    if table is not None:
        cached = ("k", "v", "k_scale", "v_scale")
        named |= {n: kernel_data.in_one_piece(named[n], table) for n in cached if n in named}
    return reference.attention(q, **named)


def test_what_does_not_fit_or_fails_is_said(monkeypatch):
    case = times.Case("decode", "bf16", 256, 32_768)
    assert times.time_case(case, _Recorded(), 30e9) == {
        "skipped": "34 GB of keys and values, 30 GB may be taken"
    }
    monkeypatch.setattr(times, "prepared", lambda *a: 1 / 0)
    found = times.time_case(case, _Recorded(), 40e9)
    assert found["error"].startswith("ZeroDivisionError")
    monkeypatch.setattr(times, "memory_budget", lambda: 1.0)
    (row,) = times.time_all([case], _Recorded(), {}, -1.0)
    assert row["skipped"] == "the time was up" and "skipped: the time was up" in times.line(row)


def test_targets_and_table():
    """Figures of a made-up run: by hand."""
    ceilings = {"copy_gbps": 4000.0, "bf16_tflops": 700.0}
    one = {"spread": 0.01, "calls": 2, "programs": 3}
    decode = [times.Case("decode", kind, 32, 8192) for kind in ("fp8", "bf16")]
    large, prefill = times.Case("decode", "fp8", 256, 8192), times.Case("prefill", "fp8", 1, 4096)
    rows = [
        times.row(decode[0], one | {"us": 200.0, "other_us": 180.0}, ceilings),
        times.row(decode[1], one | {"us": 350.0}, ceilings),
        times.row(large, {"skipped": "too large"}, ceilings),
        times.row(prefill, one | {"us": 1000.0}, ceilings),
    ]
    times.compare(rows)
    assert rows[0]["over_bf16"] == 1.75 and not any("over_bf16" in r for r in rows[1:])
    assert rows[0]["gbps"] == pytest.approx(decode[0].bytes / 200e-6 / 1e9)
    assert rows[3]["tflops"] == pytest.approx(4 * 32 * 128 * 4096 * 4097 / 2 / 1e-3 / 1e12)
    verdicts = {t["target"]: kernels.verdict(t) for t in kernels.targets([], rows)}
    assert verdicts["decode of 32 and more, 8k keys, over a copy"] == (
        "missed by 8% at attention decode fp8 KV 32 x 8192"
    )
    assert verdicts["the same, FP8 KV over bf16 KV"] == (
        "missed by 3% at attention decode fp8 KV 32 x 8192"
    )
    text = times.format_table(rows)
    assert text[2].split()[-10:] == (
        ["1.0%", "2772", "69%", "21", "3%", "1.75", "0.90", "3", "x", "2"]
    )
    assert text[4].endswith("skipped: too large")
