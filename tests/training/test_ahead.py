"""Rollouts ahead of the learner: a run is a function of its configuration, whatever takes how long.

What a rollout records is what its own version of the policy computes; a step that learns from an
older one differs by staleness alone.
"""

from __future__ import annotations

import os
import time

import pytest
import train_process
from tiny_run import CONFIG, overrides, reproducible

from fp8rl_jax import learner, train
from fp8rl_jax.base.errors import DriftError
from fp8rl_jax.config import load_config
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.training import ahead
from fp8rl_jax.training.ahead import Rollouts
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.logs import read_jsonl

_DRIFT, _STALE = "train_rollout_logprob_abs_diff_max", "staleness_abs_diff"
_FIELDS = {
    "env.reward": "dense_reward:share_at_leisure",
    "run.steps": 5,
    "run.check_every": 1,
    "sft.steps": 0,
    "eval.every": 5,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 0,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"run.cache_dir": tmp_path_factory.mktemp("cache")}


def _run(directory, cache, ahead: int, **more) -> list[dict]:
    """The records of a run's steps."""
    fields = _FIELDS | cache | {name.replace("__", "."): value for name, value in more.items()}
    arguments = overrides(directory, **fields, **{"rollout.ahead": ahead})
    train.train(load_config(str(CONFIG), arguments))
    return read_jsonl(directory / "run/metrics.jsonl")


@pytest.fixture(scope="module")
def two_ahead(tmp_path_factory, cache):
    directory = tmp_path_factory.mktemp("ahead")
    return directory, _run(directory, cache, 2)


@pytest.mark.parametrize("field", ["ahead=1", "most_versions=2"])
def test_an_older_policy_is_weighed(field, tmp_path):
    """By the recorded log-probabilities, also where drift is allowed or was found; or by a
    correction, with log-probabilities of before the update."""
    more = [f"--config.rollout.{field}", "--config.rollout.slots=8"]
    for promise in ("report", "auto"):
        promised = [*more, f"--config.precision.zero_drift={promise}"]
        found = resolve_config(load_config(str(CONFIG), [*overrides(tmp_path), *promised]))
        assert found.takes_rollout_logprobs(drifted=True)
    more.append("--config.precision.learner=bf16")
    found = resolve_config(load_config(str(CONFIG), [*overrides(tmp_path), *more]))
    assert found.algorithm.corrections and not found.takes_rollout_logprobs(drifted=False)


def test_a_run_two_steps_ahead(two_ahead):
    """Rollouts 0 to 2 are of the first policy. Each has drift 0 under the policy that drew it, and
    differs from the policy that learns from it, but in the first step."""
    _, records = two_ahead
    drifts = [record.get(_DRIFT) for record in records]
    assert drifts == [0.0, 0.0, 0.0, None, None], "the last two steps draw no rollout"
    stale = [record[_STALE] for record in records]
    assert stale[0] == 0.0 and min(stale[1:]) > 1e-3
    assert all(record["ratio_mean"] != 1.0 for record in records[1:])
    assert all(record["refit_checksum_ok"] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"ahead": 0, "rollout__most_versions": 2},
        {"ahead": 1, "rollout__most_versions": 2, "algo__num_minibatches": 2},
    ],
)
def test_a_fault_of_the_train_step_alone_is_seen(fields, tmp_path, cache, monkeypatch):
    """Where the scoring program has none: in each step that compares, and where drift is forbidden
    the run ends."""
    right = learner.response_logprobs

    def planted(*arguments, **keywords):
        logp, *others = right(*arguments, **keywords)
        of_train_step = "observe" in keywords
        return (logp + 1e-3 if of_train_step else logp), *others

    monkeypatch.setattr(learner, "response_logprobs", planted)
    fields = {"rollout__slots": 8, "run__steps": 3, **fields}
    records = _run(tmp_path / "1", cache, precision__zero_drift="report", **fields)
    drifts = [record[_DRIFT] for record in records if _DRIFT in record]
    assert len(drifts) >= 2 and min(drifts) > 9e-4
    with pytest.raises(DriftError, match="appeared at RL step 1"):
        _run(tmp_path / "2", cache, precision__zero_drift="required", **fields)


