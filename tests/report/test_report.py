"""The report says what the files say: nothing invented, nothing hidden, nothing executed."""

import ast
import base64
import html
import json
import math
import os
import pathlib
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from fuzz import time_limit
from matplotlib.figure import Figure

from fp8rl_jax import report
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.report import plots, summary

_STEPS = 12
_CONFIG = {
    "model": {"layers": 2, "d_model": 64},
    "precision": {"rollout": "fp8_blockwise", "learner": "fp8_blockwise"},
    "algo": {"name": "grpo", "group_size": 4},
    "rollout": {"max_tokens": 16},
    "env": {"task": "chain_sum"},
    "run": {"seed": 7},
}


def _metrics(step, drift=0.0, time_rollout=2.0):
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


def _evaluations():
    rows = [(10, 0.20, 0.10), (20, 0.30, 0.15), (30, 0.25, 0.20)]
    rows = [("sft", *row) for row in rows] + [("rl", 6, 0.4, 0.35), ("rl", 12, 0.5, 0.45)]
    keys = ("phase", "step", "accuracy_greedy", "accuracy_sampled")
    return [dict(zip(keys, row, strict=True)) | {"questions": 200} for row in rows]


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _make(root, *, config=None, metrics=None, samples=None):
    root.mkdir()
    (root / "config.json").write_text(json.dumps(_CONFIG if config is None else config))
    sft = [{"step": i, "loss": 3 / i, "grad_norm": 1.0, "lr": 1e-3} for i in range(1, 31)]
    samples = samples or [
        {"phase": "rl", "step": step, "prompt": f"1+{step}=", "response": f"r{step}", "answer": "2"}
        for step in (6, 12, 12)
    ]
    _write(root / "sft.jsonl", sft)
    _write(root / "metrics.jsonl", metrics or [_metrics(i) for i in range(1, _STEPS + 1)])
    _write(root / "eval.jsonl", _evaluations())
    _write(root / "samples.jsonl", samples)
    return root


_OTHER_SET = {"set": "b", "accuracy_greedy": 0.99, "accuracy_sampled": 0.99, "questions": 7}


def _recipes(rollout, learner):
    return _CONFIG | {"precision": {"rollout": rollout, "learner": learner}}


def _read(path):
    """The page without its image data and with entities resolved."""
    text = path.read_text(encoding="utf-8")
    return html.unescape(re.sub(r"data:image/svg\+xml;base64,[^\"]*", "", text))


def _plots(path):
    """{heading: {title of a plot: [labels of its legend]}}."""
    found = {}
    for section in _read(path).split("<h2>")[1:]:
        figures = re.findall(r"<figcaption>(.*?)</figcaption>(.*?)</figure>", section, re.S)
        found[section.partition("</h2>")[0]] = {
            title: re.findall(r"</i>(.*?)</li>", rest) for title, rest in figures
        }
    return found


@pytest.fixture
def quick(monkeypatch):
    """No plot is turned into an image, which takes long."""
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("quick")
def test_complete_run(tmp_path):
    root = _make(tmp_path / "run")
    path = report.write_report(root)
    assert path == root / "report.html"
    page = _read(path)
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        *("Key figures", "Held-out accuracy", "Reward"),
        *(
            "Drift between rollout and learner",
            "FP8 health",
            "Time",
            "Optimiser",
            "Supervised fine-tuning",
        ),
        *("Sample transcripts", "Configuration"),
    ]
    assert "sampled 20 % → 45 %, greedy 25 % → 50 %" in page
    assert "best SFT evaluation 30 %, at step 20" in page
    assert "drift over 7,800 tokens of 12 steps: max |Δlogp| = 0 exactly" in page
    assert "100 % of log-probs bit-equal" in page
    assert page.count("<img") == 19
    assert 'class="notes"' not in page
    assert "r12" in page and "r6" not in page  # the last step's transcripts only
    assert "Comparison" not in page
    plots = _plots(path)
    (drift,) = (
        plots["Drift between rollout and learner"][x] for x in ("|Δlogp| of a token, nats",)
    )
    assert drift[0] == "train_rollout_logprob_abs_diff_max: exactly 0 at all 12 steps"
    assert plots["Held-out accuracy"] == {x: ["greedy", "sampled"] for x in ("SFT", "RL")}


