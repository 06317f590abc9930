"""`fp8rl bench kernels`: its shapes, its checks (which must fail), its table, its command."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from fp8rl_jax import cli
from fp8rl_jax.bench import attention_checks, gradient_checks, kernel_times, kernels
from fp8rl_jax.bench import kernel_checks as checks
from fp8rl_jax.bench import kernel_shapes as shapes
from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.bench.kernel_shapes import Case, Matrix
from fp8rl_jax.kernels import block_matmul

_HEAD, _FP8 = "bf16", "fp8"
_PUBLISHED = {
    "qwen3_8b": {
        Matrix(_FP8, 4096, 4096): ["o_proj", "q_proj"],
        Matrix(_FP8, 4096, 1024): ["k_proj", "v_proj"],
        Matrix(_FP8, 4096, 12_288): ["gate_proj", "up_proj"],
        Matrix(_FP8, 12_288, 4096): ["down_proj"],
        Matrix(_HEAD, 4096, 151_936): ["lm_head"],
    },
    "qwen3_30b_a3b": {
        Matrix(_FP8, 2048, 4096): ["q_proj"],
        Matrix(_FP8, 4096, 2048): ["o_proj"],
        Matrix(_FP8, 2048, 512): ["k_proj", "v_proj"],
        Matrix(_FP8, 2048, 768, 128, 8): ["experts.gate_proj", "experts.up_proj"],
        Matrix(_FP8, 768, 2048, 128, 8): ["experts.down_proj"],
        Matrix("float32", 2048, 128): ["router"],
        Matrix(_HEAD, 2048, 151_936): ["lm_head"],
    },
    "llama3p1_8b": {
        Matrix(_FP8, 4096, 4096): ["o_proj", "q_proj"],
        Matrix(_FP8, 4096, 1024): ["k_proj", "v_proj"],
        Matrix(_FP8, 4096, 14_336): ["gate_proj", "up_proj"],
        Matrix(_FP8, 14_336, 4096): ["down_proj"],
        Matrix(_HEAD, 4096, 128_256): ["lm_head"],
    },
    "smollm2_135m": {  # its head is the embedding
        Matrix(_FP8, 576, 576): ["o_proj", "q_proj"],
        Matrix(_FP8, 576, 192): ["k_proj", "v_proj"],
        Matrix(_FP8, 576, 1536): ["gate_proj", "up_proj"],
        Matrix(_FP8, 1536, 576): ["down_proj"],
        Matrix(_HEAD, 576, 49_152): ["lm_head"],
    },
}


@pytest.mark.parametrize("model", _PUBLISHED)
def test_matrices(model):
    """Worked out by hand from the models' config.json."""
    found = {matrix: sorted(names) for matrix, names in shapes.matrices(model).items()}
    assert found == _PUBLISHED[model]


def test_cases():
    """Targets first, no product twice, every matrix at 64 rows, and not many more than needed."""
    found, quick = shapes.cases(), shapes.cases(quick=True)
    assert found[:5] == quick[:5] == shapes.target_cases()
    assert set(quick) <= set(found) and len(quick) < len(found) / 2 < 45
    keys = [(c.gemm == "wgrad", c.kind, c.rows, c.depth, c.columns, c.experts) for c in found]
    assert len(set(keys)) == len(keys)
    at_64 = {(c.kind, c.depth, c.columns, c.experts) for c in found if c.rows == 64}
    wanted = {(m.kind, m.depth, m.columns, m.experts)
              for model in shapes.MODELS for m in _PUBLISHED[model]}  # fmt: skip
    assert at_64 == wanted


def test_train_step_of_a_layer():
    """dgrad contracts over the outputs, wgrad over the tokens; of experts the tokens stay."""
    found = {(c.gemm, c.rows, c.depth, c.columns) for c in shapes.cases(["qwen3_8b"], [4096])}
    assert ("wgrad", 12_288, 4096, 4096) in found and ("wgrad", 4096, 4096, 12_288) in found
    assert ("dgrad", 4096, 4096, 12_288) in found and ("fprop", 4096, 12_288, 4096) in found
    sparse = [c for c in shapes.cases(["qwen3_30b_a3b"], [4096]) if c.rows == 4096 and c.experts]
    assert {c.gemm for c in sparse} == {"fprop", "dgrad", "wgrad"}
    assert all(c.products == 8 * 4096 and c.top_k == 8 for c in sparse)


