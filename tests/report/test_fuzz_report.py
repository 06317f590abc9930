"""No bytes in a run's files keep a report from being written: see helpers/fuzz.py."""

from __future__ import annotations

import json

import pytest
from fuzz import MANY, fuzz
from marks import slow

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.report import write_report
from fp8rl_jax.report.drift import drift_section
from fp8rl_jax.report.summary import summarise

_ROWS = [
    {
        "step": i,
        "reward_mean": 0.1 * i,
        "loss": 0.5,
        "grad_norm": 1.0,
        "drift_tokens": 100,
        "train_rollout_logprob_abs_diff": 0.0,
        "train_rollout_logprob_abs_diff_max": 0.0,
        "logprob_equal_frac": 1.0,
        "time_step": 2.0,
        "time_rollout": 1.0,
        "refit_checksum_ok": True,
        "fp8_nonfinite_blocks/kv": 0,
        "fp8_saturated_frac/kv": 0.1,
        "reward_errors": 0,
        "phase": "rl",
        "accuracy_greedy": 0.5,
        "accuracy_sampled": 0.4,
        "questions": 8,
        "set": "a",
        "prompt": "1 + 1",
        "response": "2",
        "answer": "2",
        "reward": 1.0,
    }
    for i in range(1, 4)
]
_FILES = ("metrics", "sft", "eval", "samples")
_DRIFT = {
    "verdict": {"sentence": "it drifts", "advice": "nothing"},
    "step": 3,
    "headline": {
        "drift_tokens": 10,
        "train_rollout_logprob_abs_diff_max": 0.1,
        "logprob_equal_frac": 0.5,
        "train_rollout_logprob_abs_diff": 0.1,
        "token_mult_prob_error": 1.1,
        "mismatch_kl": 0.1,
        "tis_clipfrac": 0.0,
    },
    "logits": {"max": 0.1},
    "worst": [],
    "by_slot": [{"slot": 0, "max": 1.0, "mean": 0.5}],
    "by_length": [{"from": 0, "max": 1.0, "mean": 0.5}],
    "by_row": [{"row": 0, "max": 1.0, "mean": 0.5}],
    "operations": [{"op": "q_proj", "layer": 0, "differ": 3, "relative": 0.1}],
    "by_operation": [{"op": "q_proj", "adds": 0.1}],
    "by_layer": [{"layer": 0, "left": 0.1}],
    "drift_without_swaps": 0.1,
}


@pytest.mark.parametrize("count", [slow(MANY)])
def test_records(count, tmp_path):
    """metrics.jsonl, sft.jsonl, eval.jsonl and samples.jsonl, each a mutated text."""
    (tmp_path / "config.json").write_text("{}")
    good = ["".join(json.dumps(row) + "\n" for row in rows).encode() for rows in (_ROWS, _ROWS[:1])]
    lines = json.dumps(_ROWS[0]).encode()

    def read(content: bytes) -> None:
        for name in _FILES:
            (tmp_path / f"{name}.jsonl").write_bytes(content)
        if summarise(tmp_path)["rl_steps"] == 0:
            raise UserError("no line is left")

    fuzz("metrics.jsonl", read, [*good, lines], count)


@pytest.mark.slow
def test_pages(tmp_path):
    """The whole page, with its plots."""
    (tmp_path / "config.json").write_text("{}")
    good = "".join(json.dumps(row) + "\n" for row in _ROWS).encode()

    def read(content: bytes) -> None:
        for name in _FILES:
            (tmp_path / f"{name}.jsonl").write_bytes(content)
        write_report(tmp_path)
        if summarise(tmp_path)["rl_steps"] == 0:
            raise UserError("no line is left")

    fuzz("report.html", read, [good, json.dumps(_ROWS[1]).encode()], 200)


@pytest.mark.slow
def test_drift_json(tmp_path):
    def read(content: bytes) -> None:
        (tmp_path / "drift.json").write_bytes(content)
        drift_section(tmp_path)

    fuzz("drift.json", read, [json.dumps(_DRIFT).encode()], 400)
