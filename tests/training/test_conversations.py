"""Runs whose responses have several replies: nothing but what was said decides a bit.

Not the slots, pages and looks of the sampler, nor how long the environment takes, nor a kill in the
middle. What the sampler records of a drawn token is what the learner computes, and a fault in what
both are given is seen at once.
"""

from __future__ import annotations

import dataclasses
import os
import types

import numpy as np
import pytest
import train_process
from tiny_run import CONFIG, overrides, reproducible

from fp8rl_jax import train
from fp8rl_jax.base.errors import RewardError
from fp8rl_jax.config import load_config
from fp8rl_jax.config.functions import permit
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.data import ByteTokenizer, Turns
from fp8rl_jax.envs import Question, Tally, load_step
from fp8rl_jax.rollout import Progress, Replies, Rollout
from fp8rl_jax.training import step
from fp8rl_jax.training.conversations import Conversations
from fp8rl_jax.training.engine import JaxEngine
from fp8rl_jax.training.logs import read_jsonl

_DRIFT = "train_rollout_logprob_abs_diff_max"
_FIELDS = {
    "env.step": "echo_env:step",
    "env.max_turns": 6,
    "rollout.max_turn_tokens": 9,
    "rollout.max_observation_tokens": 5,
    "rollout.slots": 16,
    "rollout.part": 6,
    "run.steps": 4,
    "sft.steps": 0,
    "eval.every": 4,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"run.cache_dir": tmp_path_factory.mktemp("cache")}


def _run(directory, cache, **more) -> None:
    fields = _FIELDS | cache | {name.replace("__", "."): value for name, value in more.items()}
    train.train(load_config(str(CONFIG), overrides(directory, **fields)))


