"""What a report says of drift, and of what to do."""

import html
import json
import math

import pytest
from report_run import STEPS, make_run, metrics_row, plots_of, read_page, recipes

from fp8rl_jax import report
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.report import summary


@pytest.mark.usefixtures("quick")
def test_drift_in_one_step_forbids_the_word_exactly(tmp_path):
    rows = [metrics_row(i, drift=1e-9 if i == 5 else 0.0) for i in range(1, STEPS + 1)]
    root = make_run(tmp_path / "run", metrics=rows)
    path, s = report.write_report(root), summary.summarise(root)
    page, plots = read_page(path), plots_of(path)["Drift between rollout and learner"]
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
    config = recipes("fp8", "fp8")
    config["precision"] = {"rollout": "fp8", "learner": "fp8"} | precision
    drifts = {5: 1e-3, 9: 0.03}
    rows = [metrics_row(i, drift=drifts.get(i, 0.0)) for i in range(1, STEPS + 1)]
    if not same_forward:  # such a run has nothing to compare
        rows = [{k: v for k, v in row.items() if k != "refit_checksum_ok"} for row in rows]
    root = make_run(root, config=config, metrics=rows)
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
    assert html.unescape(read_page(report.write_report(root))).count(s["advice"]) == 1


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
    assert summary.summarise(make_run(tmp_path / "run"))["advice"] is None


@pytest.mark.usefixtures("quick")
def test_an_analysis_of_another_sample_says_so(tmp_path):
    """Under the plot of a run that drifted, an analysis without drift speaks of itself alone."""
    parts = {key: [] for key in ("by_slot", "by_length", "by_row", "operations", "worst")}
    names = ("drift_tokens", "logprob_equal_frac", "token_mult_prob_error", "mismatch_kl")
    names += ("tis_clipfrac", summary.DRIFT_MAX, summary.DRIFT_MEAN)
    parts |= {"headline": dict.fromkeys(names, 0.0), "logits": None}
    earlier = [{"step": 5, "drift": 0.01, "culprit": "embed", "sentence": "E.", "advice": "a"}]
    analysis = _verdict("none", source="the newest weights of a", earlier=earlier, **parts)
    page = read_page(report.write_report(_drifting(tmp_path / "run", analysis)))
    of_itself = "An analysis of the newest weights of a, which says nothing of the steps above:"
    assert page.index("RL step 5, run again") < page.index("E.") < page.index(of_itself)
    assert page.index(of_itself) < page.index("none it is.")
    analysis = _verdict("norm", 9, **parts)
    page = read_page(report.write_report(_drifting(tmp_path / "other", analysis)))
    assert "RL step 9, run again from its own weights and questions:" in page
    assert "An analysis of" not in page


@pytest.mark.parametrize("value", [math.nan, None, math.inf])
@pytest.mark.usefixtures("quick")
def test_drift_that_is_not_a_number_is_not_zero(tmp_path, value):
    rows = [metrics_row(i) for i in range(1, STEPS + 1)]
    rows[3]["train_rollout_logprob_abs_diff_max"] = value
    page = read_page(report.write_report(make_run(tmp_path / "run", metrics=rows)))
    assert "max |Δlogp| = not finite" in page
    assert "train_rollout_logprob_abs_diff_max is not finite at 1 step, first at step 4." in page
    assert "0 exactly" not in page


def test_steps_without_compared_tokens_do_not_count(tmp_path):
    rows = [metrics_row(i) | ({"drift_tokens": 0} if i > 4 else {}) for i in range(1, STEPS + 1)]
    s = summary.summarise(make_run(tmp_path / "run", metrics=rows))
    assert s["drift_steps"] == 4 and s["drift_tokens"] == 1000
    assert "1,000 tokens of 4 steps" in s["sentence"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"verdict": 3}', '{"a":' * 10_000, "\x80"])
def test_damaged_drift_is_one_sentence(content, tmp_path):
    (tmp_path / "drift.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"drift\.json' is damaged"):
        report.drift.drift_section(tmp_path)
