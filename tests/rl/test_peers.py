"""The algorithms of `rl/` against numbers that verl's and NVIDIA NeMo RL's own functions returned.

`peers.npz` holds arrays, no code. Its header, a JSON string, names repositories, commits, the
version of torch, and each case's function and arguments. To make it again, check out the commits,
import the functions with empty stand-ins for the modules that they do not need (ray, tensordict),
call them in float64 on the arrays `input:NAME`, and store what they return, and its gradient with
respect to `logp`, as `CASE:OUTPUT`. The inputs are three batches of `batch_of` with the header's
seeds; rewards and `old - rollout` are those of `step_of`, `reference` is `logp` plus numbers of the
same lattice, and `above` is `old` plus the absolute value of `old - rollout`.

Ours is float32 and agrees to 1e-6, or to 1e-7 where a sum cancels. Comments say what is defined
otherwise.
"""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.config import default_config
from fp8rl_jax.rl import Outcomes, algorithm_of, prepare
from fp8rl_jax.rl.aggregation import AGGREGATIONS
from fp8rl_jax.rl.kl import ESTIMATORS
from fp8rl_jax.rl.mismatch import mismatch_metrics

STORED = dict(np.load(pathlib.Path(__file__).with_name("peers.npz")))
HEADER = json.loads(str(STORED["header"]))
INPUTS = {name.removeprefix("input:"): STORED[name] for name in STORED if "input:" in name}
SLOTS = INPUTS["mask"].shape[-1]


class Case(NamedTuple):
    """Our fields of section `algo`, and how the numbers differ.

    factor: (batch, keep) -> what ours are multiplied by.
    old, rollout: the inputs with these log-probabilities.
    """

    fields: dict
    factor: Callable = lambda batch, keep: 1.0
    old: str = "old"
    rollout: str = "rollout"


def _of_group_deviation(batch, keep):
    """Theirs is the sample deviation + 1e-6, ours the population's + 1e-4."""
    rewards = batch["rewards"]
    factor = (rewards.std(1) + 1e-4) / (rewards.std(1, ddof=1) + 1e-6)
    return np.repeat(factor, rewards.shape[1])[:, None]


def _of_token_deviation(batch, keep):
    """verl's is the sample deviation, ours the population's."""
    return np.sqrt(1 - 1 / batch["mask"].sum())


def _of_empty_rows(batch, keep):
    """verl's mean over responses counts those without a token in this loss."""
    return batch["mask"].any(1).mean()


def _of_dropped_rows(batch, keep):
    """NeMo RL drops a response by a weight of 0, so it counts in the mean."""
    return keep.any(1).sum() / batch["mask"].any(1).sum()


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
ROWS = {"loss_aggregation": "seq_mean_token_mean"}
GSPO = {**CLIP, **ROWS, "loss": "gspo"}
CISPO = {"loss": "cispo", "clip_low": 0.3, "clip_high": 0.7}
RAW = {"baseline": "none", "scale": "none"}
PLUS = {"baseline": "none", "scale": "token_std"}


def _corrected(correction, **fields):
    return {**CLIP, "correction": correction, **fields}