def _without_checks(directory) -> dict[str, list[dict]]:
    """The records without drift, which only steps that wait for their rollouts have."""
    names = (
        "train_rollout",
        "logprob_equal",
        "token_mult",
        "mismatch",
        "chi2",
        "ess",
        "tis",
        "drift",
    )
    return {
        log: [{k: v for k, v in row.items() if not k.startswith(names)} for row in rows]
        for log, rows in reproducible(directory).items()
    }


@pytest.mark.slow
def test_time_changes_nothing(tmp_path, cache, monkeypatch):
    """Each reward takes 0.2 s, so that the learner updates while a rollout runs; without that, and
    with a rollout that each step waits for: the same records."""
    fields = {"precision__rollout": "f32", "precision__learner": "f32"}
    _run(tmp_path / "waits", cache, 2, **fields)
    monkeypatch.setenv("SOAK_SLOW", os.fspath(CONFIG))  # of workers that start now
    given = _FIELDS | cache | {"rollout.ahead": 2, "run.check_every": 99}
    given["run.checkpoint_every"] = 99  # a checkpoint waits for rollouts
    given |= {name.replace("__", "."): value for name, value in fields.items()}
    train_process.finish(train_process.start(tmp_path / "beside", **given))
    assert _without_checks(tmp_path / "beside") == _without_checks(tmp_path / "waits")
    waited = [r["time_wait"] for r in read_jsonl(tmp_path / "beside/run/metrics.jsonl")]
    assert max(waited[1:]) > 0.1, "rewards end after the update"


@pytest.mark.slow
def test_killed_and_resumed(two_ahead, tmp_path, cache, monkeypatch):
    """A checkpoint keeps the rollouts that are ahead: SIGKILL, and the records of one piece."""
    directory, _ = two_ahead
    monkeypatch.setenv("SOAK_SLOW", os.fspath(CONFIG))
    fields = _FIELDS | cache | {"run.checkpoint_every": 1, "rollout.ahead": 2}
    fields["run.check_every"] = 99
    process = train_process.start(tmp_path, **fields)
    train_process.kill_after_records(process, tmp_path, "metrics", 2)
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 2
    train_process.finish(train_process.start(tmp_path, "--resume", **fields))
    assert _without_checks(tmp_path) == _without_checks(directory)


@pytest.mark.slow
@pytest.mark.parametrize("most_versions", [1, 2])
def test_a_stop_waits_for_no_rollout(most_versions, tmp_path, cache, monkeypatch):
    """Those that run are drawn again, with the weights that the checkpoint keeps: the records of
    one piece."""
    fields = {"rollout.slots": 8, "rollout.part": 6, "rollout.most_versions": most_versions}
    fields = _FIELDS | cache | fields | {"rollout.ahead": 2, "run.check_every": 99}

    def config(directory):
        return load_config(str(CONFIG), overrides(directory, **fields))

    def slowly(*arguments, draw=ahead.sample_step):
        *before, show, begun = arguments

        def look(progress):
            time.sleep(0.3)
            show(progress)

        return draw(*before, look, begun)

    def stop():
        log = tmp_path / "run/metrics.jsonl"
        return "SIGTERM" if log.exists() and len(read_jsonl(log)) == 2 else None

    monkeypatch.setattr(ahead, "sample_step", slowly)
    assert train.train(config(tmp_path), stop=stop).stopped_by == "SIGTERM"
    monkeypatch.undo()
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", keep=2)
    meta = checkpoints.read_meta(2)
    checkpoints.close()
    versions = [rollout["version"] for rollout in meta["unfinished"]]
    assert (
        versions
        and versions == [0, 1][-len(versions) :]
        and [*meta["others"]] == [f"sampler_{version}" for version in versions]
    )
    train.train(config(tmp_path), resume=True)
    train.train(config(tmp_path / "whole"))
    assert _without_checks(tmp_path) == _without_checks(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "f32"])
