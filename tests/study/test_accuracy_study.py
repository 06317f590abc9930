"""Study `accuracy`: verdicts of planted differences, and arms that are what they say."""

import json

import numpy as np
import pytest
from study_cells import arm_config, result_of, run_numbers

from studies import __main__ as commands
from studies import accuracy, frame
from studies.frame import Size
from studies.statistics import seeds_needed

_SEEDS = 6


def _study(gains, noise, stress=4.0, seeds=_SEEDS, error=0.004):
    """The study's result if an arm ends above its baseline by `gains`, but for noise within
    seeds; between seeds accuracies differ by far more."""

    def numbers(seed: int, arm: str):
        rng = np.random.default_rng([seed, *arm.encode()])
        found = 0.4 + 0.1 * seed % 0.3 + gains.get(arm, 0.0) + noise * rng.normal()
        size = 0.01 * (stress if arm == "stress_rollout" else 1) * (1 + noise * rng.normal())
        return run_numbers(
            bf16=found, own=found - 0.01, error=error, train_rollout_logprob_abs_diff=size
        )

    made = [{arm: numbers(seed, arm) for arm in accuracy.ARMS} for seed in range(seeds)]
    return result_of(accuracy.STUDY, made, Size(steps=4))


def _verdicts(result) -> dict[str, str]:
    return {verdict["name"]: verdict["verdict"] for verdict in result["hypotheses"]}


_AS_PUBLISHED = {"rollout": -0.1, "stress_rollout": -0.2}
_OTHERWISE = {
    "unified": -0.1,
    "rollout_tis": 0.1,
    "rollout": 0.2,
    "stress_rollout": 0.1,
    "stress_rollout_tis": -0.1,
}


@pytest.mark.parametrize(
    ("gains", "noise", "stress", "verdict"),
    [
        (_AS_PUBLISHED, 0.004, 4.0, "supported"),
        (_OTHERWISE, 0.004, 1.0, "not supported"),
        ({}, 0.2, 2.0, "not resolved"),
    ],
)
def test_verdicts(gains, noise, stress, verdict):
    found = _verdicts(_study(gains, noise, stress))
    assert len(found) == 8
    if gains == _OTHERWISE:  # nothing was lost that could be recovered
        assert found.pop("stress_recovers") == "not resolved"
    assert set(found.values()) == {verdict}, found


def test_stress_that_is_not_recovered():
    gains = {"stress_rollout": -0.2, "stress_rollout_tis": -0.1}
    assert _verdicts(_study(gains, 0.004))["stress_recovers"] == ("not supported")


def test_the_margin():
    """A clear difference is equivalent within the margin, and so is a TIS above its baseline."""
    gains = {"unified": -0.015, "stress_rollout": -0.1, "stress_rollout_tis": 0.1}
    found = _verdicts(_study(gains, 0.002))
    assert found["unified"] == found["stress_recovers"] == found["stress_tis"] == "supported"
    assert accuracy.MARGIN == 0.03


def test_equal_differences_may_be_chance():
    """Two seeds with the same small difference show nothing, of whatever size the evaluation's
    noise makes it likely; six with equal accuracies do."""
    gains = dict.fromkeys(("rollout", "rollout_tis", "unified"), 0.001)
    result = _study(gains, 0.0, seeds=2, error=0.01)
    found = _verdicts(result)
    assert found["degrades"] == found["tracks"] == found["unified"] == "not resolved"
    assert result["differences"]["unified"]["sd"] == pytest.approx(2**0.5 * 0.01)
    found = _verdicts(_study({}, 0.0, error=0.01))
    assert found["degrades"] == found["stress_tis"] == "not resolved"
    assert found["unified"] == "supported"


def test_the_number_of_seeds(tmp_path):
    """From the deviation of the paired differences, which the seeds' own differences leave out."""
    result = _study(_AS_PUBLISHED, 0.02)
    differences = result["differences"]["unified"]
    each = np.array(differences["each"])
    assert differences["sd"] == pytest.approx(each.std(ddof=1))
    assert differences["seeds_needed"] == seeds_needed(each, 0.03)
    assert differences["sd"] < 0.07
    sentence = accuracy.format_power(result)
    assert f"FP8 end to end: {differences['sd']:.3g}, {differences['seeds_needed']} seeds" in (
        sentence
    )
    frame.write(accuracy.STUDY, result, tmp_path)
    table = (tmp_path / "study.md").read_text()
    assert sentence in table
    assert table.count("\n| stress: ") == 2
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "study.json").read_text())["margin"] == 0.03


def test_one_seed_resolves_nothing(tmp_path):
    """And says so in sentences and in files."""
    result = _study(_AS_PUBLISHED, 0.0, seeds=1)
    assert set(_verdicts(result).values()) == {"not resolved"}
    for verdict in result["hypotheses"]:
        assert "no interval from one value" in verdict["sentence"]
        assert "nan" not in verdict["sentence"]
    assert "two one-sided t-tests: needs two seeds" in result["hypotheses"][0]["sentence"]
    assert "name two or more by --seeds" in accuracy.format_power(result)
    frame.write(accuracy.STUDY, result, tmp_path)
    assert "NaN" not in (tmp_path / "study.json").read_text()


def test_arms():
    """Precision and correction of each arm, as the run would have them."""
    found = {}
    for arm, fields in accuracy.ARMS.items():
        config, resolved = arm_config(fields)
        assert config.run.steps == 4
        found[arm] = (
            config.precision.rollout + config.precision.activation_policy,
            config.precision.learner,
            [*resolved.algorithm.corrections],
        )
        if resolved.config.precision.rollout != resolved.config.precision.learner:
            assert not resolved.takes_rollout_logprobs(drifted=False), "D would be in the ratio"
        else:
            assert resolved.same_forward
    assert found == {
        "bf16": ("bf16", "bf16", []),
        "rollout": ("fp8_blockwise", "bf16", []),
        "rollout_tis": ("fp8_blockwise", "bf16", ["tis"]),
        "unified": ("fp8_blockwise", "fp8_blockwise", []),
        "stress_rollout": (f"fp8_blockwisestatic(amax={accuracy.CLIP})", "bf16", []),
        "stress_rollout_tis": (f"fp8_blockwisestatic(amax={accuracy.CLIP})", "bf16", ["tis"]),
    }


@pytest.mark.slow
def test_the_quick_command(tmp_path, capsys):
    """Trains all arms from one start; rollout and learner in equal recipes differ in no bit."""
    command = ["accuracy", "--quick", f"--out={tmp_path}"]
    assert commands.run(command) == 0
    output, progress = capsys.readouterr()
    assert "6 of 6 cells, 0 left" in progress
    assert "name two or more by --seeds" in output
    result = json.loads((tmp_path / "study.json").read_text())
    for verdict in result["hypotheses"]:
        assert verdict["sentence"] in output and verdict["verdict"] == "not resolved"
    drift = {
        arm: max(found[0]["series"]["train_rollout_logprob_abs_diff"])
        for arm, found in result["runs"].items()
    }
    for arm in drift:
        assert (drift[arm] == 0) == (arm in ("bf16", "unified")), arm
    assert commands.run([*command, "--resume"]) == 0
    assert json.loads((tmp_path / "study.json").read_text()) == result
