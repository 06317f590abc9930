"""A run directory as `report` reads it, made of rows, and its page as text."""

import html
import json
import re

STEPS = 12
CONFIG = {
    "model": {"layers": 2, "d_model": 64},
    "precision": {"rollout": "fp8_blockwise", "learner": "fp8_blockwise"},
    "algo": {"name": "grpo", "group_size": 4},
    "rollout": {"max_tokens": 16},
    "env": {"task": "chain_sum"},
    "run": {"seed": 7},
}


def metrics_row(step, drift=0.0, time_rollout=2.0):
    first = 30.0 if step == 1 else 0.0
    row = {"step": step, "reward_mean": 0.1 * step, "reward_std": 0.3, "group_zero_std_frac": 0.2}
    row |= {"response_len_mean": 9.0, "response_len_max": 16, "truncated_frac": 0.01}
    row |= {"entropy": 0.5, "clipfrac_low": 0.0, "clipfrac_high": 0.01, "loss": 0.1, "lr": 1e-4}
    row |= {"grad_norm": 1.0, "token_mult_prob_error": 1 + drift, "mismatch_kl": drift**2}
    row |= {"train_rollout_logprob_abs_diff": drift, "logprob_equal_frac": 1 - drift}
    row |= {"train_rollout_logprob_abs_diff_max": 10 * drift, "tis_clipfrac": 0.0}
    for operand in ("weights", "activations", "kv"):
        row |= {f"fp8_saturated_frac/{operand}": 0.0, f"fp8_underflow_frac/{operand}": 1e-4}
        row |= {f"fp8_nonfinite_blocks/{operand}": 0}
    row |= {"refit_checksum_ok": True, "reward_errors": 0, "drift_tokens": 100 * step}
    row |= {"time_rollout": time_rollout + first, "time_learner": 1.0, "time_reward": 0.5}
    row |= {"time_step": time_rollout + first + 1.5, "tokens_per_s_rollout": 300.0}
    return row | {"tokens_per_s_learner": 800.0}


def evaluations():
    rows = [(10, 0.20, 0.10), (20, 0.30, 0.15), (30, 0.25, 0.20)]
    rows = [("sft", *row) for row in rows] + [("rl", 6, 0.4, 0.35), ("rl", 12, 0.5, 0.45)]
    keys = ("phase", "step", "accuracy_greedy", "accuracy_sampled")
    return [dict(zip(keys, row, strict=True)) | {"questions": 200} for row in rows]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_run(root, *, config=None, metrics=None, samples=None):
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    sft = [{"step": i, "loss": 3 / i, "grad_norm": 1.0, "lr": 1e-3} for i in range(1, 31)]
    samples = samples or [
        {"phase": "rl", "step": step, "prompt": f"1+{step}=", "response": f"r{step}", "answer": "2"}
        for step in (6, 12, 12)
    ]
    write_rows(root / "sft.jsonl", sft)
    write_rows(root / "metrics.jsonl", metrics or [metrics_row(i) for i in range(1, STEPS + 1)])
    write_rows(root / "eval.jsonl", evaluations())
    write_rows(root / "samples.jsonl", samples)
    return root


def recipes(rollout, learner):
    return CONFIG | {"precision": {"rollout": rollout, "learner": learner}}


def read_page(path):
    """The page without its image data and with entities resolved."""
    text = path.read_text(encoding="utf-8")
    return html.unescape(re.sub(r"data:image/svg\+xml;base64,[^\"]*", "", text))


def plots_of(path):
    """{heading: {title of a plot: [labels of its legend]}}."""
    found = {}
    for section in read_page(path).split("<h2>")[1:]:
        figures = re.findall(r"<figcaption>(.*?)</figcaption>(.*?)</figure>", section, re.S)
        found[section.partition("</h2>")[0]] = {
            title: re.findall(r"</i>(.*?)</li>", rest) for title, rest in figures
        }
    return found
