"""`fp8rl bench kernels`: its shapes, what it times, its table, its command."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from fp8rl_jax import cli
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.bench import kernel_shapes as shapes
from fp8rl_jax.bench import kernel_times, kernels
from fp8rl_jax.bench.kernel_shapes import Attention, Product, calls
from fp8rl_jax.bench.kernel_times import Source
from fp8rl_jax.kernels.reference import attention
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.plan import h200

_HEAD, _FP8 = "bf16", "fp8"
_PUBLISHED = {
    "qwen3_8b": {
        (_FP8, 4096, 4096): "o/q",
        (_FP8, 4096, 1024): "k/v",
        (_FP8, 4096, 12_288): "gate/up",
        (_FP8, 12_288, 4096): "down",
        (_HEAD, 4096, 151_936): "lm_head",
    },
    "qwen3_30b_a3b": {
        (_FP8, 2048, 4096): "q",
        (_FP8, 4096, 2048): "o",
        (_FP8, 2048, 512): "k/v",
        (_FP8, 2048, 768, 128, 8): "gate/up",
        (_FP8, 768, 2048, 128, 8): "down",
        ("float32", 2048, 128): "router",
        (_HEAD, 2048, 151_936): "lm_head",
    },
    "llama3p1_8b": {
        (_FP8, 4096, 4096): "o/q",
        (_FP8, 4096, 1024): "k/v",
        (_FP8, 4096, 14_336): "gate/up",
        (_FP8, 14_336, 4096): "down",
        (_HEAD, 4096, 128_256): "lm_head",
    },
    "smollm2_135m": {  # its head is the embedding
        (_FP8, 576, 576): "o/q",
        (_FP8, 576, 192): "k/v",
        (_FP8, 576, 1536): "gate/up",
        (_FP8, 1536, 576): "down",
        (_HEAD, 576, 49_152): "lm_head",
    },
}


@pytest.mark.parametrize("model", _PUBLISHED)
def test_matrices(model):
    """Worked out by hand from the models' config.json."""
    found = {}
    for product in shapes.matrices(model):
        key = product.kind, product.depth, product.columns, product.experts, product.top_k
        name, layers = product.name.split()
        found[key[:3] if not product.experts else key] = "/".join(sorted(layers.split("/")))
        assert (name, product.gemm, product.rows) == (model, "fprop", 1)
    assert found == _PUBLISHED[model]


def test_cases():
    """Targets first, no product twice, every matrix at 64 rows, and not many more than needed."""
    found, quick = shapes.cases(), shapes.cases(quick=True)
    assert found[:5] == quick[:5] == shapes.target_cases()
    assert set(quick) <= set(found) and len(quick) < len(found) / 2 < 50
    keys = [(c.gemm == "wgrad", c.kind, c.rows, c.depth, c.columns, c.experts) for c in found]
    assert len(set(keys)) == len(keys)
    at_64 = {(c.kind, c.depth, c.columns, c.experts) for c in found if c.rows == 64}
    wanted = {(*key, 0, 0)[:4] for model in shapes.MODELS for key in _PUBLISHED[model]}
    assert at_64 == wanted


def test_train_step_of_a_layer():
    """dgrad contracts over the outputs, wgrad over the tokens; of experts the tokens stay."""
    found = {(c.gemm, c.rows, c.depth, c.columns) for c in shapes.cases(["qwen3_8b"], [4096])}
    assert ("wgrad", 12_288, 4096, 4096) in found and ("wgrad", 4096, 4096, 12_288) in found
    assert ("dgrad", 4096, 4096, 12_288) in found and ("fprop", 4096, 12_288, 4096) in found
    sparse = [c for c in shapes.cases(["qwen3_30b_a3b"], [4096]) if c.rows == 4096 and c.experts]
    assert {c.gemm for c in sparse} == {"fprop", "dgrad", "wgrad"}
    assert all(c.multiplied == 8 * 4096 and c.top_k == 8 for c in sparse)


def test_work_and_bytes():
    """Operations and bytes by hand: a dense layer, a head, one token's experts."""
    dense = Product("", "fprop", "fp8", 64, 4096, 1024)
    assert dense.flops == 2 * 64 * 4096 * 1024 and dense.weight_bytes == 4096 * 1024
    assert dense.bytes == 64 * 4096 + 4096 * 1024 + 4 * 64 * 32 + 2 * 64 * 1024
    head = Product("", "fprop", "bf16", 1, 8, 16)
    assert head.bytes == 2 * 8 + 2 * 8 * 16 + 2 * 16
    sparse = Product("", "fprop", "fp8", 1, 128, 16, 64, 8)
    assert sparse.weight_bytes == 8 * 128 * 16
    assert sparse.bytes == 8 * 128 + 8 * 128 * 16 + 4 * 8 + 2 * 8 * 16
    wgrad = Product("", "wgrad", "fp8", 16, 128, 32, 4, 2)
    assert wgrad.bytes == 32 * 128 + 32 * 32 + 4 * 32 + 4 * 4 * 128 * 32


