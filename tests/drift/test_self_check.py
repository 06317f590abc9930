"""A self-check that the promise passed is kept, and only for what it was made of."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import pytest
from tiny_run import CONFIG

from fp8rl_jax.config import load_config
from fp8rl_jax.drift import SelfCheck, kept_self_check, self_check
from fp8rl_jax.drift.own_products import OwnProducts, own_dots, try_own_products
from fp8rl_jax.drift.self_check import note_drift
from fp8rl_jax.kernels.reference import matmul
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.training.runtime import make_runtime

_TINY = str(CONFIG)
_PRODUCTS = OwnProducts(17, 5120, "pairs", 2)
_HOLDS = SelfCheck(20, 0, 0.0, 2, _PRODUCTS)
_FAILS = dataclasses.replace(_HOLDS, differing=3, largest=1e-6)


@pytest.fixture
def check(monkeypatch, tmp_path):
    """`kept_self_check` of overrides, where a check that is made gives the first of `results`."""
    results: list[SelfCheck] = []
    module = __import__(self_check.__module__, fromlist=["self_check"])
    monkeypatch.setattr(module, "self_check", lambda runtime: results.pop(0))

    def run(*overrides: str, results_of_checks: list[SelfCheck]) -> SelfCheck:
        results[:] = results_of_checks
        text = [f"--config.{o}" for o in (f"run.cache_dir={tmp_path}", *overrides)]
        notes: list[str] = []
        found = kept_self_check(make_runtime(load_config(_TINY, text)), notes.append)
        assert len(notes) == len(results_of_checks)
        assert not results, "every check that was expected was made"
        return found

    run.cache = tmp_path
    return run


def test_a_passed_check_is_not_made_again(check):
    first = check(results_of_checks=[_HOLDS])
    assert first.holds and not first.kept
    again = check("run.dir=elsewhere", "run.steps=9", results_of_checks=[])
    assert again.holds and again.kept and again.tokens == first.tokens
    assert "as an earlier run found" in str(again)


@pytest.mark.parametrize(
    "field",
    ["precision.rollout=bf16", "model.hidden_size=64", "rollout.max_new_tokens=7", "run.seed=1"],
)
def test_another_configuration_is_checked(check, field):
    check(results_of_checks=[_HOLDS])
    assert not check(field, results_of_checks=[_HOLDS]).kept


def test_a_check_does_not_hide_that_a_run_drifted(check):
    """It is not made again, and says which step drifted, of this configuration alone."""
    check(results_of_checks=[_HOLDS])
    config = [f"--config.run.cache_dir={check.cache}"]
    note_drift(make_runtime(load_config(_TINY, config)), "RL step 79 of runs/a")
    again = check(results_of_checks=[])
    assert again.holds and again.kept
    assert str(again).endswith("; but RL step 79 of runs/a drifted")
    assert "drifted" not in str(check("run.seed=1", results_of_checks=[_HOLDS]))


def test_a_failed_check_is_made_again(check):
    assert not check(results_of_checks=[_FAILS]).holds
    assert not check(results_of_checks=[_FAILS]).holds


def test_a_damaged_file_is_checked_again(check, tmp_path):
    check(results_of_checks=[_HOLDS])
    (path,) = tmp_path.glob("self-check-*.json")
    path.write_text("{")
    assert not check(results_of_checks=[_HOLDS]).kept
    assert check(results_of_checks=[]).kept


def test_another_machine_is_checked(check, monkeypatch):
    check(results_of_checks=[_HOLDS])
    monkeypatch.setattr("fp8rl_jax.base.user_cache.machine", lambda: "another")
    assert not check(results_of_checks=[_HOLDS]).kept


def test_what_was_tried_is_said():
    tried = "17 sizes of product of this run's programs, up to 5120 rows"
    assert tried in str(_HOLDS) and "2 thread(s)" in str(_HOLDS)
    wrong = dataclasses.replace(_PRODUCTS, wrong=("(600, 128) times (128, 14) in float32",))
    fails = dataclasses.replace(_HOLDS, products=wrong)
    assert not fails.holds and "(600, 128) times (128, 14) in float32" in str(fails)


@pytest.fixture(scope="module")
def runtime():
    return make_runtime(load_config(_TINY, ["--config.model.hidden_size=160"]))


def test_products_are_those_of_the_runs_programs(runtime):
    """Both sides', at their own numbers of rows; K of 160 is a block of 128 and one of 32."""
    config = runtime.config.rollout
    rows = config.prompts_per_step * config.group_size
    tokens = config.max_prompt_tokens + config.max_new_tokens
    sizes = {dot.sizes for dot in own_dots(runtime) if dot.sizes[0] == 1}
    assert {depth for _, m, depth, _ in sizes if m == rows * tokens} >= {128, 32}
    assert any(m < rows * tokens for _, m, _, _ in sizes)
    small = {dot.sizes for dot in own_dots(runtime) if dot.sizes[0] > 1}
    assert {depth for _, _, depth, _ in small} == {32, 64}  # of a head, of a page
    overrides = ["--config.model.hidden_size=160", "--config.rollout.slots=4"]
    continuous = own_dots(make_runtime(load_config(_TINY, overrides)))
    assert {dot.sizes for dot in continuous} - {dot.sizes for dot in own_dots(runtime)}


@pytest.mark.skipif(cpu_way().exact, reason="no order to break")
@pytest.mark.parametrize("least", [0, 100])
def test_products_of_another_order_are_found(runtime, monkeypatch, least):
    """Of any rows, or of many rows alone, which the cut of the model does not have."""
    honest = matmul.dot_general

    def planted(x, w, numbers):
        ((of_x,), (of_w,)), _ = numbers
        good, bad = honest(x, w, numbers), honest(jnp.flip(x, of_x), jnp.flip(w, of_w), numbers)
        return bad if good.shape[-2] >= least else good

    assert not try_own_products(runtime).wrong
    monkeypatch.setattr(matmul, "dot_general", planted)
    wrong = try_own_products(runtime).wrong
    assert len(wrong) == 3
    assert all(int(re.search(r"\((\d+), ", text)[1]) >= least for text in wrong)