def _said(directory) -> dict[str, list[dict]]:
    """The records of a run without what slots and pages decide."""
    return {
        name: [{k: v for k, v in row.items() if not k.startswith("rollout_")} for row in rows]
        for name, rows in reproducible(directory).items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    directory = tmp_path_factory.mktemp("whole")
    _run(directory, cache)
    return directory


def test_a_run_with_an_environment(whole):
    """Three replies and more to a response, drift of zero, rewards of environment and conversation
    together, and a gradient."""
    for record in read_jsonl(whole / "run/metrics.jsonl"):
        assert 3 < record["turns_mean"] <= 6 and record[_DRIFT] == 0.0
        parts = record["reward/env"] + record["reward/dense_reward:share_of_even_bytes"]
        assert record["reward_mean"] == pytest.approx(parts) and record["grad_norm"] > 0
        assert record["env_errors"] == 0 < record["observations_cut"]
        assert record["response_len_mean"] < record["response_len_max"] <= 60
    (sample, *_) = read_jsonl(whole / "run/samples.jsonl")
    assert "\n[tool] " in sample["response"]


@pytest.mark.slow
def test_neither_slots_nor_time_matter(whole, tmp_path, cache, monkeypatch):
    """Few slots, least pages, other looks; the environment takes up to 0.15 s for a step."""
    monkeypatch.setenv("ECHO_SLOW", os.fspath(CONFIG))  # of workers that start now
    fields = _FIELDS | cache | {"rollout.slots": 3, "rollout.pages": 4, "rollout.part": 1}
    train_process.finish(train_process.start(tmp_path, **fields))
    assert _said(tmp_path) == _said(whole)


@pytest.mark.slow
def test_packed_rows(whole, tmp_path, cache):
    """The learner's rows hold several conversations: no drift, the first step's records but for the
    sums of gradients."""
    _run(tmp_path, cache, learner__tokens_per_batch=256, run__steps=1)
    (record,), first = _said(tmp_path)["metrics"], _said(whole)["metrics"][0]
    assert record[_DRIFT] == 0.0
    for name in ("reward_mean", "turns_mean", "response_len_mean", "ratio_mean", "drift_tokens"):
        assert record[name] == first[name], name
    assert record["grad_norm"] == pytest.approx(first["grad_norm"], rel=0.1)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_conversation(whole, tmp_path, cache, monkeypatch):
    """SIGKILL while step 3 samples, and resumed: every record is that of the run in one piece."""
    monkeypatch.setenv("ECHO_SLOW", os.fspath(CONFIG))
    fields = _FIELDS | cache | {"run.checkpoint_every": 1}
    process = train_process.start(tmp_path, **fields)
    train_process.kill_after_records(process, tmp_path, "metrics", 2)
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 2
    train_process.finish(train_process.start(tmp_path, "--resume", **fields))
    assert _said(tmp_path) == _said(whole)


_CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
_CUT = "Error: the reply was cut; call a tool or answer in fewer words\n"
_MOST = 200
# First replies of responses of at most _MOST tokens; whether an end token is behind them; what goes
# behind that, None where the response is full; whether the response is finished if nothing follows.
_REPLIES = [
    ("42", True, "", True),
    ("x" * _MOST, False, None, False),
    (_CALL, True, "42\n", True),
    ("Let me think", False, _CUT, False),
    (_CALL[:30], False, _CUT, False),
    (_CALL, False, "42\n", False),
    ("x" * (_MOST - 3 - len(_CALL)) + _CALL, True, "", False),  # no room behind "42\n"
]


def test_what_is_cut_is_truncated():
    """Whatever the environment says; and a reply that is cut ends its turn alone."""
    tokenizer = ByteTokenizer()
    rows = len(_REPLIES)
    tokens = np.full((rows, _MOST), tokenizer.pad_id, np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, (text, ended, _, _) in enumerate(_REPLIES):
        drawn = [*text.encode(), *[tokenizer.eos_id] * ended]
        tokens[row, : len(drawn)] = drawn
        lengths[row] = len(drawn)
    mask = np.arange(_MOST) < lengths[:, None]
    ends = np.array([ended for _, ended, _, _ in _REPLIES])
    rollout = Rollout(tokens, mask, np.zeros(mask.shape, np.float32), ends, {}, lengths)
    done = lengths == _MOST
    zero = np.zeros(1, np.int32)
    replies = Replies(mask, np.ones(rows, np.int32), np.zeros(rows, np.int32))
    progress = Progress(rollout, done, ~done, replies, zero, zero, zero, zero)
    conversations = Conversations(
        Turns(tokenizer, None, "tool", 64),
        load_step("fp8rl_jax.envs.tiny.calculator:TOOLS", "tools"),
        [Question("6 * 7", "42")] * rows,
        np.ones(rows, bool),
        _MOST,
        Tally("test"),
    )
    said: list[str | None] = [None] * rows
    while sum(text is None for text in said) > done.sum():
        more = conversations(progress)
        for row in np.flatnonzero(more.ends | (more.counts > 0)):
            said[row] = bytes(more.tokens[row, : more.counts[row]].tolist()).decode()
    assert said == [text for _, _, text, _ in _REPLIES]
    finished = conversations.result(rollout)[0].finished
    assert finished.tolist() == [right for _, _, _, right in _REPLIES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"env.tools": "fp8rl_jax.envs.tiny.calculator:TOOLS"},
        {"env.step": "echo_env:ends_at_once", "env.reward": "dense_reward:share_of_even_bytes"},
    ],
    ids=["tools", "done at once"],
)
def test_one_reply_is_truncated_as_without_an_environment(fields, one_reply, tmp_path, cache):
    """No response ends by itself: all are cut, and `algo.mask_truncated` leaves no token."""
    _run_cut(tmp_path, cache, **fields, **{"env.max_turns": 3})
    (record,) = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert (record["truncated_frac"], record["kept_tokens_frac"]) == (1.0, 0.0)
    assert record["update_skipped"] == 1 and record["turns_mean"] == 1.0
    for name in ("response_len_mean", "reward_mean", "loss", "grad_norm", "checksum"):
        assert record[name] == one_reply[name], name


