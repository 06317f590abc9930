"""Study `staleness`: verdicts of planted numbers, and the arms."""

import json

import numpy as np
import pytest
from study_cells import arm_config, result_of, run_numbers

from studies import __main__ as commands
from studies import frame, staleness
from studies.frame import Size

_STEPS = 12


def _run(learner: str, ahead: int, seed: int, mismatch: float, change: float, **more) -> dict:
    """Numbers of a run whose log ratio has these two parts, independent of each other; each metric
    is where a run records it."""
    steps, factor = np.arange(_STEPS), 1 + 0.02 * seed
    total = np.hypot(mismatch, change * ahead)

    def curve(value: float, where) -> list:
        return [value * factor if here else None for here in where]

    rolled, stale = steps < _STEPS - ahead, steps >= ahead
    numbers = run_numbers(_STEPS, **more)
    numbers["series"] |= {
        "train_rollout_logprob_abs_diff": curve(mismatch, rolled),
        "mismatch_kl": curve(mismatch**2 / 2, rolled),
    }
    if ahead:
        numbers["series"] |= {
            "staleness_abs_diff": curve(total, steps >= 0),
            "staleness_kl": curve(total**2 / 2, steps >= 0),
            "staleness_ess": curve(0.9, steps >= 0),
        }
    if ahead and learner == "bf16":
        numbers["series"] |= {
            "learner_change_abs_diff": curve(change * ahead, stale),
            "learner_change_kl": curve((change * ahead) ** 2 / 2, stale),
        }
    return numbers


def _study(fp8=0.0, bf16=0.02, change=0.01, lost=0.0, seeds=3):
    """The result for mismatches of both learners; four steps ahead FP8 learns `lost` less."""

    def numbers(learner: str, ahead: int, seed: int) -> dict:
        right = 0.5 + 0.002 * seed - lost * (learner == "fp8" and ahead == 4)
        mismatch = fp8 if learner == "fp8" else bf16
        return _run(learner, ahead, seed, mismatch, change, bf16=right, own=right)

    made = [
        {f"{x}_{s}": numbers(x, s, seed) for x in ("fp8", "bf16") for s in staleness.AHEAD}
        for seed in range(seeds)
    ]
    return result_of(staleness.STUDY, made, Size(steps=_STEPS))


def _verdicts(result) -> dict[str, str]:
    return {verdict["name"]: verdict["verdict"] for verdict in result["hypotheses"]}


def test_verdicts(tmp_path):
    found = _study()
    assert set(_verdicts(found).values()) == {"supported"} and len(_verdicts(found)) == 9
    frame.write(staleness.STUDY, found, tmp_path)
    text = (tmp_path / "study.md").read_text()
    assert "| FP8 rollout, bf16 learner, 4 steps ahead | 0.0447, 0.0456" in text
    assert "NaN" not in (tmp_path / "study.json").read_text()
    other = _verdicts(_study(fp8=0.02, bf16=0.001, lost=0.1))
    names = ("exact", "larger", "four", "learner")
    assert {other[name] for name in names} == {"not supported"}
    assert other["one"] == other["grows"] == "supported"


def test_arms():
    """Both learners are over the recorded log-probabilities, without another correction."""
    for arm, fields in staleness.ARMS.items():
        _, resolved = arm_config(fields)
        assert resolved.same_forward == arm.startswith("fp8") and not resolved.algorithm.corrections


@pytest.mark.slow
def test_the_quick_command(tmp_path, capsys):
    command = ["staleness", "--quick", f"--out={tmp_path}"]
    assert commands.run(command) == 0
    output, _ = capsys.readouterr()
    result = json.loads((tmp_path / "study.json").read_text())
    for verdict in result["hypotheses"]:
        assert verdict["sentence"] in output
    (fp8,), (mixed,) = (result["runs"][arm] for arm in ("fp8_2", "bf16_2"))
    drifts = [x for x in fp8["series"]["train_rollout_logprob_abs_diff"] if x is not None]
    assert len(drifts) == 6 and not any(drifts)
    changes = mixed["series"]["learner_change_abs_diff"]
    assert changes[:2] == [None, None] and min(changes[2:]) > 0
