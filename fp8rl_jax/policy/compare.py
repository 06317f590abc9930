"""Compares the accuracy of policies on the same questions with the same random bits: `fp8rl
compare`.

The first policy's configuration decides the questions, their reward, the environment and how
answers are drawn; each policy keeps its model, tokenizer, chat template and numerics. Answer s to
question q of every policy takes the same random numbers, so what differs is due to the policies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from scipy.stats import norm

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.policy.evaluate import evaluations
from fp8rl_jax.policy.load import Note
from fp8rl_jax.policy.source import directory_config, is_released

_DRAWS = 10_000
_LEVEL = 0.95
_POWER = 0.8


class Difference(NamedTuple):
    """How much more accurate a setting is than the first.

    Attributes:
      value: mean over seeds and questions.
      low, high: its interval of 95%.
      seeds: about how many pairs of runs show a difference as large in four of five cases; 0 if one
        pair, or no difference, tells nothing about that.
    """

    value: float
    low: float
    high: float
    seeds: int


def compare(
    settings: Sequence[Sequence[str]],
    fields: Mapping[str, Any],
    permitted: Collection[str],
    note: Note,
) -> list[dict[str, Any]]:
    """Evaluates policies and compares them with the first setting.

    Args:
      settings: for each setting the directories of its runs or released models, one for each seed,
        in the order of the seeds.
      fields: {name: value} of `eval` that are not those of the first policy.
      permitted: functions or modules that configurations may name (`run_config`).
      note: called with lines of progress.

    Returns:
      For each setting 'runs', 'questions', 'samples', 'accuracy' {'greedy': mean, 'sampled':
      mean}, and but for the first 'difference' {the same: a `Difference` as dict}.

    Raises:
      UserError: the settings have no equal numbers of runs, or a policy cannot be evaluated.
    """
    if len({len(runs) for runs in settings}) > 1:
        counts = ", ".join(str(len(runs)) for runs in settings)
        raise UserError(
            f"settings have {counts} runs: runs are compared in pairs, so name as many of each "
            "setting, separated by commas"
        )
    configs = [
        [directory_config(run, permitted, ("precision", "env")) for run in runs]
        for runs in settings
    ]
    first = configs[0][0]
    if is_released(first):
        raise UserError(f"{settings[0][0]} is no run, so it has no questions: name a run first")
    first.eval.update(fields)
    rows: list[dict[str, Any]] = []
    measured = []
    for runs, of_runs in zip(settings, configs, strict=True):
        rewards = np.stack([_rewards(config, first, note) for config in of_runs])
        means = {"greedy": rewards[..., 0], "sampled": rewards[..., 1:].mean(-1)}
        measured.append(means)
        row: dict[str, Any] = {"runs": [*runs], "questions": rewards.shape[1]}
        row["samples"] = rewards.shape[2] - 1
        row["accuracy"] = {kind: float(np.nanmean(values)) for kind, values in means.items()}
        if rows:
            row["difference"] = {
                kind: difference(values - measured[0][kind])._asdict()
                for kind, values in means.items()
            }
        rows.append(row)
    return rows


def _rewards(
    config: ml_collections.ConfigDict, first: ml_collections.ConfigDict, note: Note
) -> np.ndarray:
    """Returns the rewards of a policy's answers to the questions of `first`: (Q, 1 + samples), the
    first of each greedy."""
    for section in ("env", "eval", "rollout"):
        config[section] = first[section].copy_and_resolve_references()
    config.run.seed = first.run.seed
    _, found = evaluations(config, note, ("rl", 0))
    return np.concatenate([evaluation.rewards for evaluation in found])


def difference(gaps: np.ndarray) -> Difference:
    """Estimates a mean difference from those of pairs of runs at each question.

    Args:
      gaps: (S, Q); nan where an answer was not scored.

    Returns:
      The mean with percentiles of 10,000 draws, each of which draws both seeds and questions with
      replacement (the pigeonhole bootstrap: Owen, 2007); with one seed, of questions alone.
    """
    scored = ~np.isnan(gaps).any(axis=0)
    if not scored.any():
        raise UserError("no question was scored in every run: look at env.reward")
    gaps = gaps[:, scored]
    rng = np.random.default_rng(0)
    seeds, questions = (
        rng.multinomial(count, np.full(count, 1 / count), size=_DRAWS) / count
        for count in gaps.shape
    )
    drawn = ((seeds @ gaps) * questions).sum(axis=1)
    low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    of_seeds = gaps.mean(axis=1)
    value = float(of_seeds.mean())
    needed = 0
    if len(of_seeds) > 1 and value:
        quantiles = norm.ppf((1 + _LEVEL) / 2) + norm.ppf(_POWER)
        needed = max(math.ceil((quantiles * of_seeds.std(ddof=1) / value) ** 2), 2)
    return Difference(value, float(low), float(high), needed)