@pytest.fixture(scope="module")
def one_reply(tmp_path_factory, cache):
    """The record of a step without an environment."""
    directory = tmp_path_factory.mktemp("one_reply")
    _run_cut(directory, cache)
    (record,) = read_jsonl(directory / "run/metrics.jsonl")
    return record


def _run_cut(directory, cache, **fields) -> None:
    """A step of responses of 24 tokens at most."""
    fields = {
        "run.steps": 1,
        "sft.steps": 0,
        "eval.every": 9,
        "rollout.max_new_tokens": 24,
        "rollout.slots": 16,
        "algo.mask_truncated": True,
        **fields,
    }
    train.train(load_config(str(CONFIG), overrides(directory, **fields, **cache)))


def _encoded_anew(batch):
    """A batch as of an engine that encodes the whole text of a response again."""
    tokens = np.array(batch.tokens)
    for row, end in enumerate(batch.lengths):
        tokens[row, end - 3] = tokens[row, end - 3] % 251 + 1
    return dataclasses.replace(batch, tokens=tokens)


def _all_drawn(batch):
    """A batch that takes what the environment said for the policy's."""
    first = batch.prompt_lengths[:, None]
    known = np.arange(batch.mask.shape[1]) < batch.lengths[:, None] - first
    return dataclasses.replace(batch, mask=known.astype(np.float32))


def _shifted(batch):
    """A batch whose response stands one slot late."""
    return dataclasses.replace(batch, prompt_lengths=batch.prompt_lengths - 1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_encoded_anew, _all_drawn, _shifted])
def test_faults_are_seen(fault, tmp_path, cache, monkeypatch):
    """Other tokens than were drawn, the environment's in the loss, a wrong place: all are drift."""
    make = JaxEngine.batch
    monkeypatch.setattr(JaxEngine, "batch", lambda *a, **k: fault(make(*a, **k)))
    _run(tmp_path, cache, run__steps=1, precision__zero_drift="report", eval__every=9)
    (record,) = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert record[_DRIFT] > 1e-3


def test_without_its_step_a_run_is_one_of_one_reply(tmp_path):
    """`sample`, `convert` and `fp8rl_jax.load` read a run's configuration without its code."""
    config = load_config(str(CONFIG), overrides(tmp_path, **_FIELDS, **{"algo.credit": "turn"}))
    permit(config, (), "config.json", ("precision",))
    assert config.env.step == "" and resolve_config(config).config.env.max_turns == 1


def test_what_nobody_drew_is_compared():
    """Of the tokens that the loss takes, an older version's alone are left out."""
    versions = np.array([[1, -1, 2, -1]])
    samples = types.SimpleNamespace(
        rollout=types.SimpleNamespace(mask=versions >= 0), versions=versions
    )
    batch = types.SimpleNamespace(mask=np.float32([[1, 1, 1, 0]]))
    assert step._comparable(batch, samples, step=2).tolist() == [[False, True, True, False]]


@pytest.mark.slow
def test_credit_by_turn(whole, tmp_path, cache):
    """The same responses, and other advantages."""
    _run(tmp_path, cache, algo__credit="turn", run__steps=1)
    (record,), first = _said(tmp_path)["metrics"], _said(whole)["metrics"][0]
    assert record["reward_mean"] == first["reward_mean"] and record[_DRIFT] == 0.0
    assert record["advantage_std"] != first["advantage_std"]


@pytest.mark.slow
def test_steps_that_fail(tmp_path, cache):
    """A response whose step fails is not scored; if all fail, the run stops and can go on."""
    _run(tmp_path / "half", cache, env__step="echo_env:broken", run__steps=1)
    (record,) = read_jsonl(tmp_path / "half/run/metrics.jsonl")
    assert 0 < record["env_errors"] == record["reward_unscored"] < 16
    assert record["reward_errors"] == record["env_errors"] and record[_DRIFT] == 0.0
    with pytest.raises(RewardError, match=r"all .* calls of env\.step failed"):
        _run(tmp_path / "all", cache, env__step="dense_reward:share_of_even_bytes")