def test_memory_of_a_program():
    """Operands exceed the L2 several times and fit; experts that no token takes count, too."""
    for case in [*shapes.cases(), *shapes.attention_cases()]:
        count, programs = calls(case)
        assert count * case.bytes >= shapes.ROTATED or count == shapes.MOST_CALLS, case
        held = case.bytes + getattr(case, "experts", 0) * 2048 * 768
        assert count * held < 35e9 and count >= 1 and programs >= 1, case


def test_tiles_of_experts():
    """Every token's choices have rows, sorted by expert."""
    case = Product("", "fprop", "fp8", 300, 128, 128, 16, 4)
    experts, rows = shapes.groups(case)
    assert rows == 128 and (np.diff(experts) >= 0).all()
    used = experts[experts < 16]
    assert len(set(used)) == 16 and len(used) * rows >= case.multiplied


def test_attention_cases():
    """Each shape in INT8, FP8 and bf16; the targets' are among the quick ones."""
    found, quick = shapes.attention_cases(), shapes.attention_cases(quick=True)
    assert len(found) == len(set(found)) == 42 and len(quick) == 12
    assert set(quick) < set(found) and sum(c.decides for c in quick) == 9


def test_work_and_bytes_of_attention():
    """By hand."""
    fp8 = Attention("decode", "fp8", 8, 4096)
    assert fp8.pages == 512 and fp8.bytes == 8 * 4096 * 8 * 2 * (128 + 4) + 8 * 32 * 128 * 6
    assert fp8.flops == 4 * 8 * 32 * 128 * 4096
    bf16 = dataclasses.replace(fp8, kind="bf16")
    assert bf16.bytes == 8 * 4096 * 8 * 2 * 256 + 8 * 32 * 128 * 6
    assert Attention("prefill", "bf16", 1, 4).flops == 4 * 32 * 128 * (1 + 2 + 3 + 4)


def test_operands_are_random_and_repeat():
    one, other = Source(), Source()
    for _ in range(2):
        a, b = one.take(jnp.bfloat16, 8, 64), other.take(jnp.bfloat16, 8, 64)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert (np.asarray(a) != np.asarray(one.take(jnp.bfloat16, 8, 64))).mean() > 0.9
    scales = np.asarray(one.scales(8, 8))
    assert 0.5 <= scales.min() < scales.max() <= 1.5


def test_seconds_per_call():
    """The method itself, with a product that a CPU has."""
    x = jnp.ones((64, 64))
    seconds, spread = kernel_times.seconds_per_call(jnp.matmul, [(x, x), (2 * x, x)], 2)
    assert 0 < seconds < 1 and spread >= 0


