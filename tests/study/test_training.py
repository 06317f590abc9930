"""Study `training`: verdicts of planted trends, and arms that differ in one field."""

import json
import re

import numpy as np
import pytest
from study_cells import arm_config, fake_subject, pair_numbers, result_of, run_numbers

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.rl import Outcomes, prepare
from studies import __main__ as commands
from studies import frame, training
from studies.cells import Cells
from studies.frame import Plan, Size
from studies.progress import silent

_STEPS = 64
_TIME = np.linspace(0, 1, _STEPS)


def _study(cell, seeds=3, note=silent):
    """The study's result if each arm of a seed has the numbers of `cell`."""
    start = {"pairs": {training._PAIR: pair_numbers(0.1)}}
    made = [
        {"before RL": start} | {arm: cell(seed, arm) for arm in training.ARMS}
        for seed in range(seeds)
    ]
    return result_of(training.STUDY, made, Size(questions=64, steps=_STEPS), note)


def _verdicts(result) -> dict[str, str]:
    return {verdict["name"]: verdict["verdict"] for verdict in result["hypotheses"]}


def _cell(
    slope: float,
    entropy_slope: float,
    tis: float = 1.0,
    noise: float = 0.1,
    grows=0.0,
    sharper=1.0,
    gain=0.1,
):
    """Mismatch and entropy that change by these shares over the run, what TIS makes of the
    mismatch, the share by which the logits' error grows, by how much all logits grow, and what
    the reward gains."""

    def cell(seed: int, arm: str):
        rng = np.random.default_rng(seed)
        rough = 1 + noise * rng.normal(size=(3, _STEPS))
        size = 0.01 * (1 + slope * _TIME) * rough[0] * (tis if arm == "tis" else 1)
        entropy = (1 + entropy_slope * _TIME) * (1 + 0.1 * (rough[2] - 1))
        made = run_numbers(
            _STEPS,
            mismatch_kl=size,
            train_rollout_logprob_abs_diff=size * rough[1],
            entropy=entropy,
            reward_mean=0.3 + gain * _TIME + 0.01 * (rough[1] - 1),
        )
        error = sharper * (0.1 * (1 + grows) + 0.005 * rng.normal())
        made["after"] = {"pairs": {training._PAIR: pair_numbers(error, sharper)}}
        return made

    return cell


@pytest.mark.parametrize(
    ("cell", "verdicts"),
    [
        (_cell(1.0, -0.5), ["supported"] * 4),
        (_cell(-0.7, 1.0), ["not supported"] * 4),
        # The confounder: the mismatch falls, and rises at equal entropy.
        (
            _cell(-0.3, -0.8, noise=0.02),
            ["not supported", "not supported", "supported", "supported"],
        ),
        (_cell(0.0, 0.0), ["not resolved"] * 4),
    ],
    ids=["rises", "falls", "confounded", "flat"],
)
def test_trends(cell, verdicts):
    found = _verdicts(_study(cell))
    names = ("rises", "size_rises", "entropy_falls", "per_nat_rises")
    assert [found[name] for name in names] == verdicts


@pytest.mark.parametrize(
    ("tis", "verdict"), [(0.8, "supported"), (1.0, "supported"), (1.5, "not supported")]
)
def test_tis(tis, verdict):
    result = _study(_cell(0.5, -0.2, tis))
    assert _verdicts(result)["tis_not_above"] == verdict


@pytest.mark.parametrize(("gain", "verdict"), [(0.1, "supported"), (-0.1, "not supported")])
def test_stable(gain, verdict):
    result = _study(_cell(0.5, -0.2, gain=gain))
    assert _verdicts(result)["tis_stable"] == verdict


@pytest.mark.parametrize(
    ("grows", "sharper", "verdict"),
    [
        (0.5, 1.0, "supported"),
        (-0.5, 1.0, "not supported"),
        (0.0, 1.0, "not resolved"),
        (-0.5, 4.0, "not supported"),
    ],
)
def test_the_logits_error(grows, sharper, verdict):
    """Whatever mismatch and entropy do, and how large the logits become."""
    cell = _cell(-0.3, -0.8, grows=grows, sharper=sharper)
    result = _study(cell, seeds=4)
    assert _verdicts(result)["error_grows"] == verdict