CASES = {
    # verl always clips dually, by default at 3; to leave that out, its bound was 1e9.
    "verl/vanilla": Case(CLIP),
    "verl/vanilla, dual": Case({**CLIP, **ROWS, "loss": "ppo(dual_clip=1.9)"}),
    "verl/vanilla, default": Case({"loss": "ppo(dual_clip=3.0)"}),
    "verl/vanilla, token TIS": Case(_corrected("tis(2.0)")),
    "verl/vanilla, sequence TIS, mean mask": Case(
        _corrected("seq_tis(5.0), mask_geometric(0.8, 1.25)", **ROWS)
    ),
    "verl/gspo": Case(GSPO),
    "verl/gspo, narrow": Case({**GSPO, "clip_low": 3e-4, "clip_high": 4e-4}),
    "verl/cispo": Case(CISPO),
    "verl/sapo": Case({"loss": "sapo(1.0, 1.05)", **ROWS}),
    "verl/geo_mean": Case(
        {"loss": "gmpo", "clip_low": 0.3, "clip_high": 0.2, **ROWS}, _of_empty_rows
    ),
    "verl/reinforce": Case({"loss": "reinforce", "loss_aggregation": "seq_mean_token_sum"}),
    "nemo_rl/clipped": Case(CLIP),
    "nemo_rl/clipped, sequence mean": Case({**CLIP, **ROWS}),
    "nemo_rl/clipped, dual": Case({**CLIP, "loss": "ppo(dual_clip=1.9)"}),
    # Its gradient goes through the mean of log-ratios, ours token by token: the same where the
    # tokens of a response have one advantage and one weight.
    "nemo_rl/sequence ratio": Case(GSPO),
    "nemo_rl/sequence ratio, sequence TIS": Case({**GSPO, "correction": "seq_tis(5.0)"}),
    "nemo_rl/cispo": Case(CISPO),
    "nemo_rl/no ratio": Case({"loss": "reinforce", **ROWS}),
    "nemo_rl/ratio forced to 1": Case(CLIP, old="logp"),
    "nemo_rl/importance weights": Case(_corrected("tis(1e9)")),
    "nemo_rl/TIS": Case(_corrected("tis(2.0)")),
    "nemo_rl/TIS, floor": Case(_corrected("tis(2.0, 0.5)")),
    "nemo_rl/IcePop": Case(_corrected("icepop(0.5, 2.5)", **ROWS)),
    "nemo_rl/seq-mask-tis": Case(
        _corrected("mask_geometric(0.9, 1.2), tis(1e9)", **ROWS), _of_dropped_rows
    ),
    # NeMo RL multiplies k3 by exp(logp - constant), and that makes its gradient k2's.
    "nemo_rl/KL k3": Case({**CLIP, "kl_coef": 0.04, "kl_estimator": "k3+"}),
    **{
        f"verl/agg_loss, {name.replace('_', '-')}": Case({"loss_aggregation": name})
        for name in AGGREGATIONS
    },
    "verl/grpo": Case({}, _of_group_deviation),
    "verl/grpo, no std": Case({"scale": "none"}),
    "verl/rloo": Case({"baseline": "leave_one_out", "scale": "none"}),
    "verl/reinforce_plus_plus": Case(PLUS, _of_token_deviation),
    "verl/reinforce_plus_plus, KL": Case(
        {**PLUS, "kl_coef": 0.05, "kl_in": "reward"}, _of_token_deviation
    ),
    "verl/reinforce_plus_plus_baseline": Case({"scale": "token_std"}, _of_token_deviation),
    "nemo_rl/group mean, std": Case({}, _of_group_deviation),
    "nemo_rl/leave one out": Case({"baseline": "leave_one_out", "scale": "none"}),
    "nemo_rl/reinforce_plus_plus": Case(PLUS),
    "nemo_rl/reinforce_plus_plus, baseline": Case({"scale": "token_std"}),
    "nemo_rl/overlong": Case({**RAW, "overlong_buffer": 5, "overlong_penalty": 0.7}),
    "verl/weights, token TIS": Case(_corrected("tis(2.0)")),
    "verl/weights, sequence TIS": Case(_corrected("seq_tis(5.0)")),
    "verl/weights, IcePop": Case(_corrected("icepop(0.5, 2.5)")),
    # verl compares -D with its bounds (0.4 and 1.6, 0.6 and 1.05): so e^D with their reciprocals.
    "verl/mask, seq_sum_k1": Case(_corrected(f"mask_sequence({1 / 1.6}, {1 / 0.4})")),
    "verl/mask, seq_mean_k1": Case(_corrected(f"mask_geometric({1 / 1.05}, {1 / 0.6})")),
    "verl/mask, seq_mean_k3": Case(_corrected("mask_k3(0.3)")),
    "verl/mask, seq_mean_k1 and seq_mean_k3": Case(
        _corrected("mask_geometric(0.8, 1.25), mask_k3(0.35)")
    ),
    # It bounds D^2 / 2, so ratios on both sides of 1, veto those below: `above` has no others.
    "verl/mask, seq_max_k2": Case(_corrected("veto(0.25)"), rollout="above"),
    "verl/compute_offpolicy_metrics": Case({}),
    "verl/compute_is_metrics": Case({}),
    # Both clamp k3 to 10, ours has no such bound; no number here reaches it.
    **{
        f"{system}, {name}": Case({"kl_coef": 1.0, "kl_estimator": name})
        for system, names in (
            ("verl/kl_penalty", ESTIMATORS),
            ("nemo_rl/calculate_kl", ["k1", "k2", "k3"]),
        )
        for name in names
    },
}