class _Shapes:
    """Zeros in the place of random numbers."""

    def take(self, dtype, *shape):
        return jnp.zeros(shape, dtype)

    def scales(self, *shape):
        return jnp.ones(shape)


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        slow(Product("", "fprop", "fp8", 256, 512, 384), 1),
        slow(Product("", "wgrad", "fp8", 512, 256, 384), 1),
        slow(Product("", "fprop", "bf16", 64, 512, 384), 1),
        (Product("", "fprop", "fp8", 64, 512, 384, 8, 2), 1),
        (Attention("decode", "fp8", 2, 1024), 2),  # splits, and what joins them
    ],
    ids=str,
)
def test_only_the_kernel_is_timed(case, kernels, monkeypatch):
    """Compiled for an H200, a program of ours holds the kernel and moves nothing else."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    try:
        mesh = h200.h200_mesh({})
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(kernel_times, "calls", lambda case: (2, 1))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function, make = kernel_times.versions(case, _Shapes())["ours"]
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), [make(), make()]
    )
    with jax.set_mesh(mesh):
        program = jax.jit(lambda all_: [function(*one) for one in all_])
        text = program.lower(operands).compile().as_text()
    found = {kind: len(names) for kind, names in h200.products(text).items()}
    assert found == {"ours": 2 * kernels}
    assert not re.findall(r" (transpose|copy|fusion|gather)\(", text)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("use", ["decode", "prefill"])
def test_operands_of_attention(use, kind, monkeypatch):
    """Calls share a pool and no page of it; what is timed has the reference's shapes."""
    monkeypatch.setattr(kernel_times, "calls", lambda case: (3, 1))
    monkeypatch.setattr(kernel_times, "_PAGES_DRAWN", 2)
    case = Attention(use, kind, 2 if use == "decode" else 1, 256)
    run, make = kernel_times.versions(case, _Shapes())["ours"]
    operands = [make() for _ in range(3)]

    def plain(q, one_split, **named):
        assert not one_split  # short caches
        return attention.attention(q, **named, way=cpu_way())

    monkeypatch.setattr(kernel_times, "attention", plain)
    out = jax.eval_shape(run, *operands[0])
    assert out.shape == (case.batch, case.queries, shapes.HEADS, shapes.WIDTH)
    positions, cached = operands[0][2:]
    assert int(positions[0, -1]) == case.length - 1
    assert ("k_scale" in cached) == (kind == "fp8")
    if use == "decode":
        ids = np.concatenate([np.asarray(table).ravel() for _, table, *_ in operands])
        assert sorted(ids) == list(range(len(cached["k"])))
        assert cached["k"].shape[1:] == (64, shapes.KV_HEADS, shapes.WIDTH)


def test_what_fails_is_said(monkeypatch):
    case = Attention("decode", "bf16", 8, 64)
    monkeypatch.setattr(kernel_times, "calls", lambda case: (1, 1))
    monkeypatch.setattr(kernel_times, "attention", lambda *a, **named: 1 / 0)
    found = kernel_times.time_case(case, _Shapes())
    assert set(found) == {"ours", "other"}
    assert found["ours"]["error"].startswith("ZeroDivisionError")
    assert "ZeroDivisionError" in kernels.line(kernels.row(case, found, {}))


_CEILINGS = {"copy_gbps": 4000.0, "bf16_tflops": 700.0}


def _timed(case: Product | Attention, us: float, **others: float) -> dict:
    times = {name: {"us": t, "spread": 0.01} for name, t in others.items()}
    return kernels.row(case, {"ours": {"us": us, "spread": 0.01}, **times}, _CEILINGS)


def _synthetic() -> dict:
    """Of a made-up run."""
    squares = {c.rows: c for c in shapes.target_cases() if c.kind == "fp8" and not c.experts}
    few = Product("m q_proj", "fprop", "fp8", 64, 4096, 4096)
    failed = Product("m k", "fprop", "fp8", 64, 4096, 1024)
    decode = [Attention("decode", kind, 32, 8192) for kind in ("fp8", "bf16")]
    rows = [
        _timed(decode[0], 200.0, other=180.0),
        _timed(decode[1], 350.0),
        _timed(Attention("prefill", "fp8", 1, 4096), 1000.0),
        _timed(squares[4096], 150.0, bf16=200.0, fp8=140.0),
        _timed(squares[8192], 950.0, bf16=1500.0),
        _timed(few, 4.0, bf16=8.0),
        kernels.row(failed, {"ours": {"error": "RuntimeError: no"}}, {}),
    ]
    rows[5]["times"]["fp8"] = {"error": "not here"}
    kernels._compare_caches(rows)
    return {
        "environment": {"device": "X", "date": "D", "platform": "gpu", "versions": {"jax": "9"}},
        "quick": True,
        "ceilings": _CEILINGS,
        "rows": rows,
        "ok": False,
        "targets": kernels.targets(rows),
    }


def test_rows_and_targets():
    """By hand."""
    result = _synthetic()
    decode, bf16, prefill, first, *_ = result["rows"]
    assert first["tflops"] == pytest.approx(2 * 4096**3 / 150e-6 / 1e12)
    assert first["over_bf16"] == pytest.approx(200 / 150) and "over_dense" not in first
    assert decode["over_bf16"] == 1.75 and "over_bf16" not in bf16
    assert decode["gbps"] == pytest.approx(
        Attention("decode", "fp8", 32, 8192).bytes / 200e-6 / 1e9
    )
    assert prefill["tflops"] == pytest.approx(4 * 32 * 128 * 4096 * 4097 / 2 / 1e-3 / 1e12)
    verdicts = {t["target"]: t["verdict"] for t in result["targets"]}
    worst, failed = "square 4096 fprop fp8 4096 x 4096 x 4096", "m k fprop fp8 64 x 4096 x 1024"
    assert verdicts == {
        "FP8 at 4096^3 and 8192^3 over bf16": f"missed by 5% at {worst}",
        "FP8 at 4096^3 and 8192^3, TFLOPS": f"missed by 17% at {worst}",
        "FP8 over bf16 at 64 rows and more": f"met; failed at {failed}",
        "FP8 at up to 64 rows, GB/s of weights": f"met; failed at {failed}",
        "128 experts, top 8, 8k tokens, over dense FP8": "not measured",
        "bf16 over XLA's bf16": "not measured",
        "decode of 32 and more, 8k keys, over a copy": (
            "missed by 8% at attention decode fp8 KV 32 x 8192"
        ),
        "the same, 8-bit KV over bf16 KV": "missed by 3% at attention decode fp8 KV 32 x 8192",
    }