def test_work_and_bytes():
    """Operations and bytes by hand: a dense layer, a head, one token's experts."""
    dense = Case("", "fprop", "fp8", 64, 4096, 1024)
    assert dense.flops == 2 * 64 * 4096 * 1024 and dense.weight_bytes == 4096 * 1024
    assert dense.bytes == 64 * 4096 + 4096 * 1024 + 4 * 64 * 32 + 2 * 64 * 1024
    head = Case("", "fprop", "bf16", 1, 8, 16)
    assert head.bytes == 2 * 8 + 2 * 8 * 16 + 2 * 16
    sparse = Case("", "fprop", "fp8", 1, 128, 16, 64, 8)
    assert sparse.weight_bytes == 8 * 128 * 16
    assert sparse.bytes == 8 * 128 + 8 * 128 * 16 + 4 * 8 + 2 * 8 * 16
    assert sparse.held_bytes == 8 * 128 + 64 * 128 * 16 + 4 * 8 + 2 * 8 * 16
    wgrad = Case("", "wgrad", "fp8", 16, 128, 32, 4, 2)
    assert wgrad.bytes == 32 * 128 + 32 * 32 + 4 * 32 + 4 * 4 * 128 * 32


def test_memory_of_a_program():
    """Operands exceed the L2 several times and fit; experts that no token takes count, too."""
    for case in shapes.cases():
        count, programs = kernel_times.calls(case)
        assert count * case.bytes > 3.9 * kernel_times.L2 or count == 192, case
        assert count * case.held_bytes < 24e9 and count >= 2 and programs >= 1, case


def test_tiles_of_experts():
    """Every token's choices have rows, sorted by expert."""
    case = Case("", "fprop", "fp8", 300, 128, 128, 16, 4)
    tiles = shapes.groups(case, 0)
    assert tiles.rows == 128 and (np.diff(tiles.experts) >= 0).all()
    used = tiles.experts[tiles.experts < 16]
    assert len(set(used)) == 16 and len(used) * tiles.rows >= case.products


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(1 << 21)