@pytest.mark.usefixtures("quick")
def test_experts_are_drawn_where_there_are_some(tmp_path):
    root = _make(tmp_path / "run")
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    load = {"expert_load_max": 3.0, "expert_load_entropy": 0.9, "experts_unused_frac": 0.0}
    _write(root / "metrics.jsonl", [row | load for row in rows])
    plots = _plots(report.write_report(root))
    assert [*plots].index("Experts") == [*plots].index("FP8 health") + 1
    assert {"Largest load over the mean", "Experts without a token"} < plots["Experts"].keys()


@pytest.mark.usefixtures("quick")
def test_continuous_batching_is_drawn_where_it_was_used(tmp_path):
    root = _make(tmp_path / "run")
    page = _read(report.write_report(root))
    assert "Continuous batching" not in page and "lost their pages" not in page
    rows = [_metrics(i) | {"rollout_slots_used": 0.8} for i in range(1, _STEPS + 1)]
    _write(root / "metrics.jsonl", [row | {"rollout_preemptions": 0} for row in rows])
    page = report.write_report(root)
    assert "lost their pages" not in _read(page)
    assert [*_plots(page)["Continuous batching"]] == [
        *("Share of slots that drew", "Responses computed anew")
    ]
    _write(root / "metrics.jsonl", [row | {"rollout_preemptions": 100} for row in rows])
    assert "lost their pages and were computed anew 1,200 times" in _read(report.write_report(root))
    assert summary.summarise(root)["rollout_preemptions"] == 1200


def test_page_is_self_contained_and_replaced_whole(tmp_path):
    root = _make(tmp_path / "run")
    (root / "report.html").write_text("older")
    raw = report.write_report(root).read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|@import|https?://|url\(", raw)
    start = "data:image/svg+xml;base64,"
    assert {address[: len(start)] for address in re.findall(r'src="([^"]*)', raw)} == {start}
    assert raw == report.write_report(root).read_text(encoding="utf-8"), "it depends on the time"
    assert not [name for name in os.listdir(root) if name.endswith(".tmp")]
    assert str(tmp_path) not in raw


def test_summary_figures(tmp_path):
    s = summary.summarise(_make(tmp_path / "run"))
    documented = summary.summarise.__doc__
    assert all(re.search(rf"\b{key}\b", documented) for key in s)
    assert json.loads(json.dumps(s)) == s
    assert (s["task"], s["seed"], s["rl_steps"], s["sft_steps"]) == ("chain_sum", "7", 12, 30)
    assert s["greedy"]["sft_best_step"] == 20 and s["greedy"]["sft_end"] == 0.25
    assert s["drift_exactly_zero"] is True and s["drift_max"] == 0.0
    assert s["drift_tokens"] == 7800
    assert s["time_step_first"] == 33.5 and s["time_rollout"] == 2.0  # the first step left out
    assert s["reward_first"] == pytest.approx(0.1) and s["reward_last"] == pytest.approx(1.2)
    assert s["refit_checks"] == 12 and s["refit_failures"] == 0


def test_of_several_evaluation_sets_the_first_is_shown(tmp_path):
    run = _make(tmp_path / "run")
    alone = summary.summarise(run)
    both = [row | more for row in _evaluations() for more in ({"set": "a"}, _OTHER_SET)]
    _write(run / "eval.jsonl", both)
    assert summary.summarise(run) == alone


