"""`fp8rl bench rollout`: what it counts, the static way against one big batch, bad input."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from random_model import initial_params
from tiny_run import CONFIG

from fp8rl_jax import cli
from fp8rl_jax.bench import rollout as bench_rollout
from fp8rl_jax.bench.rollout import CASES, SMALL, Cell, Plan, arguments, model_of
from fp8rl_jax.bench.rollout_ways import WAYS, long_tail, make_static
from fp8rl_jax.models import ModelConfig, Tokens, forward, rope_tables
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.rollout import make_sampler

_MODEL = ModelConfig(64, 128, 128, 1, 2, 1, 32)
_CELL = Cell(batch=4, prompt=5, new=6, group=2)
_TINY = str(CONFIG)


def test_small_models_have_the_stated_sizes():
    sizes = {name: parameter_counts(model_of(name)).total for name in SMALL}
    assert sizes == {"qwen3_4p5m": 4_459_264, "qwen3_29m": 29_369_856}


def test_cases_are_in_fp8_where_they_say():
    assert {name: (r().quantized, r().kv_quantized) for name, r in CASES.items()} == {
        "bf16": (False, False),
        "fp8_linear": (True, False),
        "fp8_kv": (False, True),
        "fp8": (True, True),
    }


def test_long_tail():
    """Within its bounds, mean a quarter, few long, the same numbers again."""
    lengths = long_tail(20_000, 128)
    assert lengths.min() >= 1 and lengths.max() <= 128
    assert abs(lengths.mean() - 32.5) < 1
    assert 0.005 < (lengths > 115).mean() < 0.03
    np.testing.assert_array_equal(lengths, long_tail(20_000, 128))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["bf16", "fp8"])
def test_ways_sample_what_one_big_batch_does(way, case):
    """Tokens, masks and log-probabilities, bit for bit, with responses of different lengths."""
    recipe = CASES[case]()
    params = initial_params(_MODEL)
    limits = long_tail(12, _CELL.new)
    weights = bench_rollout.served_weights(params, recipe)
    call = arguments(_MODEL, weights, _CELL, 12, limits)
    found = WAYS[way](_MODEL, recipe, _CELL)(*call)
    whole = jax.device_get(make_sampler(_MODEL, recipe, _CELL.settings)(*call))
    np.testing.assert_array_equal(whole.mask.sum(1), limits)
    for name in ("tokens", "mask", "logprobs", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)


def test_static_takes_whole_batches():
    call = arguments(_MODEL, None, _CELL, 6, np.ones(6, np.int32))
    with pytest.raises(AssertionError):
        make_static(_MODEL, CASES["bf16"](), _CELL)(*call)


@pytest.mark.slow
def test_result():
    """A row of each case, cell and way; tokens are those that were sampled; ratios and table."""
    plan = Plan([2], [5], [6], [2], ("fp8_kv", "bf16"), ("full", "long_tail"), repeats=1)
    result = bench_rollout.bench({"tiny": _MODEL}, plan, lambda text: None)
    json.dumps(result)
    assert len(result["full"]) == 2
    assert len(result["long_tail"]) == 2 * len(WAYS)
    for row in result["full"]:
        assert row["tokens"] == row["batch"] * row["new"]
        assert len(row["seconds"]) == 1
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"][0])
        assert row["step_ms"] == pytest.approx(1e3 * row["seconds"][0] / row["new"])
    for row in result["long_tail"]:
        assert row["samples"] == bench_rollout.QUEUE * row["batch"]
        assert row["tokens"] == long_tail(row["samples"], row["new"]).sum()
    assert {row["over_first_way"] for row in result["long_tail"] if row["way"] == "static"} == {1}
    assert [row["over_first"] for row in result["full"] if row["case"] == "fp8_kv"] == [1.0]
    text = bench_rollout.format_table(result)
    assert "bf16 static" in text and "batch 2, 5+6, group 2" in text and "emulated" in text


@pytest.mark.slow
def test_transformers_runs_the_same_model(monkeypatch, capsys):
    """Its float32 logits are ours within float32's error; it samples exactly what was asked."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "docs" / "scripts")
    from rollout_beside_transformers import DTYPES, Peer, compare

    params = initial_params(_MODEL)
    peer = Peer(_MODEL, params)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)
    with torch.inference_mode():
        theirs = peer.models["float32"](torch.tensor(tokens)).logits.numpy()
    ours = forward(params, Tokens.of(tokens, rope_tables(_MODEL, 9)), _MODEL, "f32").logits
    np.testing.assert_allclose(theirs, ours, atol=1e-4 * np.abs(theirs).max())
    assert set(peer.faster(tokens, 3, 2)) == set(DTYPES)
    out = peer.generate("float32", tokens, 3, 2)
    assert out.shape == (4, 3) and out.min() >= 0 and out.max() < 64
    rows = compare("tiny", _MODEL, ["bf16"], [_CELL], 1)
    assert [row["tokens"] for row in rows] == [_CELL.batch * _CELL.new] * 2
    assert rows[1]["case"] == "transformers" and rows[1]["over_transformers"] == 1
    assert "over transformers" in capsys.readouterr().out


@pytest.mark.slow
def test_command(tmp_path, capsys):
    """By a config: the file holds what the table shows."""
    options = ["--cases=bf16", "--batch=2", "--prompt=3", "--new=4", "--group=1", "--repeats=1"]
    command = ["bench", "rollout", "--config", _TINY, *options, f"--out={tmp_path / 'out'}"]
    assert cli.run(command) == 0
    output = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "rollout.json").read_text())
    assert [row["model"] for row in result["full"]] == [_TINY]
    assert output.endswith("rollout.json\n") and "tokens/s" in output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--models=qwen3_4p5m,qwen3_29m"),
        (["--config", _TINY, "--models=qwen3_4p5m"], "either by --config FILE or by --models"),
        (["--models=qwen9"], "there is no model 'qwen9'; write one of qwen3_4p5m"),
        (["--models=qwen3_4p5m", "--config.run.seed=1"], "--models takes none"),
        (["--models=qwen3_4p5m", "--cases=fp9"], "--cases holds 'fp9'; write names of bf16, fp8"),
        (["--models=qwen3_4p5m", "--cases="], "--cases is empty"),
        (["--models=qwen3_4p5m", "--lengths=short"], "write names of full, long_tail"),
        (["--models=qwen3_4p5m", "--batch=8,x"], "--batch: it holds 'x'"),
        (["--models=qwen3_4p5m", "--new=0"], "--new: it holds '0'; write whole numbers from 1"),
        (["--models=qwen3_4p5m", "--batch=4", "--group=3"], "--batch=4 counts sequences"),
        (["--models=qwen3_4p5m", "--repeats=0"], "--repeats is 0"),
        (["--models=qwen3_4p5m", "--out="], "--out: it is empty"),
        (["--models=qwen3_4p5m", "fast"], "either by --config FILE or by --models"),
    ],
)
def test_bad_input_is_one_sentence(options, said, capsys):
    assert cli.run(["bench", "rollout", *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