_CASES = [
    checks.Dense("fp8", 70, 1000, 200),
    slow(checks.Dense("fp8", 70, 1000, 200, "bfloat16")),
    checks.Dense("fp8", 70, 520, 200, by_column=True),
    slow(checks.Dense("fp8", 1, 128, 40, left="float8_e5m2")),
    slow(checks.Dense("bf16", 70, 300, 200, "bfloat16")),
    checks.Dense("float32", 70, 300, 200),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_reference_holds(case, source):
    outcome = checks.check_dense(case, source, "reference")
    assert outcome.ok, outcome
    assert outcome.error is not None and 0 <= outcome.error < 3e-7
    assert outcome.error > 0 or case.dtype == "bfloat16"


def _half_a_block(lhs, rhs, lhs_scale, rhs_scale, **options):
    if rhs_scale is not None:
        rhs_scale = rhs_scale.at[0, 0].multiply(0.5)
    return block_matmul(lhs, rhs, lhs_scale, rhs_scale, **options)


def _swapped(*operands, **options):
    y = block_matmul(*operands, **options)
    return y.at[0].set(y[-1]).at[-1].set(y[0])


def _nan(*operands, **options):
    return block_matmul(*operands, **options).at[3, 5].set(jnp.nan)


def _cut_off(*operands, **options):
    y = block_matmul(*operands, **{**options, "dtype": jnp.float32})
    bits = jax.lax.bitcast_convert_type(y, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(options["dtype"])


def _by_count(*operands, **options):
    """Rounds otherwise where there are few rows."""
    y = block_matmul(*operands, **options)
    return y if y.shape[0] > 8 else y * jnp.float32(1 + 2e-7)


@pytest.mark.parametrize("wrong", [_half_a_block, *map(slow, (_swapped, _nan)), _cut_off])
def test_wrong_products_are_found(wrong, source, monkeypatch):
    """Against float64, under the bound of a GPU as well as under the reference's."""
    monkeypatch.setattr(checks, "block_matmul", wrong)
    case = checks.Dense("fp8", 70, 1000, 200)
    assert not checks.check_dense(case, source, "reference").ok
    if wrong is _cut_off:  # within what an FP8 tensor core may lose
        return
    monkeypatch.setattr(checks, "_BOUND_OF_REFERENCE", checks.bound("fp8", "triton"))
    outcome = checks.check_dense(case, source, "reference")
    assert not outcome.ok and outcome.detail in ("not finite", "too large an error")


def test_rows_that_depend_on_their_number_are_found(source, monkeypatch):
    monkeypatch.setattr(checks, "block_matmul", _by_count)
    case = checks.Dense("fp8", 0, 256, 200)
    found = list(checks.check_rows(case, (1, 8, 9, 64), source, "reference"))
    assert [o.ok for o in found] == [False, False, True, True]
    assert "elements differ, first at" in found[0].detail
    assert checks.format_outcomes(found).startswith("FAILED rows: fp8 256 x 200")


def test_a_kernel_that_raises_is_a_failed_check(source):
    """Off a GPU, that is every Triton kernel."""
    outcome = checks.check_dense(checks.Dense("fp8", 8, 128, 128), source, "triton")
    assert not outcome.ok and "Error" in outcome.detail


@pytest.fixture
def interpreted(monkeypatch, interpreter):
    """The Triton kernels in Triton's interpreter, which adds within FP8 blocks in float32."""
    from fp8rl_jax.kernels.gpu import matmul

    monkeypatch.setattr(matmul, "triton_call", interpreter.triton_call)


_EXPERTS = Case("experts", "fprop", "fp8", 24, 256, 160, 4, 2)
_WGRAD = Case("experts", "fprop", "fp8", 150, 136, 96, 3, 2)


@pytest.mark.slow
def test_kernels_in_the_interpreter(interpreted, source):
    """Every check that only a GPU can fail runs, and holds."""
    case = checks.Dense("fp8", 70, 256, 160)
    found = [checks.check_dense(case, source, "triton")]
    found += checks.check_rows(case, (1, 65, 130), source, "triton")
    found += checks.check_tiles(case, source)
    found += checks.check_grouped(_EXPERTS, source)
    found.append(checks.check_grouped_wgrad(_WGRAD, source))
    text = checks.format_outcomes(found)
    assert all(o.ok for o in found), text
    assert [o.check for o in found].count("tiles") == 4
    measured = [o.error for o in found if o.error is not None]
    assert len(measured) == 3 and min(measured) > 0 and max(measured) < 3e-7
    for line in ("float64: 3 of 3 hold", "rows: 3 of 3", "tiles: 4 of 4", "experts: 1 of 1"):
        assert line in text


@pytest.mark.slow
def test_wrong_grouped_kernels_are_found(interpreted, source, monkeypatch):
    """The next expert's weights; rows left over in a group that has none; gradients likewise."""
    grouped, wgrad = checks.grouped_matmul, checks.grouped_wgrad

    def next_expert(x, w, experts, *scales):
        return grouped(x, w, (experts + 1) % w.shape[0], *scales)

    monkeypatch.setattr(checks, "grouped_matmul", next_expert)
    assert not any(o.ok for o in checks.check_grouped(_EXPERTS, source))
    monkeypatch.setattr(
        checks, "grouped_matmul", lambda *a: grouped(*a) + (a[2] >= 4)[:, None, None]
    )
    float64, experts = checks.check_grouped(_EXPERTS, source)
    assert float64.ok and experts.detail == "groups without rows are not zero"
    monkeypatch.setattr(checks, "grouped_wgrad", lambda *a: 1 + wgrad(*a))
    outcome = checks.check_grouped_wgrad(_WGRAD, source)
    assert not outcome.ok and outcome.detail == "an expert without rows has some"


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
        for products in block:
            addends = np.concatenate([products, partial])
            unit = 2.0 ** (np.floor(np.log2(np.abs(addends).max(0))) - 13)
            partial = (np.trunc(addends / unit) * unit).sum(0, keepdims=True)
        total += partial[0]
    size, bound = np.abs(terms).sum(0), checks.bound("fp8", "triton")
    assert 1e-7 < (np.abs(total - terms.sum(0)) / size).max() < bound
    wrong = total - 0.5 * terms[:128].sum(0)
    assert (np.abs(wrong - terms.sum(0)) / size).max() > 2 * bound


def test_operands_are_random_and_repeat():
    one, other = Source(1 << 12, 3), Source(1 << 12, 3)
    for _ in range(2):
        a, b = one.take(jnp.bfloat16, 8, 64), other.take(jnp.bfloat16, 8, 64)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert (np.asarray(a) != np.asarray(one.take(jnp.bfloat16, 8, 64))).mean() > 0.9
    scales = np.asarray(one.scales(8, 8))
    assert 0.5 <= scales.min() < scales.max() <= 1.5


def test_seconds_per_call():
    """The method itself, with a product that a CPU has."""
    x = jnp.ones((64, 64))
    seconds, spread, by = kernel_times.seconds_per_call(jnp.matmul, [(x, x), (2 * x, x)], 2)
    assert 0 < seconds < 1 and spread >= 0 and isinstance(by, dict)


@pytest.mark.parametrize(
    "case",
    [
        slow(Case("", "fprop", "fp8", 256, 512, 384)),
        slow(Case("", "wgrad", "fp8", 512, 256, 384)),
        slow(Case("", "fprop", "bf16", 64, 512, 384)),
        Case("", "fprop", "fp8", 64, 512, 384, 8, 2),
    ],
    ids=str,
)
def test_only_the_kernel_is_timed(case):
    """Compiled for an H200, a program of ours holds the kernel and moves nothing else."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    from fp8rl_jax import deviceless
    from fp8rl_jax.errors import UserError

    try:
        mesh = deviceless.h200_mesh({})
    except UserError as error:
        pytest.skip(str(error))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    class Shapes:
        def take(self, dtype, *shape):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

        def scales(self, *shape):
            return self.take(jnp.float32, *shape)

    product, operands, _ = kernel_times.prepared(case, "ours", Shapes(), 2)
    with jax.set_mesh(mesh):
        program = jax.jit(lambda all_: [product(*one) for one in all_])
        text = program.lower(operands).compile().as_text()
    found = {kind: len(names) for kind, names in deviceless.products(text).items()}
    assert found == {"triton_kernel_call": 2}
    assert not re.findall(r" (transpose|copy|fusion)\(", text)


def _timed(case: Case, us: float, **others: float) -> dict:
    measured = {"us": us, "spread": 0.01, "by": {}, "calls": 9, "programs": 2}
    times = {"ours": measured, **{name: {**measured, "us": t} for name, t in others.items()}}
    return kernels._row(case, times, {"copy_gbps": 4000.0, "bf16_tflops": 700.0})


def _synthetic() -> dict:
    squares = {c.rows: c for c in shapes.target_cases() if c.kind == "fp8" and not c.experts}
    few = Case("m q_proj", "fprop", "fp8", 64, 4096, 4096)
    rows = [
        _timed(squares[4096], 150.0, bf16=200.0, fp8=140.0),
        _timed(squares[8192], 950.0, bf16=1500.0),
        _timed(few, 4.0, bf16=8.0),
    ]
    failed = Case("m k", "fprop", "fp8", 64, 4096, 1024)
    rows.append(kernels._row(failed, {"ours": {"error": "RuntimeError: no"}}, {}))
    torch = {"torch": "2.11", "rows": [
        {"shape": [4096] * 3, "us": 130.0, "form": "scaled_mm"},
        {"shape": [8192] * 3, "error": "not for this one"},
    ]}  # fmt: skip
    return {
        "environment": {"device": "X", "date": "D", "platform": "gpu", "versions": {"jax": "9"}},
        "ceilings": {"copy_gbps": 4000.0, "bf16_tflops": 700.0}, "rows": rows, "torch": torch,
        "attention": [], "left_out": ["another"], "targets": kernels.targets(rows),
    }  # fmt: skip


def test_table_and_targets():
    """Figures of a made-up run: by hand."""
    result = _synthetic()
    first = result["rows"][0]
    assert first["tflops"] == pytest.approx(2 * 4096**3 / 150e-6 / 1e12)
    assert first["over_bf16"] == pytest.approx(200 / 150) and "over_dense" not in first
    verdicts = {t["target"]: kernels.verdict(t) for t in result["targets"]}
    worst, failed = "square 4096 fprop fp8 4096 x 4096 x 4096", "m k fprop fp8 64 x 4096 x 1024"
    assert verdicts == {
        "FP8 at 4096^3 and 8192^3 over bf16": f"missed by 5% at {worst}",
        "FP8 at 4096^3 and 8192^3, TFLOPS": f"missed by 17% at {worst}",
        "FP8 over bf16 at 64 rows and more": f"met; failed at {failed}",
        "FP8 at up to 64 rows, GB/s of weights": f"met; failed at {failed}",
        "128 experts, top 8, 8k tokens, over dense FP8": "not measured",
        "bf16 over XLA's bf16": "not measured",
        "decode of 32 and more, 8k keys, over a copy": "not measured",
        "the same, FP8 KV over bf16 KV": "not measured",
    }
    text = kernels.format_table(result)
    assert "copy 4000 GB/s, bf16 8192^3 700 TFLOPS" in text
    (line,) = (s for s in text.splitlines() if s.startswith("square 4096"))
    assert line.split()[-12:] == (
        ["150.0", "1.0%", "916", "451", "131%", "11%", "1.33", "0.93", "-", "2", "x", "9"]
    )
    for words in ("RuntimeError: no", "refused (not for this one)", "the time was up: another",
                  "130.0 us, 1057 TFLOPS (scaled_mm)"):  # fmt: skip
        assert words in text, words


_ONE = ["bench", "kernels", "--models=smollm2_135m", "--rows=64", "--quick"]


def _few_attention_checks(monkeypatch):
    """One of each kind; tests/test_gpu_check.py has them all."""
    for module in (attention_checks, gradient_checks):
        monkeypatch.setattr(module, "CASES", [c for c in module.CASES if c.kind == "float32"])


@pytest.mark.slow
def test_command(tmp_path, monkeypatch, capsys):
    """Off a GPU: the reference is checked, the rest is named, the file is whole."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "ROWS", (1, 7, 300))
    _few_attention_checks(monkeypatch)
    assert cli.run([*_ONE, "--out=deep/down"]) == 0
    output, error = capsys.readouterr()
    assert "no GPU: the kernels are not checked" in output and "not measured" in output
    assert "float64: " in error and "rows: 9 of 9 hold" in error
    assert output.endswith("deep/down/kernels.json\n")
    written = json.loads((tmp_path / "deep/down/kernels.json").read_text())
    assert written["ok"] and written["ceilings"] is None and written["rows"] == []
    assert written["attention"] == [] and "attention decode fp8 KV 32 x 8192" in written["left_out"]
    assert written["environment"]["versions"]["jax"] == jax.__version__
    assert {t["found"] for t in written["targets"]} == {None}
    assert [p.name for p in (tmp_path / "deep/down").iterdir()] == ["kernels.json"]


@pytest.mark.slow
def test_command_with_a_wrong_kernel(tmp_path, monkeypatch, capsys):
    """A failed check is printed, and is the exit status."""
    monkeypatch.setattr(checks, "block_matmul", _swapped)
    monkeypatch.setattr(checks, "ROWS", (1, 64))
    monkeypatch.setattr(shapes, "target_cases", list)
    _few_attention_checks(monkeypatch)
    assert cli.run([*_ONE, f"--out={tmp_path}"]) == 1
    assert "FAILED float64: fp8" in capsys.readouterr().err
    assert not json.loads((tmp_path / "kernels.json").read_text())["ok"]


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
        (["--out=file"], ["--out=file", "another directory"]),
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
    monkeypatch.setattr(kernels, "bench", lambda *a: pytest.fail("the bench was run"))
    assert cli.run(["bench", "kernels", *arguments]) == 2
    output, error = capsys.readouterr()
    assert output == "" and re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error, f"{word!r} is missing in: {error}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
