"""Partial rollouts: what each version of the policy drew is exactly what that version computes, in
responses that several versions draw; a batch is learnt in its step, whole.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
import train_process
from tiny_run import CONFIG, overrides, reproducible

from fp8rl_jax import train
from fp8rl_jax.config import load_config
from fp8rl_jax.training import partial, rl
from fp8rl_jax.training.logs import read_jsonl

_DRIFT, _STALE = "train_rollout_logprob_abs_diff_max", "staleness_abs_diff"
_FIELDS = {
    "run.steps": 6,
    "sft.steps": 0,
    "eval.every": 6,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 0,
    "rollout.slots": 6,  # of 16 responses: a part of each rollout is drawn for the next step
    "rollout.most_versions": 3,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"run.cache_dir": tmp_path_factory.mktemp("cache")}


def _run(directory, cache, **more) -> list[dict]:
    """The records of a run's steps."""
    fields = _FIELDS | cache | {name.replace("__", "."): value for name, value in more.items()}
    train.train(load_config(str(CONFIG), overrides(directory, **fields)))
    return read_jsonl(directory / "run/metrics.jsonl")


def _rescored(monkeypatch) -> list[dict[int, tuple[int, int]]]:
    """A list that fills with a dict for each step: version -> (tokens, tokens whose log-probability
    is not the one that the learner computes with the policy of that version)."""
    policies, found, step_of = {}, [], rl.rl_step

    def kept_step(runtime, state, *others):
        version = int(state.step)
        policies[version] = jax.tree.map(np.array, state)
        result = step_of(runtime, state, *others)
        samples, engine, counts = result.drawn.samples, runtime.engine, {}
        batch = engine.batch(samples.rollout, samples.prompts)
        for version in np.unique(samples.versions[samples.rollout.mask]).tolist():
            own = samples.versions == version
            logp = engine.score(policies[version], batch)
            differs = logp[own] != samples.rollout.logprobs[own]
            counts[version] = int(own.sum()), int(differs.sum())
        found.append(counts)
        return result

    monkeypatch.setattr(rl, "rl_step", kept_step)
    return found


@pytest.fixture(scope="module")
def three_versions(tmp_path_factory, cache):
    directory = tmp_path_factory.mktemp("partial")
    with pytest.MonkeyPatch.context() as patch:
        found = _rescored(patch)
        records = _run(directory, cache)
    return directory, records, found


def test_each_version_computes_what_it_drew(three_versions):
    """Every token, rescored under the version that drew it; responses of two versions are there,
    and the drift of the newest version's tokens is in the records."""
    _, records, found = three_versions
    assert all(differs == 0 for counts in found for _, differs in counts.values())
    assert sum(len(counts) > 1 for counts in found) >= 3
    assert all(max(counts) - min(counts) < 3 for counts in found)
    assert max(record["versions_max"] for record in records) >= 2
    assert [record[_DRIFT] for record in records] == [0.0] * 6
    newest = [counts[step][0] for step, counts in enumerate(found)]
    assert [record["drift_tokens"] for record in records] == newest
    assert records[0][_STALE] == 0.0 < min(record[_STALE] for record in records[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"precision__kv_cache": "fp8_calibrated"},
        {"lora__rank": 4},
        {"rollout__top_p": 0.8, "precision__rollout": "f32", "precision__learner": "f32"},
        {"rollout__top_p": 0.9, "rollout__top_k": 5},  # recorded by bits, and by ids
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_recipes(fields, tmp_path, cache, monkeypatch):
    found = _rescored(monkeypatch)
    _run(tmp_path, cache, **fields)
    assert all(differs == 0 for counts in found for _, differs in counts.values())
    assert sum(len(counts) > 1 for counts in found) >= 3


@pytest.mark.slow
def test_a_stale_version_is_seen(tmp_path, cache, monkeypatch):
    """Responses that say that the newest version drew all of their tokens: drift."""

    def forgets(self, rollout, version):
        versions = np.where(rollout.mask, np.int32(version), -1)
        return partial.Responses(self.questions, rollout, versions, self.prompts)

    monkeypatch.setattr(partial.Responses, "goes_on", forgets)
    records = _run(tmp_path, cache, precision__zero_drift="report", run__steps=3)
    assert records[0][_DRIFT] == 0.0 < max(record[_DRIFT] for record in records[1:])


@pytest.mark.slow
def test_without_learning_it_is_the_run_of_today(tmp_path, cache):
    """With a learning rate of 0 samples, rewards and gradients are those of whole responses."""
    fields = {"optimizer__learning_rate": 0.0, "optimizer__weight_decay": 0.0, "run__steps": 4}
    whole = _run(tmp_path / "1", cache, rollout__most_versions=1, **fields)
    parts = _run(tmp_path / "3", cache, **fields)
    assert max(record["versions_max"] for record in parts) >= 2
    for one, other in zip(whole, parts, strict=True):
        assert one["ratio_min"] == one["ratio_max"] == other["ratio_min"] == other["ratio_max"] == 1
        for name in ("reward_mean", "response_len_mean", "loss", "grad_norm", "checksum"):
            assert one[name] == other[name], name
    logs = (read_jsonl(tmp_path / part / "run/samples.jsonl") for part in "13")
    assert next(logs) == next(logs)


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "top_p"), [(0, 1.0), (1, 0.8)])
def test_killed_and_resumed(ahead, top_p, tmp_path, cache):
    """A checkpoint keeps the responses that later steps learn, beside rollouts that are ahead, and
    which tokens were kept for them."""
    fields = _FIELDS | cache | {"rollout.ahead": ahead, "run.check_every": 1}
    fields |= {"rollout.top_p": top_p}
    fields |= {"run.checkpoint_every": 1}
    _run(tmp_path / "whole", cache, **{n.replace(".", "__"): x for n, x in fields.items()})
    process = train_process.start(tmp_path / "killed", **fields)
    train_process.kill_after_records(process, tmp_path / "killed", "metrics", 2)
    train_process.finish(train_process.start(tmp_path / "killed", "--resume", **fields))
    assert reproducible(tmp_path / "killed") == reproducible(tmp_path / "whole")
    records = read_jsonl(tmp_path / "whole/run/metrics.jsonl")
    assert max(record["versions_max"] for record in records) >= 2
    assert max(record.get(_DRIFT, 0.0) for record in records) == 0.0


@pytest.mark.slow
def test_looks_change_nothing(three_versions, tmp_path, cache):
    """However often the host looks at a rollout."""
    directory, _, _ = three_versions
    _run(tmp_path, cache, rollout__part=7)
    assert reproducible(tmp_path) == reproducible(directory)