def test_table():
    text = kernels.format_table(_synthetic())
    assert "copy 4000 GB/s, bf16 8192^3 700 TFLOPS" in text
    rows = {line[:72].strip(): " ".join(line[72:].split()) for line in text.splitlines()}
    assert rows["square 4096 fprop fp8 4096 x 4096 x 4096"] == (
        "150.0 1.0% 916 451 131% 11% 2 x 18 bf16 1.33, fp8 0.93"
    )
    assert rows["attention decode fp8 KV 32 x 8192"] == (
        "200.0 1.0% 21 2772 3% 69% 2 x 15 other 0.90, bf16 1.75"
    )
    for words in ("RuntimeError: no", "bf16 2.00, fp8: not here", "wanted    1.4"):
        assert words in text, words


_ONE = ["bench", "kernels", "--models=smollm2_135m", "--rows=64", "--quick"]


def test_command(tmp_path, monkeypatch, capsys):
    """On what it takes for a GPU: the table, the whole file; status 1 if a kernel of ours fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "require_gpu", lambda command: None)
    monkeypatch.setattr(kernel_times, "ceilings", lambda source: _CEILINGS)
    found = {"us": 2.0, "spread": 0.0}
    monkeypatch.setattr(kernel_times, "time_case", lambda case, source: {"ours": found})
    assert cli.run([*_ONE, "--out=deep/down"]) == 0
    output, error = capsys.readouterr()
    assert output.endswith("deep/down/kernels.json\n") and "smollm2_135m" in error
    written = json.loads((tmp_path / "deep/down/kernels.json").read_text())
    assert written["ok"] and written["ceilings"] == _CEILINGS
    assert len(written["rows"]) == 18 and "128 experts, 8k tokens" in output
    assert written["environment"]["versions"]["jax"] == jax.__version__
    assert [p.name for p in (tmp_path / "deep/down").iterdir()] == ["kernels.json"]
    found = {"error": "no"}
    assert cli.run([*_ONE, "--out=deep/down"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models=qwen9"], ["qwen9", "qwen3_8b"]),
        (["--models="], ["no model ''", "qwen3_8b"]),
        (["--rows=0"], ["--rows: it holds '0'", "from 1"]),
        (["--rows=1,-3"], ["'-3'", "such as 1,64"]),
        (["--rows=many"], ["'many'"]),
        (["--rows=1,,2"], ["--rows: it holds ''"]),
        (["--rows=9999999"], ["'9999999'", "131072"]),
        ([], ["no GPU here but 'cpu'", "H100 or H200"]),
        (["--out="], ["--out: it is empty"]),
        (["junk"], ["'junk'", "--models", "no config"]),
        (["--config.run.steps=3"], ["--config.run.steps=3", "no config"]),
        (["--repeats=3"], ["repeats"]),
    ],
)
def test_mistakes(arguments, words, tmp_path, monkeypatch, capsys):
    """One sentence, exit status 2, before anything is run or written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert cli.run(["bench", "kernels", *arguments]) == 2
    output, error = capsys.readouterr()
    assert output == "" and re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error, f"{word!r} is missing in: {error}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_unwritable_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "require_gpu", lambda command: None)
    monkeypatch.setattr(kernels, "bench", lambda *a: pytest.fail("the bench was run"))
    (tmp_path / "file").write_text("")
    assert cli.run(["bench", "kernels", f"--out={tmp_path}/file"]) == 2
    assert "another directory" in capsys.readouterr().err


def test_a_gpu_without_its_libraries(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "triton_installed", lambda: False)
    with pytest.raises(UserError, match=r"x: this machine has a GPU.* pip install"):
        kernels.require_gpu("x")