@pytest.mark.usefixtures("quick")
def test_drift_in_one_step_forbids_the_word_exactly(tmp_path):
    rows = [_metrics(i, drift=1e-9 if i == 5 else 0.0) for i in range(1, _STEPS + 1)]
    root = _make(tmp_path / "run", metrics=rows)
    path, s = report.write_report(root), summary.summarise(root)
    page, plots = _read(path), _plots(path)["Drift between rollout and learner"]
    assert "max |Δlogp| = 1e-08" in page
    assert "0 exactly" not in page
    assert "all but 6e-09 % of log-probs bit-equal" in page
    assert "1 + 6.41e-11" in page
    assert s["drift_exactly_zero"] is False
    assert s["drift_mean"] == pytest.approx(1e-9 * 500 / 7800)  # weighted by drift_tokens
    labels = [label for labels in plots.values() for label in labels]
    assert "train_rollout_logprob_abs_diff_max (0 at 11 of 12 steps)" in labels
    assert not [label for label in labels if "exactly" in label]


def _verdict(culprit, step=None, **more):
    verdict = {"culprit": culprit, "sentence": f"{culprit} it is.", "advice": f"mend {culprit}"}
    return {"verdict": verdict, **({} if step is None else {"step": step, "drift": 0.1}), **more}


def _drifting(root, analysis=None, platform="cpu", same_forward=True, **precision):
    """A run that drifted at steps 5 and 9, by 0.01 and 0.3, and its drift.json."""
    config = _recipes("fp8", "fp8")
    config["precision"] = {"rollout": "fp8", "learner": "fp8"} | precision
    drifts = {5: 1e-3, 9: 0.03}
    rows = [_metrics(i, drift=drifts.get(i, 0.0)) for i in range(1, _STEPS + 1)]
    if not same_forward:  # such a run has nothing to compare
        rows = [{k: v for k, v in row.items() if k != "refit_checksum_ok"} for row in rows]
    root = _make(root, config=config, metrics=rows)
    (root / "environment.json").write_text(json.dumps([{"devices": {"platform": platform}}]))
    if analysis:
        (root / "drift.json").write_text(json.dumps(analysis))
    return root


def test_drift_is_counted_and_followed_by_what_to_do(tmp_path):
    """The steps, the largest, what was analysed, and one sentence, which the page has too."""
    earlier = [{"step": 5, "drift": 0.01, "culprit": "embed", "sentence": "E.", "advice": "a"}]
    s = summary.summarise(_drifting(tmp_path / "a", _verdict("norm", 9, earlier=earlier)))
    assert (
        "The recipes are equal, but there is drift at 2 of 12 steps (RL steps 5, 9), the largest "
        "0.3 at RL step 9. Analysed: RL step 5 (embed); RL step 9 (norm)."
    ) in s["notes"]
    assert s["steps_with_drift"] == 2
    assert s["advice"] == (
        "What to do: start again with --config.precision.cpu_products=exact and another run.dir, "
        "so that no order of summation can make drift, and report it with "
        f"{tmp_path}/a/drift.json."
    )
    root = _drifting(tmp_path / "b")
    s = summary.summarise(root)
    assert s["notes"][-1].endswith("Analysed: none of them.")
    assert f"and run `fp8rl drift --checkpoint {root}`, which names" in s["advice"]
    assert html.unescape(_read(report.write_report(root))).count(s["advice"]) == 1


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"cpu_products": "exact"}, "What to do: run `fp8rl drift"),
        ({"platform": "gpu"}, "What to do: run `fp8rl drift"),
        ({"analysis": _verdict("scaling", 9)}, "What to do: mend scaling."),
        ({"analysis": {"step": 9, "verdict": 3}}, "What to do: start again"),
        ({"learner": "bf16", "same_forward": False}, None),
        ({"learner": "fp8_blockwise"}, "What to do: start again"),
        ({"rollout": "fake_forward", "learner": "fake"}, "What to do: start again"),
        ({"zero_drift": "report"}, None),
    ],
    ids=["exact", "gpu", "a field's", "damaged", "other recipes", "two names", "forward", "report"],
)
def test_what_to_do(fields, advice, tmp_path):
    s = summary.summarise(_drifting(tmp_path / "run", **fields))
    found = s["advice"]
    assert any("equal, but" in note for note in s["notes"]) == fields.get("same_forward", True)
    assert found is advice is None or found.startswith(advice)


