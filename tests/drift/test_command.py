"""`fp8rl drift` as a user runs it, the self-check before a run, and the monitor during one."""

from __future__ import annotations

import json
import sys

import drift_faults
import jax
import pytest
from tiny_run import CONFIG

from fp8rl_jax import cli, learner
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.drift import SelfCheck, attribute, command, self_check
from fp8rl_jax.drift.own_products import OwnProducts
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.run_directory import as_saved
from fp8rl_jax.training.runtime import make_runtime

_F32 = ("precision.rollout=f32", "precision.learner=f32")
_TINY = str(CONFIG)


def _drift(directory, *arguments) -> int:
    return cli.run(
        ["drift", "--config", _TINY, f"--config.run.dir={directory / 'run'}", *map(str, arguments)]
    )


@pytest.mark.slow
def test_no_drift_in_the_results(tmp_path, capsys, monkeypatch):
    """0 exactly, status 0 under any bound, and the files are where it says. Without intermediate
    values, as on meshes that cut them."""
    monkeypatch.setattr(attribute, "observe", lambda *_: attribute.Observed(unobservable=["all"]))
    recipes = [f"--config.{text}" for text in _F32]
    assert _drift(tmp_path, "--out", tmp_path / "out", "--fail-above=0", *recipes) == 0
    out = capsys.readouterr().out
    assert "0 exactly" in out
    result = json.loads((tmp_path / "out" / "drift.json").read_text())
    assert result["headline"]["logprob_equal_frac"] == 1.0
    assert str(tmp_path / "out" / "drift.html") in out
    assert "nothing to do" in (tmp_path / "out" / "drift.html").read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "f32"])
def test_no_drift(recipe, tmp_path, capsys):
    """Random weights: 0 exactly in every intermediate value."""
    recipes = [f"--config.precision.{side}={recipe}" for side in ("rollout", "learner")]
    assert _drift(tmp_path, "--out", tmp_path / "out", "--fail-above=0", *recipes) == 0
    out = capsys.readouterr().out
    assert "0 exactly" in out and "every intermediate value" in out


@pytest.mark.slow
def test_recipes_that_differ_fail_the_bound(tmp_path, capsys):
    """Status 1 above the bound, with the culprit, tables and plots."""
    arguments = ("--config.precision.learner=bf16", "--fail-above=1e-4", "--prompts=2")
    assert _drift(tmp_path, *arguments) == 1
    captured = capsys.readouterr()
    assert "recipe: Rollout and learner run different recipes" in captured.out
    assert "down_proj/input" in captured.out and "Worst tokens" in captured.out
    assert "above --fail-above=0.0001" in captured.err
    page = (tmp_path / "run_drift" / "drift.html").read_text()
    assert page.count("<img") == 6  # three plots, light and dark


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts=0"], "--prompts is 0; write at least 1"),
        (["--fail-above=-1"], "--fail-above is -1.0; write a number of at least 0"),
        (["--fail-above=nan"], "--fail-above is nan"),
        (["--checkpoint=no/such"], "--checkpoint=no/such is no directory"),
        (["--checkpoint=."], "holds no checkpoints"),
        (["runs"], "'runs' is not understood"),
        (["--config.precision.learner=fp9"], "unknown recipe 'fp9'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may hold checkpoints
    assert _drift(tmp_path, "--out", tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_run_needs_no_config(tmp_path, capsys, monkeypatch):
    """--checkpoint alone takes the run's own configuration, with what is overridden."""
    config = load_config(_TINY, ["--config.rollout.group_size=2"])
    (tmp_path / "config.json").write_text(json.dumps(as_saved(config)))
    taken = []

    def analyse_drift(config, *_):
        taken.append(config)
        raise UserError("reached")

    monkeypatch.setattr(command, "analyse_drift", analyse_drift)
    arguments = ["drift", "--checkpoint", str(tmp_path), "--config.rollout.temperature=0.5"]
    assert cli.run(arguments) == 2 and "dense_reward" in capsys.readouterr().err, "not permitted"
    assert cli.run([*arguments, "--allow-import=dense_reward"]) == 2
    assert capsys.readouterr().err.endswith("reached\n")
    (found,) = taken
    assert (found.rollout.group_size, found.rollout.temperature) == (2, 0.5)
    assert cli.run(["drift"]) == 2
    assert "name a config" in capsys.readouterr().err


def _runtime(*overrides: str):
    return make_runtime(load_config(_TINY, [f"--config.{text}" for text in overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(
            ("precision.rollout=fp8_delayed", "precision.learner=fp8_delayed"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("precision.first_layers_bf16=1", "precision.kv_cache=fp8_calibrated"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fp8", "delayed", "first layer and calibrated"],
)
def test_self_check_holds(overrides):
    """Two layers of the run's own widths agree bit for bit, and the line says so."""
    checked = self_check(_runtime(*overrides))
    assert checked.holds and checked.tokens >= 8 and checked.layers == 2
    assert "no drift in what was tried here" in str(checked) and jax.__version__ in str(checked)


@pytest.mark.slow
def test_self_check_sees_a_platform_that_does_not_keep_it(monkeypatch):
    """Rotary tables that are folded on one side stand for a platform that rounds differently."""
    jax.clear_caches()
    monkeypatch.setattr(learner, "hidden_states", drift_faults.constant_tables)
    checked = self_check(_runtime("precision.rollout=f32", "precision.learner=f32"))
    assert not checked.holds and 0 < checked.largest < 1e-4
    assert f"{checked.differing} of {checked.tokens} tokens" in str(checked)
    assert "does NOT hold here" in str(checked)


def _train(directory, *overrides: str) -> int:
    places = [f"--config.run.dir={directory / 'run'}", f"--config.run.cache_dir={directory}"]
    short = ["--config.run.steps=2", "--config.sft.steps=0", "--config.precision.self_check=True"]
    return cli.run(
        ["train", "--config", _TINY, *places, *short, *(f"--config.{text}" for text in overrides)]
    )


def test_required_refuses_where_the_check_fails(tmp_path, monkeypatch, capsys):
    """Before anything is written."""
    products = OwnProducts(tried=9, most_rows=64, way="float32", threads=2, wrong=())
    failed = SelfCheck(20, 3, 1e-6, 2, products)
    module = sys.modules[SelfCheck.__module__]
    monkeypatch.setattr(module, "self_check", lambda runtime: failed)
    assert _train(tmp_path, *_F32, "precision.zero_drift=required") == 2
    assert "does NOT hold here" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_drift_in_a_run_is_analysed_once(tmp_path, monkeypatch, capsys):
    """The first drift where none was promised writes drift.json, and the report shows it."""
    jax.clear_caches()
    monkeypatch.setattr(learner, "hidden_states", drift_faults.constant_tables)
    assert _train(tmp_path, *_F32) == 0
    out = capsys.readouterr().out
    assert "does NOT hold here" in out
    assert out.count("warning: drift") == 1 and out.count("drift: The first value") == 1
    result = json.loads((tmp_path / "run" / "drift.json").read_text())
    assert result["verdict"]["culprit"] == "self_attn/q_rope" and result["step"] == 1
    assert "self_attn/q_rope" in (tmp_path / "run" / "report.html").read_text()
    first = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["train_rollout_logprob_abs_diff_max"] > 0
    assert first["ratio_min"] == first["ratio_max"] == 1, "recomputed, as the check has warned"