def test_a_policy_that_stays_is_no_growth():
    """Without any reward nothing is learned: no figure changes."""

    def cell(seed: int, arm: str):
        made = run_numbers(_STEPS, mismatch_kl=0.01, entropy=1.0)
        made["after"] = {"pairs": {training._PAIR: pair_numbers(0.1)}}
        return made

    found = _verdicts(_study(cell))
    assert found.pop("tis_not_above") == "supported"
    assert "supported" not in found.values()


def test_seeds_that_disagree_and_one_seed_resolve_nothing():
    rising, falling = _cell(1.0, -0.5), _cell(-0.7, 1.0)
    mixed = lambda seed, arm: (rising if seed else falling)(seed, arm)
    for cell, seeds in ((mixed, 3), (rising, 1)):
        result = _study(cell, seeds)
        assert _verdicts(result)["rises"] == "not resolved"
    assert "no interval from one value" in result["hypotheses"][0]["sentence"]


def test_files(tmp_path):
    """What is written, and the line after each cell."""
    notes: list[str] = []
    result = _study(_cell(1.0, -0.5), note=notes.append)
    assert notes[0] == "two_layers, seed 0, before RL is there; 1 of 9 cells, 8 left"
    assert notes[-1].endswith("tis is there; 9 of 9 cells, 0 left")
    frame.write(training.STUDY, result, tmp_path)
    assert json.loads((tmp_path / "study.json").read_text())["block"] == _STEPS // 16
    table = (tmp_path / "study.md").read_text()
    assert "| uncorrected | mismatch KL per nat of entropy |" in table
    assert "\n| before RL | 0.1, 0.1, 0.1 | 0.1, 0.1, 0.1 | 0.01, 0.01, 0.01 |" in table
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"


def test_no_entropy_is_no_division_by_zero():
    assert training._per_nat(np.array([0.0, 1.0]), np.array([0.0, 2.0])).tolist() == [0.0, 0.5]


def test_arms():
    """Only the correction differs. Uncorrected, the learner's own log-probabilities are the old
    ones and every weight is 1, so the difference to the sampler is nowhere in the loss."""
    plain, tis = training.ARMS["uncorrected"], training.ARMS["tis"]
    assert {n for n in {*plain, *tis} if plain.get(n) != tis.get(n)} == {"algo.correction"}
    sampler, mask = np.zeros((4, 3), np.float32), np.ones((4, 3), bool)
    learner = sampler + np.float32(0.1)
    weights = []
    for fields in (plain, tis):
        config, resolved = arm_config(fields)
        assert (config.precision.rollout, config.precision.learner) == ("fp8_blockwise", "bf16")
        assert not resolved.takes_rollout_logprobs(drifted=False)
        weights.append(
            prepare(
                resolved.algorithm,
                Outcomes(np.eye(2), mask, np.ones(4, bool), learner, sampler, sampler),
            ).rollout_weights
        )
    assert (weights[0] == 1).all()
    assert weights[1] == pytest.approx(np.exp(0.1))


def test_too_few_steps(tmp_path):
    plan = Plan([fake_subject()], Size(questions=8, steps=7), tmp_path)
    with pytest.raises(UserError, match="write 8 or more"):
        frame.run(training.STUDY, plan, Cells(tmp_path, resume=False))


@pytest.mark.slow
def test_the_quick_command(tmp_path, capsys):
    """Trains, writes its files, and a second time takes its cells."""
    command = ["training", "--quick", f"--out={tmp_path}", "--seeds=0,1"]
    assert commands.run(command) == 0
    output, progress = capsys.readouterr()
    assert "6 of 6 cells, 0 left" in progress
    result = json.loads((tmp_path / "study.json").read_text())
    for verdict in result["hypotheses"]:
        assert verdict["sentence"] in output
    runs = [run["series"] for found in result["runs"].values() for run in found]
    assert all(min(run["mismatch_kl"]) > 0 and min(run["entropy"]) > 0 for run in runs)
    first = [run["mismatch_kl"][0] for run in runs]
    assert first[:2] == first[2:], "one start, the same samples"
    scores = [*result["before"], *(run["after"] for run in result["runs"]["tis"])]
    assert all(score["rms_logits"][0] > 0 for score in scores)
    assert result["runs"]["tis"] != result["runs"]["uncorrected"]
    assert commands.run([*command, "--resume"]) == 0
    output, progress = capsys.readouterr()
    assert not re.search("RL run|fine-tuning", progress)
    assert json.loads((tmp_path / "study.json").read_text()) == result