def test_without_drift_there_is_nothing_to_do(tmp_path):
    assert summary.summarise(_make(tmp_path / "run"))["advice"] is None


@pytest.mark.usefixtures("quick")
def test_an_analysis_of_another_sample_says_so(tmp_path):
    """Under the plot of a run that drifted, an analysis without drift speaks of itself alone."""
    parts = {key: [] for key in ("by_slot", "by_length", "by_row", "operations", "worst")}
    names = ("drift_tokens", "logprob_equal_frac", "token_mult_prob_error", "mismatch_kl")
    names += ("tis_clipfrac", summary.DRIFT_MAX, summary.DRIFT_MEAN)
    parts |= {"headline": dict.fromkeys(names, 0.0), "logits": None}
    earlier = [{"step": 5, "drift": 0.01, "culprit": "embed", "sentence": "E.", "advice": "a"}]
    analysis = _verdict("none", source="the newest weights of a", earlier=earlier, **parts)
    page = _read(report.write_report(_drifting(tmp_path / "run", analysis)))
    of_itself = "An analysis of the newest weights of a, which says nothing of the steps above:"
    assert page.index("RL step 5, run again") < page.index("E.") < page.index(of_itself)
    assert page.index(of_itself) < page.index("none it is.")
    analysis = _verdict("norm", 9, **parts)
    page = _read(report.write_report(_drifting(tmp_path / "other", analysis)))
    assert "RL step 9, run again from its own weights and questions:" in page
    assert "An analysis of" not in page


@pytest.mark.parametrize("value", [math.nan, None, math.inf])
@pytest.mark.usefixtures("quick")
def test_drift_that_is_not_a_number_is_not_zero(tmp_path, value):
    rows = [_metrics(i) for i in range(1, _STEPS + 1)]
    rows[3]["train_rollout_logprob_abs_diff_max"] = value
    page = _read(report.write_report(_make(tmp_path / "run", metrics=rows)))
    assert "max |Δlogp| = not finite" in page
    assert "train_rollout_logprob_abs_diff_max is not finite at 1 step, first at step 4." in page
    assert "0 exactly" not in page


def test_steps_without_compared_tokens_do_not_count(tmp_path):
    rows = [_metrics(i) | ({"drift_tokens": 0} if i > 4 else {}) for i in range(1, _STEPS + 1)]
    s = summary.summarise(_make(tmp_path / "run", metrics=rows))
    assert s["drift_steps"] == 4 and s["drift_tokens"] == 1000
    assert "1,000 tokens of 4 steps" in s["sentence"]


def test_faults_are_named(tmp_path):
    rows = [_metrics(i) for i in range(1, _STEPS + 1)]
    rows[2] |= {"refit_checksum_ok": False, "reward_errors": 3, "fp8_nonfinite_blocks/kv": 2}
    notes = summary.summarise(_make(tmp_path / "run", metrics=rows))["notes"]
    assert notes == [
        "The refit checksum failed at 1 step.",
        "3 calls of rewards failed, and were left out.",
        "fp8_nonfinite_blocks/kv: 2 blocks held NaN or infinity.",
    ]


def test_what_a_user_should_look_at(tmp_path):
    """Groups without a gradient; a mean reward that is no share of right answers; no SFT."""
    rows = [_metrics(i) | {"group_zero_std_frac": 0.9} for i in range(1, _STEPS + 1)]
    root = _make(tmp_path / "run", metrics=rows, config=_CONFIG | {"sft": {"steps": 0}})
    (root / "sft.jsonl").write_text("")
    graded = [row | {"pass@1": row["accuracy_sampled"] - 0.1} for row in _evaluations()]
    s = summary.summarise(root)
    (note,) = s["notes"]
    assert note.startswith("All rewards were equal in 90 % of the groups of the last 2 steps")
    assert "held-out accuracy at" in s["sentence"]
    _write(root / "eval.jsonl", graded)
    assert "mean held-out reward at" in summary.summarise(root)["sentence"]