@functools.cache
def _loss_of(**fields):
    """The learner's objective, of log-probabilities: value, statistics, gradient."""
    algorithm = _algorithm(fields)

    def total(logp, batch, of_token, weights, rollout_weights):
        counts = weights != 0
        each, stats = algorithm.loss(logp, batch["old"], of_token, counts)
        each = each * rollout_weights
        if algorithm.kl:
            each = each + algorithm.kl_coef * algorithm.kl(logp, batch["reference"])
        return jnp.where(counts, each * weights, 0.0).sum(), stats

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def _algorithm(fields):
    config = default_config()
    config.algo.update({"correction": "none"} | fields)
    if config.algo.loss_aggregation == "seq_mean_token_sum_norm":
        config.algo.loss_aggregation += f"(length={HEADER['length']})"
    return algorithm_of(config.algo, SLOTS, config.algo.correction)


def _ours(case: Case, batch: dict, wanted: set[str]) -> dict:
    """Each number of ours by their name for it."""
    algorithm = _algorithm(case.fields)
    batch = batch | {"old": batch[case.old], "rollout": batch[case.rollout]}
    mask = batch["mask"]
    prepared = prepare(
        algorithm,
        Outcomes(
            batch["rewards"],
            mask,
            np.ones(len(mask), bool),
            batch["old"],
            batch["rollout"],
            batch["reference"],
        ),
    )
    drift = mismatch_metrics(batch["old"], batch["rollout"], mask)
    factor = case.factor(batch, prepared.keep)
    weights = algorithm.aggregation(prepared.keep)
    found = {
        "advantages": prepared.advantages * factor,
        "weights": prepared.rollout_weights * mask,
        "keep": prepared.keep,
        "token_weights": weights,
        "token_mult_prob_error": drift["token_mult_prob_error"],
        "is_oob_ratio": drift["tis_clipfrac"],
        "sampling_importance_ratio": drift["tis_weight_mean"],
        "kl": drift["mismatch_k1"],
        "chi2_token": drift["chi2_token"],
        "rollout_is_eff_sample_size": drift["ess_ratio"],
    }
    found |= dict.fromkeys(["gen_kl_error", "k3_kl"], drift["mismatch_kl"])
    if "estimate" in wanted:
        found["estimate"], pull = jax.vjp(algorithm.kl, batch["logp"], batch["reference"])
        found["estimate_gradient"] = pull(jnp.ones(mask.shape))[0]
    if "value" in wanted:
        apart = ("correction", "loss_aggregation")
        loss = _loss_of(**{k: v for k, v in case.fields.items() if k not in apart})
        of_token = np.repeat(batch["advantages"][:, None], SLOTS, axis=1)
        (value, stats), gradient = loss(
            batch["logp"], batch, of_token, weights, prepared.rollout_weights
        )
        stats = {name: stats[name].sum() / mask.sum() for name in stats}
        found["clipped"] = stats["clipped_low"] + stats["clipped_high"]
        found["clipped_dual"] = stats.get("clipped_dual", 0.0)
        found |= {"value": value * factor, "gradient": gradient * factor}
    return found


def test_every_case_is_compared():
    assert set(CASES) == set(HEADER["cases"])


@pytest.mark.parametrize("case", CASES)
def test_case(case):
    theirs = {
        name.partition(":")[2]: STORED[name] for name in STORED if name.startswith(f"{case}:")
    }
    assert theirs
    for index in range(len(INPUTS["mask"])):
        batch = {name: INPUTS[name][index] for name in INPUTS}
        found = _ours(CASES[case], batch, set(theirs))
        for name, wanted in theirs.items():
            np.testing.assert_allclose(found[name], wanted[index], 1e-6, 1e-7, err_msg=name)
