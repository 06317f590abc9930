"""A self-check that the promise passed is kept, and only for what it was made of."""

from __future__ import annotations

import pytest
from tiny_run import CONFIG

from fp8rl_jax.config import load_config
from fp8rl_jax.drift import SelfCheck, kept_self_check, self_check
from fp8rl_jax.training.runtime import make_runtime

_TINY = str(CONFIG)
_HOLDS, _FAILS = SelfCheck(20, 0, 0.0, 2), SelfCheck(20, 3, 1e-6, 2)


@pytest.fixture
def check(monkeypatch, tmp_path):
    """`kept_self_check` of overrides, where a check that is made gives the first of `results`."""
    results: list[SelfCheck] = []
    module = __import__(self_check.__module__, fromlist=["self_check"])
    monkeypatch.setattr(module, "self_check", lambda runtime: results.pop(0))

    def run(*overrides: str, results_of_checks: list[SelfCheck]) -> SelfCheck:
        results[:] = results_of_checks
        text = [f"--config.{o}" for o in (f"run.cache_dir={tmp_path}", *overrides)]
        found = kept_self_check(make_runtime(load_config(_TINY, text)))
        assert not results, "every check that was expected was made"
        return found

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
    monkeypatch.setattr("fp8rl_jax.user_cache.machine", lambda: "another")
    assert not check(results_of_checks=[_HOLDS]).kept