@pytest.mark.parametrize(
    ("name", "empty"),
    [("sft", True), ("metrics", False), ("metrics", True), ("eval", False), ("samples", True)],
)
@pytest.mark.usefixtures("quick")
def test_one_missing_or_empty_file(tmp_path, name, empty):
    root = _make(tmp_path / "run")
    file = root / f"{name}.jsonl"
    file.write_text("") if empty else file.unlink()
    page = _read(report.write_report(root))
    assert f"{name}.jsonl {'holds no complete line' if empty else 'is missing'}." in page
    assert "Not recorded in this run." in page
    if name == "metrics":
        assert "exactly" not in page


def test_only_a_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    page = _read(report.write_report(tmp_path))
    assert "no held-out evaluation recorded" in page
    assert "<img" not in page and "exactly" not in page


@pytest.mark.usefixtures("quick")
def test_a_run_of_one_step(tmp_path):
    page = _read(report.write_report(_make(tmp_path / "run", metrics=[_metrics(1)])))
    assert "tokens of 1 step:" in page
    assert "33.5 s; not recorded" in page  # no step but the first, so no median


@pytest.mark.usefixtures("quick")
def test_truncated_last_line(tmp_path):
    root = _make(tmp_path / "run")
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "reward_me')
    page = _read(report.write_report(root))
    assert "metrics.jsonl: left out 1 of 13 lines, the last one incomplete." in page
    assert "12 steps of RL" in page


@pytest.mark.usefixtures("quick")
def test_samples_are_text_not_markup(tmp_path):
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x00\ud800"
    sample = {"phase": "eval<b>", "step": 1, "prompt": attack, "response": attack, "answer": attack}
    config = _CONFIG | {"env": {"task": attack}, attack: 1}
    root = _make(tmp_path / "a<i>b", samples=[sample], config=config)
    raw = report.write_report(root).read_text(encoding="utf-8")
    for tag in ("<script", "<img src=x", "<b>", "<i>", "\x00"):
        assert tag not in raw
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in raw
    assert "&amp;amp;\\x00" in raw


@pytest.mark.usefixtures("quick")
def test_comparison(tmp_path):
    """Curves and a row of each run, what differs, and what times on a CPU are worth."""
    fast = [_metrics(i, time_rollout=0.5) for i in range(1, _STEPS + 1)]
    base = _make(tmp_path / "base", config=_recipes("bf16", "bf16"), metrics=fast)
    mixed = [_metrics(i, drift=0.01) for i in range(1, _STEPS + 1)]
    mixed = _make(tmp_path / "mixed", config=_recipes("fp8", "bf16"), metrics=mixed)
    (base / "eval.jsonl").unlink()
    path = report.write_report(_make(tmp_path / "run"), [base, mixed])
    page = _read(path)
    rows = [re.findall(r"<td.*?>(?:<pre>)?(.*?)<", row) for row in page.split("<tr>")]
    assert ["bf16 rollout, bf16 learner (base)", "0.5", "1"] in [row[:3] for row in rows]
    assert ["fp8_blockwise rollout, fp8_blockwise learner (run)", "2"] in [row[:2] for row in rows]
    assert "FP8 is emulated" in page
    assert "fp8 rollout, bf16 learner (mixed)" in page and "1 + 0.01" in page
    assert [
        row for row in rows if row[:1] and row[0].startswith(("precision.", "env.", "run."))
    ] == [
        ["precision.learner", "fp8_blockwise", "bf16", "bf16"],
        ["precision.rollout", "fp8_blockwise", "bf16", "fp8"],
    ]
    exact, names = ": exactly 0 at all 12 steps", ["run", "base", "mixed"]
    assert _plots(path)["Comparison"] == {
        "Reward": names,
        "Accuracy, greedy": ["run", "mixed"],
        "Accuracy, sampled": ["run", "mixed"],
        "|Δlogp| of a token, nats: maximum": [f"run{exact}", f"base{exact}", "mixed"],
    }
    of_mixed = re.findall(r'border-color:(#\w+)"></i>mixed<', page)
    assert len(of_mixed) == 4 and len(set(of_mixed)) == 1, "a run has one colour"


