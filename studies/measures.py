"""Measures how two scores of the same tokens differ, as sums over the tokens of each question.

A cluster is a question: its samples share a prompt, and a sample's tokens depend on each other.
Everything is summed over the tokens of a cluster, so means and ratios of any set of clusters follow
from the sums, and intervals from drawing clusters.

Entropy is a confounder: a policy that is sure of its tokens has small differences of their
log-probability, with any arithmetic. Models are therefore compared by the mean square of the
logits' difference, and by |D| among tokens of similar probability. Training that sharpens a policy
may make its logits and their errors larger; so policies before and after RL are compared by that
mean square over the mean square of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from studies.cells import rounded
from studies.hypotheses import Hypothesis
from studies.scoring import Scores
from studies.statistics import Estimate, cluster_bootstrap, clustered_mean

CAPS = (1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)  # bounds C of clip fractions
PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)  # edges of bins of view a's probability
POSITIONS = 8  # bins over the slots of a response
# Sums over tokens: |D|, e^|D| - 1, k3 = e^D - D - 1, KL, variance of the logits' difference,
# variance of a's logits, entropy of a, whether the log-probabilities differ in a bit.
SUMS = ("abs", "expm1", "k3", "kl", "square", "size", "entropy", "unequal")


class Pair:
    """Sums over tokens of two views a and b of one set of samples, for each of Q clusters.

    Attributes:
      tokens: (Q,) number of tokens.
      sums: {name of SUMS: (Q,)}; NaN where an older cell has none.
      most: the largest |D|.
      tail: (Q, C) number of tokens whose e^D is above C or below 1 / C, for each of CAPS.
      binned: {'position' | 'probability': (Q, 2, bins)}, number of tokens and sum of |D|.
      sequence: (Q, 3) number of samples, and sum and sum of squares of a sample's total D.
      prefix: (Q, 2, P) number of samples with at least 1, 2, 4, ... tokens, and the sum of squares
        of the total D of that many first tokens.
      flips: (Q, S) number of tokens whose experts differ in layer s; (Q, 0) for a dense model.
      inputs: (Q,) number of tokens that went through the routers.
    """

    def __init__(self, numbers: dict[str, Any]):
        """Reads `numbers`, a result of `measure`."""
        missing = [float("nan")] * len(numbers["tokens"])
        self.sums = {name: np.array(numbers["sums"].get(name, missing)) for name in SUMS}
        self.binned = {name: np.array(x) for name, x in numbers["binned"].items()}
        self.most = numbers["most"]
        self.tokens, self.tail = np.array(numbers["tokens"]), np.array(numbers["tail"])
        self.sequence, self.prefix = np.array(numbers["sequence"]), np.array(numbers["prefix"])
        self.flips, self.inputs = np.array(numbers["flips"]), np.array(numbers["inputs"])

    def mean(self, name: str) -> Estimate:
        """Returns the mean over tokens of one of SUMS."""
        return clustered_mean(self.sums[name], self.tokens)

    def token_mult_prob_error(self) -> Estimate:
        """Returns the mean of e^|D|."""
        return Estimate(*(1 + x for x in self.mean("expm1")))

    def clip_fraction(self, cap: float) -> Estimate:
        """Returns the share of tokens beyond one of CAPS."""
        return clustered_mean(self.tail[:, CAPS.index(cap)], self.tokens)

    def clip_less(self, other: Pair, cap: float) -> Estimate:
        """Returns `clip_fraction` minus that of another pair of the same samples."""
        place = CAPS.index(cap)
        clusters = np.stack([self.tail[:, place], other.tail[:, place], self.tokens], axis=1)
        return cluster_bootstrap(clusters, lambda m: (m[:, 0] - m[:, 1]) / m[:, 2])

    def rms_logits(self) -> Estimate:
        """Returns the root mean square of the logits' difference."""
        clusters = np.stack([self.sums["square"], self.tokens], axis=1)
        return cluster_bootstrap(clusters, lambda m: np.sqrt(m[:, 0] / m[:, 1]))

    def relative_rms(self) -> float:
        """Returns the RMS of the logits' difference over that of a's logits."""
        return float(np.sqrt(self.sums["square"].sum() / self.sums["size"].sum()))

    def flip_share(self) -> Estimate:
        """Returns the share of tokens whose experts differ, as mean over layers."""
        layers = max(self.flips.shape[1], 1)
        return clustered_mean(self.flips.sum(axis=1) / layers, self.inputs)

    def summary(self) -> dict[str, Any]:
        """Returns all figures of the pair, most of them with their intervals."""
        found = {
            "tokens": int(self.tokens.sum()),
            "mean_abs": self.mean("abs"),
            "max_abs": self.most,
            "token_mult_prob_error": self.token_mult_prob_error(),
            "k3": self.mean("k3"),
            "kl": self.mean("kl"),
            "rms_logits": self.rms_logits(),
            "entropy": self.mean("entropy"),
            "unequal": self.mean("unequal"),
            "clip_fraction": {str(cap): self.clip_fraction(cap) for cap in CAPS},
            "sequence_mean": float(self.sequence[:, 1].sum() / self.sequence[:, 0].sum()),
            "sequence_rms": float(np.sqrt(self.sequence[:, 2].sum() / self.sequence[:, 0].sum())),
            "by": {
                # Mean |D| of each bin; None for an empty one.
                name: [float(total / n) if n else None for n, total in x.sum(axis=0).T]
                for name, x in self.binned.items()
            },
            "prefix_rms": _prefix_rms(self.prefix),
        }
        if self.flips.shape[1]:
            found["flips"] = self.flip_share()
            found["flips_by_layer"] = rounded(self.flips.sum(axis=0) / self.inputs.sum())
        return found


