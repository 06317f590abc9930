"""The report says what the files say: nothing invented, nothing hidden."""

import ast
import json
import os
import pathlib
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_run import (
    CONFIG,
    STEPS,
    evaluations,
    make_run,
    metrics_row,
    plots_of,
    read_page,
    recipes,
    write_rows,
)

from fp8rl_jax import report
from fp8rl_jax.report import plots, summary

_OTHER_SET = {"set": "b", "accuracy_greedy": 0.99, "accuracy_sampled": 0.99, "questions": 7}


@pytest.mark.usefixtures("quick")
def test_complete_run(tmp_path):
    root = make_run(tmp_path / "run")
    path = report.write_report(root)
    assert path == root / "report.html"
    page = read_page(path)
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
        *("Steps to look at", "Sample transcripts", "Configuration"),
    ]
    assert "sampled 20 % → 45 %, greedy 25 % → 50 %" in page
    assert "best SFT evaluation 30 %, at step 20" in page
    assert "drift over 7,800 tokens of 12 steps: max |Δlogp| = 0 exactly" in page
    assert "100 % of log-probs bit-equal" in page
    assert page.count("<img") == 19
    assert 'class="notes"' not in page
    assert "r12" in page and "r6" not in page  # the last step's transcripts only
    assert "Comparison" not in page
    assert "Lowest reward" in page and "fp8rl replay run 1<" in page
    assert "Largest |Δlogp|" not in page
    plots = plots_of(path)
    (drift,) = (
        plots["Drift between rollout and learner"][x] for x in ("|Δlogp| of a token, nats",)
    )
    assert drift[0] == "train_rollout_logprob_abs_diff_max: exactly 0 at all 12 steps"
    assert plots["Held-out accuracy"] == {x: ["greedy", "sampled"] for x in ("SFT", "RL")}


@pytest.mark.usefixtures("quick")
def test_experts_are_drawn_where_there_are_some(tmp_path):
    root = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    load = {"expert_load_max": 3.0, "expert_load_entropy": 0.9, "experts_unused_frac": 0.0}
    write_rows(root / "metrics.jsonl", [row | load for row in rows])
    plots = plots_of(report.write_report(root))
    assert [*plots].index("Experts") == [*plots].index("FP8 health") + 1
    assert {"Largest load over the mean", "Experts without a token"} < plots["Experts"].keys()


@pytest.mark.usefixtures("quick")
def test_continuous_batching_is_drawn_where_it_was_used(tmp_path):
    root = make_run(tmp_path / "run")
    page = read_page(report.write_report(root))
    assert "Continuous batching" not in page and "lost their pages" not in page
    rows = [metrics_row(i) | {"rollout_slots_used": 0.8} for i in range(1, STEPS + 1)]
    write_rows(root / "metrics.jsonl", [row | {"rollout_preemptions": 0} for row in rows])
    page = report.write_report(root)
    assert "lost their pages" not in read_page(page)
    assert [*plots_of(page)["Continuous batching"]] == [
        *("Share of slots that drew", "Responses computed anew")
    ]
    write_rows(root / "metrics.jsonl", [row | {"rollout_preemptions": 100} for row in rows])
    assert "lost their pages and were computed anew 1,200 times" in read_page(
        report.write_report(root)
    )
    assert summary.summarise(root)["rollout_preemptions"] == 1200


def test_page_is_self_contained_and_replaced_whole(tmp_path):
    root = make_run(tmp_path / "run")
    (root / "report.html").write_text("older")
    raw = report.write_report(root).read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|@import|https?://|url\(", raw)
    start = "data:image/svg+xml;base64,"
    assert {address[: len(start)] for address in re.findall(r'src="([^"]*)', raw)} == {start}
    assert raw == report.write_report(root).read_text(encoding="utf-8"), "it depends on the time"
    assert not [name for name in os.listdir(root) if name.endswith(".tmp")]
    assert str(tmp_path) not in raw


def test_summary_figures(tmp_path):
    s = summary.summarise(make_run(tmp_path / "run"))
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
    run = make_run(tmp_path / "run")
    alone = summary.summarise(run)
    both = [row | more for row in evaluations() for more in ({"set": "a"}, _OTHER_SET)]
    write_rows(run / "eval.jsonl", both)
    assert summary.summarise(run) == alone


def test_faults_are_named(tmp_path):
    rows = [metrics_row(i) for i in range(1, STEPS + 1)]
    rows[2] |= {"refit_checksum_ok": False, "reward_errors": 3, "fp8_nonfinite_blocks/kv": 2}
    notes = summary.summarise(make_run(tmp_path / "run", metrics=rows))["notes"]
    assert notes == [
        "The refit checksum failed at 1 step.",
        "3 calls of rewards failed, and were left out.",
        "fp8_nonfinite_blocks/kv: 2 blocks held NaN or infinity.",
    ]


def test_what_a_user_should_look_at(tmp_path):
    """Groups without a gradient; a mean reward that is no share of right answers; no SFT."""
    rows = [metrics_row(i) | {"group_zero_std_frac": 0.9} for i in range(1, STEPS + 1)]
    root = make_run(tmp_path / "run", metrics=rows, config=CONFIG | {"sft": {"steps": 0}})
    (root / "sft.jsonl").write_text("")
    graded = [row | {"pass@1": row["accuracy_sampled"] - 0.1} for row in evaluations()]
    s = summary.summarise(root)
    (note,) = s["notes"]
    assert note.startswith("All rewards were equal in 90 % of the groups of the last 2 steps")
    assert "held-out accuracy at" in s["sentence"]
    write_rows(root / "eval.jsonl", graded)
    said = summary.summarise(root)["sentence"]
    assert "mean held-out reward at" in said and "%" not in said.partition("; drift")[0]


def test_sums_over_replies_are_no_shares(tmp_path):
    """An episode may have a reward of 1.135."""
    config = CONFIG | {"env": {"task": "game", "step": "my_env:step"}}
    root = make_run(tmp_path / "run", metrics=[metrics_row(1)], config=config)
    high = [row | {"accuracy_sampled": 1.135} for row in evaluations()]
    write_rows(root / "eval.jsonl", high)
    page = read_page(report.write_report(root))
    assert "sampled 1.14 → 1.14" in page and "113" not in page and "standard error" not in page


@pytest.mark.usefixtures("quick")
def test_a_run_of_one_step(tmp_path):
    page = read_page(report.write_report(make_run(tmp_path / "run", metrics=[metrics_row(1)])))
    assert "tokens of 1 step:" in page
    assert "33.5 s; not recorded" in page  # no step but the first, so no median


@pytest.mark.usefixtures("quick")
def test_comparison(tmp_path):
    """Curves and a row of each run, what differs, and what times on a CPU are worth."""
    fast = [metrics_row(i, time_rollout=0.5) for i in range(1, STEPS + 1)]
    base = make_run(tmp_path / "base", config=recipes("bf16", "bf16"), metrics=fast)
    mixed = [metrics_row(i, drift=0.01) for i in range(1, STEPS + 1)]
    mixed = make_run(tmp_path / "mixed", config=recipes("fp8", "bf16"), metrics=mixed)
    (base / "eval.jsonl").unlink()
    path = report.write_report(make_run(tmp_path / "run"), [base, mixed])
    page = read_page(path)
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
    assert plots_of(path)["Comparison"] == {
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
    report.write_report(make_run(tmp_path / "run"))
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