def _drawn_lines(monkeypatch):
    """[(steps, values, limits of the values)] of the lines that are drawn from here on."""
    lines = []

    def keep(figure, *args, **kwargs):
        for ax in figure.axes:
            lines.extend((*line.get_data(), ax.get_ylim()) for line in ax.lines)

    monkeypatch.setattr(Figure, "savefig", keep)
    return lines


def test_rl_begins_where_sft_ended(tmp_path, monkeypatch):
    """Step 0 of RL has the last accuracy of SFT, and both have one scale."""
    lines = _drawn_lines(monkeypatch)
    report.write_report(_make(tmp_path / "run"))
    of_sft, _, greedy, sampled = lines[:4]
    assert [list(x) for x in greedy[:2]] == [[0, 6, 12], [0.25, 0.4, 0.5]]
    assert list(sampled[1]) == [0.2, 0.35, 0.45]
    assert of_sft[2] == greedy[2] == sampled[2]


def test_of_a_long_run_few_points_are_drawn(monkeypatch):
    """The largest and the least are among them, and the legend counts them."""
    lines = _drawn_lines(monkeypatch)
    values = np.random.default_rng(0).normal(size=30_000)
    values[[777, 20_001, 20_002]] = 50, -40, np.nan
    panel = plots.lines_panel("x", [("loss", np.arange(30_000), values)])
    ((steps, drawn, _),) = lines
    assert len(steps) <= 2000 and {777, 20_001} < set(steps)
    assert (drawn == values[steps.astype(int)]).all() and (np.diff(steps) > 0).all()
    assert panel.legend[0].label == f"loss ({len(steps):,} of 30,000 points drawn)"


