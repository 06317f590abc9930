"""Hypotheses, written before a run, and their verdicts.

A hypothesis names a figure and the zone in which it must lie. It is *supported* if the whole 95%
interval lies there and, where it has a test of its own, p is below 0.05; *not supported* if the
whole interval lies outside; *not resolved* otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fp8rl_jax.study.statistics import Estimate

SUPPORTED, NOT_SUPPORTED, NOT_RESOLVED = "supported", "not supported", "not resolved"
_SIGNIFICANT = 0.05


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A sentence and its criterion.

    Attributes:
      name: in study.json.
      text: the sentence.
      figure: what is estimated, with its unit.
      low, high: the zone.
      test: the name of the test whose p-value must be below 0.05 too; empty for none.
    """

    name: str
    text: str
    figure: str
    low: float
    high: float
    test: str = ""

    def judge(self, found: Estimate, p: float | None = None) -> dict[str, Any]:
        """What study.json says of it, the verdict's sentence included.

        Args:
          found: the figure.
          p: of the test, for a hypothesis that has one.
        """
        assert (p is None) == (not self.test), "a p-value belongs to a test"
        significant = p is None or p < _SIGNIFICANT
        if self.low <= found.low and found.high <= self.high and significant:
            verdict = SUPPORTED
        elif found.high < self.low or self.high < found.low:
            verdict = NOT_SUPPORTED
        else:
            verdict = NOT_RESOLVED
        return {
            **dataclasses.asdict(self),
            "verdict": verdict,
            "estimate": found._asdict(),
            "p": p,
            "sentence": self._sentence(verdict, found, p),
        }

    def _sentence(self, verdict: str, found: Estimate, p: float | None) -> str:
        test = "" if p is None else f"; {self.test}: p = {p:.2g}"
        return (
            f"{self.text}: **{verdict}**. {self.figure[0].upper()}{self.figure[1:]}: "
            f"{found.value:.3g}, 95% interval {found.low:.3g} to {found.high:.3g}; the criterion "
            f"was {self.low:.3g} to {self.high:.3g}{test}."
        )