def pooled(pairs: Sequence[Pair]) -> Pair:
    """Joins the clusters of several pairs in one pair."""
    most = max(pair.most for pair in pairs)
    sums = [{name: x for name, x in vars(pair).items() if name != "most"} for pair in pairs]
    return Pair({**jax.tree.map(lambda *x: np.concatenate(x), *sums), "most": most})


def read_pairs(scores: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, list[Pair]]:
    """Returns {name: its pair in the numbers of each `Scoring.cell`}."""
    return {name: [Pair(each["pairs"][name]) for each in scores] for name in names}


def summaries(pairs: dict[str, list[Pair]]) -> dict[str, dict[str, Any]]:
    """Returns 'pairs', {name: each seed's summary}, and 'pooled', {name: summary of all seeds}."""
    return {
        "pairs": {name: [pair.summary() for pair in each] for name, each in pairs.items()},
        "pooled": {name: pooled(each).summary() for name, each in pairs.items()},
    }


def rms_ratio(one: Pair, *others: Pair) -> Estimate:
    """Returns the RMS of the logits' difference of `one` over the root of the sum of the mean
    squares of `others`. All pairs have the same questions, which are drawn together."""
    sums = [np.stack([x.sums["square"], x.tokens], axis=1) for x in (one, *others)]

    def statistic(means: np.ndarray) -> np.ndarray:
        squares = means[:, :, 0] / means[:, :, 1]
        return np.sqrt(squares[:, 0] / squares[:, 1:].sum(axis=1))

    return cluster_bootstrap(np.stack(sums, axis=1), statistic)


def judge_pairs(
    hypothesis: Hypothesis,
    figure: Callable[..., Estimate],
    *sides: Sequence[Pair],
    unresolved: str = "",
) -> dict[str, Any]:
    """Judges a figure of the clusters of all seeds together, with which each seed must agree.

    Args:
      hypothesis: hypothesis about the figure.
      figure: function of one pair per side that returns an estimate.
      sides: for each side, a pair for each seed.
      unresolved: as for `Hypothesis.judge`.
    """
    seeds = [figure(*pairs).value for pairs in zip(*sides, strict=True)]
    return hypothesis.judge(figure(*map(pooled, sides)), None, seeds, unresolved)