def test_errors_are_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"absent' does not exist; give one .*\.$"):
        report.write_report(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"has no config\.json; give one .*\.$"):
        summary.summarise(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json' must hold one JSON object\.$"):
        summary.summarise(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_shares_round_to_certainty_only_when_certain():
    cases = {
        0.0: "0 %",
        1.0: "100 %",
        0.5: "50 %",
        1 - 1e-7: "all but 1e-05 %",
        1e-5: "0.001 %",
        5e20: "5e+22 %",
    }
    assert {value: summary.share(value) for value in cases} == cases
    assert [summary.near_one(x) for x in (1.0, 1 + 2**-30, None)] == [
        *("1", "1 + 9.31e-10", "not recorded")
    ]


@pytest.mark.parametrize("module", [report.run, report.html, report.drift, plots, summary])
def test_imports_are_light(module):
    """No jax: a report opens at once."""
    tree = ast.parse(pathlib.Path(module.__file__).read_text(encoding="utf-8"))
    names = {a.name for x in ast.walk(tree) if isinstance(x, ast.Import) for a in x.names}
    names |= {x.module or "" for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & {"jax", "jaxlib", "flax", "optax"}
    ours = {name for name in names if name.startswith("fp8rl_jax")}
    others = {name for name in ours if not name.startswith("fp8rl_jax.report")}
    assert others <= {
        "fp8rl_jax.base.errors",
        "fp8rl_jax.base.json_file",
        "fp8rl_jax.base.whole_file",
    }
    assert "matplotlib.pyplot" not in names


def test_a_large_image_is_in_the_page_whole():
    """Texts of a page are cut, images are not."""
    values = np.random.default_rng(0).normal(size=(4, 2000))
    panel = plots.lines_panel("x", [("loss", np.arange(2000), row) for row in values])
    assert len(panel.svg) > 100_000
    macros = report.html._TEMPLATES.get_template("parts.html").module
    assert f'base64,{panel.svg}"' in macros.plots([panel], "")


_HOSTILE = "</svg><script>alert(1)</script>--><b>\u202e]]>&x;$\\frac{$"


def test_hostile_records_are_shown_as_they_are(tmp_path):
    """Marks of direction, controls, halves of pairs and a very long line; names that are TeX."""
    attack = "a\u202eb\x9b31m\x7f\r\u2066\ud800<b>" + "x" * 3_000_000
    samples = [{"phase": "rl", "step": 1, "prompt": attack, "response": [attack], "answer": None}]
    rows = [_metrics(i) | {f"fp8_saturated_frac/{_HOSTILE}": 0.1} for i in (1, 2)]
    rows[1] |= {"loss": 1e308, "reward_mean": 10**400, "time_$x<b>": 1.0, "time_rollout": "soon"}
    root = _make(tmp_path / "run", samples=samples, metrics=rows)
    other = _make(tmp_path / "<b>$", config={"<b>": {"\x1b": attack}})
    page = report.write_report(root, [other])
    assert page.stat().st_size < 2_000_000
    raw = page.read_text(encoding="utf-8")
    text = re.sub(r"data:image/svg\+xml;base64,[^\"]*", "", raw)
    assert r"a\u202eb\x9b31m\x7f\r\u2066\ud800&lt;b&gt;" in text
    assert "characters left out" in text and "<b>" not in text and "<script" not in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert [x for x in _plots(page)["FP8 health"]["Saturated share"] if x.endswith("$\\frac{$")]


def test_hostile_names_stay_text_in_an_image(tmp_path):
    """Of operations, which are the only names in it: well-formed, and no more than shapes."""
    rows = [{"op": _HOSTILE, "layer": i, "differ": 1, "relative": 0.1} for i in (0, 1)]
    panels = [report.drift._of_values(rows)]
    panels += report.drift._of_causes(
        {
            "by_operation": [{"op": _HOSTILE, "adds": 0.1}],
            "by_layer": [{"layer": 0, "left": 0.1}],
            "drift_without_swaps": 0.1,
        }
    )
    for panel in panels:
        tags = [*ElementTree.fromstring(base64.b64decode(panel.svg)).iter()]
        names = {tag.tag.rpartition("}")[2] for tag in tags}
        assert names <= {
            *("svg", "metadata", "RDF", "Work", "type", "format", "creator", "Agent", "title"),
            *("defs", "style", "g", "path", "use", "clipPath", "rect", "image"),
        }
        links = {v for tag in tags for k, v in tag.attrib.items() if k.endswith("href")}
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
        assert not any(k.startswith("on") for tag in tags for k in tag.attrib)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"step": NaN}',
        '{"step": 1e999}',
        '{"step": "x"}',
        '{"step": null}',
        '{"phase": [1]}',
        '{"set": {}}',
        "[1]",
        "3",
        "\ud800",
        "x" * 2**24,
        '{"a": "' + "x" * 2**24 + '"}',
        '{"step": 1' + "0" * 5000 + "}",
        "{" + ", ".join(f'"k{i}": 0' for i in range(20_000)) + "}",
    ],
    ids=range(15),
)
def test_lines_that_are_no_records(line, tmp_path):
    """Left out, and counted, in every file; the others count."""
    root = _make(tmp_path / "run")
    whole = summary.summarise(root)
    for name in ("metrics", "sft", "eval", "samples"):
        file = root / f"{name}.jsonl"
        file.write_bytes(line.encode(errors="surrogatepass") + b"\n" + file.read_bytes())
    s = summary.summarise(root)
    assert [note for note in s["notes"] if "left out 1 of" in note] == s["notes"][:4]
    assert {k: v for k, v in s.items() if k != "notes"} == {
        k: v for k, v in whole.items() if k != "notes"
    }


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "drift.json"])
def test_files_that_never_open(name, tmp_path):
    root = _make(tmp_path / "run")
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    with time_limit():
        if name == "config.json":
            with pytest.raises(UserError, match=r"config\.json' cannot be read"):
                report.write_report(root)
        else:
            report.drift.drift_section(root)
            notes = summary.summarise(root)["notes"]
            assert ("metrics.jsonl is missing." in notes) == (name == "metrics.jsonl")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"verdict": 3}', '{"a":' * 10_000, "\x80"])
def test_damaged_drift_is_one_sentence(content, tmp_path):
    (tmp_path / "drift.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"drift\.json' is damaged"):
        report.drift.drift_section(tmp_path)
