"""Hypotheses, written before a run, and their verdicts.

A hypothesis names a figure and the zone in which it must be. It is *supported* if the complete 95%
interval is in the zone and, if the hypothesis has a test, p is below 0.05; *not supported* if the
complete interval is outside; *not resolved* otherwise. With several seeds, scores have the interval
of the questions of all seeds together, and figures of RL runs Student's interval over seeds. If the
figures of single seeds are given, all must be on the same side; else the hypothesis is not
resolved. It is not resolved either if the study gives a reason, such as models that were trained
once: their samples say nothing about another training. If Student's interval is too wide, the
sentence says how many seeds would separate the figure from the criterion, with the same mean and
scatter over seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from studies.statistics import Estimate, Range, SeedMean, seed_mean, seeds_needed

SUPPORTED, NOT_SUPPORTED, NOT_RESOLVED = "supported", "not supported", "not resolved"
ANY = 1e-9  # the least difference: a zone from ANY on has every figure above 0
_SIGNIFICANT = 0.05
_MANY = 200  # seeds; a larger number only says that the mean is close to the criterion


class Zone(NamedTuple):
    """The range from `low` to `high`, both included; infinite where it has no such end."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.low == self.high:
            return f"exactly {self.low:.3g}"
        if math.isinf(self.high):
            return "above 0" if self.low == ANY else f"at least {self.low:.3g}"
        if math.isinf(self.low):
            return "below 0" if self.high == -ANY else f"at most {self.high:.3g}"
        return f"{self.low:.3g} to {self.high:.3g}"


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A sentence and its criterion.

    Attributes:
      name: name in study.json.
      text: the sentence.
      figure: description of the estimated figure, with its unit.
      zone: range in which the figure must be.
      test: name of the test whose p-value must be below 0.05 too; empty for none.
      least_seeds: number of seeds below which it is not resolved.
    """

    name: str
    text: str
    figure: str
    zone: Zone
    test: str = ""
    least_seeds: int = 1

    def filled(self, *names: str) -> Hypothesis:
        """Returns a copy with `names` filled into the braces of `figure` and added to `name`."""
        return dataclasses.replace(
            self, name="_".join([self.name, *names]), figure=self.figure.format(*names)
        )

    def judge(
        self,
        found: Estimate,
        p: float | None = None,
        seeds: Sequence[float] = (),
        unresolved: str = "",
    ) -> dict[str, Any]:
        """Returns the hypothesis' entry in study.json, with its verdict and the verdict's sentence.

        Args:
          found: the figure, with its interval.
          p: p-value of the test, for a hypothesis that has one; NaN if it needs more seeds.
          seeds: figure of each seed, if all must agree.
          unresolved: reason why no figure could decide; '' if one can.
        """
        assert (p is None) == (not self.test), "a p-value belongs to a test"
        significant = p is None or p < _SIGNIFICANT
        low, high = self.zone
        inside = [low <= seed <= high for seed in seeds]
        if len(seeds) < self.least_seeds > 1:
            unresolved = f"it needs {self.least_seeds} seeds, not {len(seeds)}"
        if unresolved:
            verdict = NOT_RESOLVED
        elif low <= found.low and found.high <= high and significant and all(inside):
            verdict = SUPPORTED
        elif (found.high < low or high < found.low) and not any(inside):
            verdict = NOT_SUPPORTED
        else:
            verdict = NOT_RESOLVED
        open_ = verdict == NOT_RESOLVED and not unresolved
        return {
            "name": self.name,
            "text": self.text,
            "figure": self.figure,
            "low": _finite(low),
            "high": _finite(high),
            "test": self.test,
            "least_seeds": self.least_seeds,
            "verdict": verdict,
            "estimate": {name: _finite(x) for name, x in found._asdict().items()},
            "seeds": [_finite(x) for x in seeds],
            "p": None if p is None else _finite(p),
            "sentence": self._sentence(verdict, found, p, seeds, unresolved)
            + (self._missing(found) if open_ else ""),
        }

    def judge_seeds(
        self,
        values: np.ndarray,
        p: float | None = None,
        unresolved: str = "",
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> dict[str, Any]:
        """Judges a mean over seeds, all of which must agree.

        Args:
          values: (S,) figure of each seed.
          p, unresolved: as for `judge`.
          within: as for `seed_mean`.
        """
        return self.judge(seed_mean(values, within=within), p, values.tolist(), unresolved)

    def _sentence(
        self, verdict: str, found: Estimate, p: float | None, seeds, unresolved: str
    ) -> str:
        test = ""
        if p is not None:
            test = f"; {self.test}: {f'p = {p:.2g}' if math.isfinite(p) else 'needs two seeds'}"
        each = f"; seeds {', '.join(f'{x:.3g}' for x in seeds)}" if seeds else ""
        interval = "no interval from one value"
        if math.isfinite(found.low):
            kind = "range" if isinstance(found, Range) else "95% interval"
            interval = f"{kind} {found.low:.3g} to {found.high:.3g}"
        reason = f" ({unresolved})" if unresolved else ""
        figure = self.figure[0].upper() + self.figure[1:]
        return (
            f"{self.text}: **{verdict}**{reason}. {figure}: "
            f"{found.value:.3g}, {interval}{each}; the criterion was {self.zone}{test}."
        )

    def _missing(self, found: Estimate) -> str:
        """Returns a sentence on how many seeds would decide; '' if more seeds would not help."""
        inside = [end for end in self.zone if found.low < end < found.high]
        distance = min((abs(found.value - end) for end in inside), default=0.0)
        if not isinstance(found, SeedMean) or len(found.values) < 2 or distance == 0:
            return ""
        needed = max(seeds_needed(found.values, distance, found.least), len(found.values) + 1)
        count = f"About {needed}" if needed <= _MANY else f"More than {_MANY}"
        return f" {count} seeds would tell, if mean and scatter stayed as they are."


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
