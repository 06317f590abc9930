"""What follows from zero drift, end to end and bit for bit: whole runs of the command's `train`.

`algo.old_logprobs='learner'` recomputes the old log-probabilities, so that nothing is equal by
definition; the reward of tiny_config.py gives every step a gradient. Runs are compared by the
checksum of the weights that each step's forward used, by samples and by gradient norms.
"""

from __future__ import annotations

import functools

import pytest
from kind_of_cpu import kind_of_cpu
from tiny_run import CONFIG, overrides, reproducible

from fp8rl_jax import train
from fp8rl_jax.config import load_config

# The optimizer is that of the tests' other runs, so that their compiled train step serves here.
_FIELDS = {"algo.old_logprobs": "learner", "sft.steps": 0, "run.steps": 3, "eval.every": 3}
_SAME_RUN = ("checksum", "grad_norm", "reward_mean", "entropy", "response_len_mean")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """records(field of algo=value, ...) of a run: its metrics and samples; each run once."""

    @functools.cache
    def run(*fields: tuple[str, object]) -> dict[str, list[dict]]:
        directory = tmp_path_factory.mktemp("run")
        train.train(load_config(str(CONFIG), overrides(directory, **_FIELDS | dict(fields))))
        return reproducible(directory)

    def records(reference: str = "learner", **algo) -> dict[str, list[dict]]:
        fields = {"precision.reference": reference} | {f"algo.{k}": v for k, v in algo.items()}
        return run(*sorted(fields.items()))

    return records


def _assert_same_run(one, other, names=_SAME_RUN) -> None:
    for name in names:
        values = ([r[name] for r in run["metrics"]] for run in (one, other))
        assert next(values) == next(values), f"{name} ({kind_of_cpu()})"
    assert one["samples"] == other["samples"], kind_of_cpu()


def _assert_learns(run) -> None:
    """Three updates, each of which changed the weights, at zero drift."""
    checksums = [r["checksum"] for r in run["metrics"]]
    assert len(set(checksums)) == 3
    assert all(r["grad_norm"] > 0.01 for r in run["metrics"])
    drifts = [r["train_rollout_logprob_abs_diff_max"] for r in run["metrics"]]
    assert drifts == [0.0] * 3, kind_of_cpu()


# All of them, some at a time: of a product that is 1 and a mask that keeps all, no part differs.
_CORRECTIONS = (
    "mask_geometric(0.999, 1.001), tis(2.0), veto",
    "tis(auto, ess=0.9), mask_sequence, mask_k3",
    "seq_tis, icepop, opsm",
)


@pytest.mark.slow
@pytest.mark.parametrize("correction", _CORRECTIONS)
def test_any_correction_is_none(records, correction):
    """Every weight is exactly 1 and every token is kept: the run is that without a correction."""
    plain, corrected = records(correction="none"), records(correction=correction)
    _assert_learns(plain)
    _assert_same_run(plain, corrected)
    for record in corrected["metrics"]:
        own = {k: v for k, v in record.items() if k.startswith("correction/")}
        assert own and record["kept_tokens_frac"] == 1.0
        for name, value in own.items():
            assert value == (0.0 if name.endswith("_dropped") else 1.0), name


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo", "reinforce"])
def test_losses_are_one_algorithm(records, loss):
    """With one update per rollout the ratio is exactly 1, and the gradients are the same bits."""
    ppo, other = records(correction="none"), records(correction="none", loss=loss)
    _assert_learns(ppo)
    _assert_same_run(ppo, other)
    for record in other["metrics"]:
        assert record["ratio_min"] == record["ratio_max"] == record["ratio_mean"] == 1.0
        assert record["clipfrac_low"] == record["clipfrac_high"] == 0.0


@pytest.mark.slow
def test_later_updates_are_off_policy_and_apart(records):
    """Of two passes over a rollout the first has ratio 1; the second, and it alone, has moved."""
    run = records(correction="none", epochs=2)
    for record in run["metrics"]:
        assert record["ratio_mean"] == 1.0
        assert record["ratio_min/2"] < 1.0 < record["ratio_max/2"]
    other = records(correction="none", epochs=2, loss="gspo")
    assert run["metrics"][0]["checksum"] == other["metrics"][0]["checksum"]
    assert run["metrics"][2]["checksum"] != other["metrics"][2]["checksum"]


@pytest.mark.slow
def test_divergence_from_the_start_is_exactly_zero_at_step_1(records):
    """And not under another recipe: what others see as an unexplained initial divergence."""
    own = records(correction="none", kl_coef=0.1)["metrics"]
    assert own[0]["kl_ref"] == 0.0 and own[2]["kl_ref"] > 0.0
    other = records(correction="none", kl_coef=0.1, reference="bf16")["metrics"]
    assert other[0]["kl_ref"] > 1e-6