def _prefix_rms(prefix: np.ndarray) -> list[list[float]]:
    """Returns [tokens, RMS of their total D] for each length of prefix that some sample has."""
    samples, squares = prefix.sum(axis=0)
    return [
        [float(1 << i), float(np.sqrt(s / n))]
        for i, (n, s) in enumerate(zip(samples, squares, strict=True))
        if n
    ]


def measure(
    scores: Iterable[Scores],
    pairs: dict[str, tuple[str, str]],
    mask: np.ndarray,
    lengths: np.ndarray,
    group: int,
) -> dict[str, dict]:
    """Sums the differences of pairs of views, as JSON for `Pair`.

    Args:
      scores: scores of all samples, in parts.
      pairs: {name: (view a, view b)}.
      mask: (B, R) bool, whether it is a response token.
      lengths: (B,) number of tokens of prompt and response.
      group: number of samples of a question.
    """
    found: dict[str, list[dict]] = {name: [] for name in pairs}
    for part in scores:
        for name, views in pairs.items():
            found[name].append(_rows(part, *views, mask[part.rows] > 0, lengths[part.rows]))
    return {name: _clusters(parts, group) for name, parts in found.items()}


def _rows(part: Scores, a: str, b: str, mask: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Returns the sums of each row."""
    found = part.compare(a, b)
    d, rows, slots = found.difference, *mask.shape
    size = np.abs(d)
    values = {
        "abs": size,
        "expm1": np.expm1(size),
        "k3": np.expm1(d) - d,
        "kl": found.divergence,
        "square": found.square,
        "size": found.size,
        "entropy": part.entropy[a],
        "unequal": d != 0,
    }
    sums = {name: np.where(mask, x, 0.0).sum(axis=1) for name, x in values.items()}
    caps = np.log(CAPS)
    probability = np.exp(part.logprobs[a])
    bins = {
        "position": np.broadcast_to(np.arange(slots) * POSITIONS // slots, mask.shape),
        "probability": np.digitize(probability, PROBABILITIES[1:-1]),
    }
    counts = {"position": POSITIONS, "probability": len(PROBABILITIES) - 1}
    binned = {
        name: np.stack(
            [
                [(mask & (place == i)).sum(axis=1), np.where(mask & (place == i), size, 0).sum(1)]
                for i in range(counts[name])
            ]
        ).transpose(2, 1, 0)
        for name, place in bins.items()
    }
    total, running = d.sum(axis=1), np.cumsum(d, axis=1)
    tokens, prefixes = mask.sum(axis=1), [1 << i for i in range(slots.bit_length())]
    prefix = np.stack(
        [[tokens >= n, np.where(tokens >= n, running[:, n - 1] ** 2, 0)] for n in prefixes]
    ).transpose(2, 1, 0)
    flips = np.zeros((rows, 0))
    if found.flips is not None:
        real = np.arange(found.flips.shape[2]) < lengths[:, None]
        flips = (found.flips & real).sum(axis=2).T
    return {
        "tokens": tokens,
        "sums": sums,
        "most": float(size.max(initial=0.0)),
        "tail": ((size[:, :, None] > caps) & mask[:, :, None]).sum(axis=1),
        "binned": binned,
        "sequence": np.stack([np.ones(rows), total, total**2], axis=1),
        "prefix": prefix,
        "flips": flips,
        "inputs": lengths,
    }


def _clusters(parts: list[dict[str, Any]], group: int) -> dict[str, Any]:
    """Sums rows by questions, as JSON."""

    def join(*arrays: np.ndarray) -> Any:
        rows = np.concatenate(arrays)
        return rounded(rows.reshape(len(rows) // group, group, *rows.shape[1:]).sum(axis=1))

    most = max(part.pop("most") for part in parts)
    return {**jax.tree.map(join, *parts), "most": most}