def test_without_learning_it_is_the_run_of_today(recipe, tmp_path, cache):
    """With a learning rate of 0 every ratio is 1, and every record but the times is the same."""
    fields = {"optimizer__learning_rate": 0.0, "optimizer__weight_decay": 0.0, "run__steps": 3}
    fields |= {"precision__rollout": recipe, "precision__learner": recipe}
    now, ahead = (_run(tmp_path / str(s), cache, s, **fields) for s in (0, 1))
    for one, other in zip(now, ahead, strict=True):
        assert one["ratio_min"] == one["ratio_max"] == other["ratio_min"] == other["ratio_max"] == 1
        assert other[_STALE] == 0.0
        for name in ("reward_mean", "response_len_mean", "loss", "grad_norm", "checksum"):
            assert one[name] == other[name], name


@pytest.mark.slow
def test_another_run_from_the_second_step_on(two_ahead, tmp_path, cache):
    _, records = two_ahead
    now = _run(tmp_path, cache, 0)
    assert now[0]["reward_mean"] == records[0]["reward_mean"]
    assert now[1]["reward_mean"] != records[1]["reward_mean"]
    assert all(record[_DRIFT] == 0.0 and _STALE not in record for record in now)


@pytest.mark.slow
def test_dynamic_sampling_and_conversations(tmp_path, cache):
    """Rollouts of several rounds, and such as talk to an environment, run ahead as well."""
    fields = {"algo__dynamic_sampling": True, "env__reward": "dense_reward:an_eighth"}
    records = _run(tmp_path / "rounds", cache, 1, **fields)
    assert max(record["dynamic_rounds"] for record in records) > 1
    assert all(record.get(_DRIFT, 0.0) == 0.0 for record in records)
    fields = {"env__step": "echo_env:step", "env__max_turns": 4, "rollout__max_turn_tokens": 9}
    records = _run(tmp_path / "turns", cache, 1, rollout__slots=8, **fields)
    assert all(record["turns_mean"] > 2 for record in records)
    assert [record.get(_DRIFT) for record in records] == [0.0] * 4 + [None]


@pytest.mark.slow
def test_rewards_that_fail_and_a_longer_run(tmp_path, cache, monkeypatch):
    """A rollout whose rewards fail stops the run; mended and resumed, it ends, and may go on."""
    fields = _FIELDS | cache | {"env.reward": "dense_reward:share_or_failure", "rollout.ahead": 2}
    monkeypatch.setenv("SOAK_FAILS", os.fspath(CONFIG))
    output = train_process.finish(train_process.start(tmp_path, **fields), 2)
    assert "share_or_failure' failed; correct it" in output
    monkeypatch.delenv("SOAK_FAILS")
    for steps in (5, 7):
        fields["run.steps"] = steps
        train_process.finish(train_process.start(tmp_path, "--resume", **fields))
    assert [r["step"] for r in read_jsonl(tmp_path / "run/metrics.jsonl")] == [*range(1, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("versions", [1, 2])
def test_rewards_that_fail_later(versions, tmp_path, cache, monkeypatch):
    """The rollout behind the failed one is not drawn; the state is saved, and the run goes on."""
    fails = tmp_path / "fails"
    monkeypatch.setenv("SOAK_FAILS", os.fspath(fails))
    fields = _FIELDS | cache | {"env.reward": "dense_reward:share_or_failure", "rollout.ahead": 2}
    fields |= {"rollout.slots": 6, "rollout.most_versions": versions, "run.steps": 12}
    process = train_process.start(tmp_path, **fields)
    train_process.wait_for_records(process, tmp_path, "metrics", 2)
    fails.touch()
    output = train_process.finish(process, 2)
    assert "share_or_failure' failed; correct it" in output and "is saved" in output
    fails.unlink()
    train_process.finish(train_process.start(tmp_path, "--resume", **fields))
    assert [r["step"] for r in read_jsonl(tmp_path / "run/metrics.jsonl")] == [*range(1, 13)]


@pytest.mark.slow
def test_a_stale_version_is_seen(tmp_path, cache, monkeypatch):
    """Rollouts of the first version, which say that they are of the newest: drift."""
    following = Rollouts.next
    first = []

    def stale(self, state, served, times):
        first.append(served.weights)
        served.weights = first[0]
        return following(self, state, served, times)

    monkeypatch.setattr(Rollouts, "next", stale)
    records = _run(tmp_path, cache, 1, precision__zero_drift="report")
    assert records[0][_DRIFT] == 0.0 < records[1][_DRIFT]
