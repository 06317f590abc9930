"""Hypotheses, written before a run, and their verdicts.

A hypothesis names a figure and the zone in which it must lie. It is *supported* if the whole 95%
interval lies there and, where it has a test of its own, p is below 0.05; *not supported* if the
whole interval lies outside; *not resolved* otherwise. Of several seeds the interval is that of all
their sequences together, or of a figure of RL runs Student's over seeds; and each seed's own figure
must agree where they are given: one on the other side leaves the hypothesis not resolved. So does
a reason that the study gives, such as models that were trained once: their samples say nothing
about another training. Where Student's interval is too wide, the sentence says with how many seeds
the criterion would be told from the figure, if that and the seeds' scatter stayed as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fp8rl_jax.study.statistics import Estimate, Range, SeedMean, seeds_needed

SUPPORTED, NOT_SUPPORTED, NOT_RESOLVED = "supported", "not supported", "not resolved"
ANY = 1e-9  # the end of a zone that holds every figure above 0; -ANY of those below
_SIGNIFICANT = 0.05
_MANY = 200  # seeds; beyond, their number says only that the mean lies on the criterion


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A sentence and its criterion.

    Attributes:
      name: in study.json.
      text: the sentence.
      figure: what is estimated, with its unit.
      low, high: the zone; infinite where it has no such end.
      test: the name of the test whose p-value must be below 0.05 too; empty for none.
      least_seeds: with fewer seeds it is not resolved.
    """

    name: str
    text: str
    figure: str
    low: float = -math.inf
    high: float = math.inf
    test: str = ""
    least_seeds: int = 1

    def filled(self, *names: str) -> Hypothesis:
        """With names in the place of the braces in `figure`; they are added to its own name."""
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
        """What study.json says of it, the verdict's sentence included.

        Args:
          found: the figure.
          p: of the test, for a hypothesis that has one; NaN where it needs more seeds.
          seeds: the figure of each seed, where there are several.
          unresolved: why the figure cannot decide, whatever it is.
        """
        assert (p is None) == (not self.test), "a p-value belongs to a test"
        significant = p is None or p < _SIGNIFICANT
        inside = [self.low <= seed <= self.high for seed in seeds]
        if len(seeds) < self.least_seeds > 1:
            unresolved = f"it needs {self.least_seeds} seeds, not {len(seeds)}"
        if unresolved:
            verdict = NOT_RESOLVED
        elif self.low <= found.low and found.high <= self.high and significant and all(inside):
            verdict = SUPPORTED
        elif (found.high < self.low or self.high < found.low) and not any(inside):
            verdict = NOT_SUPPORTED
        else:
            verdict = NOT_RESOLVED
        open_ = verdict == NOT_RESOLVED and not unresolved
        return {
            **dataclasses.asdict(self),
            "low": _finite(self.low),
            "high": _finite(self.high),
            "verdict": verdict,
            "estimate": {name: _finite(x) for name, x in found._asdict().items()},
            "seeds": [_finite(x) for x in seeds],
            "p": None if p is None else _finite(p),
            "sentence": self._sentence(verdict, found, p, seeds, unresolved)
            + (self._missing(found) if open_ else ""),
        }

    def _zone(self) -> str:
        if self.low == self.high:
            return f"exactly {self.low:.3g}"
        if math.isinf(self.high):
            return "above 0" if self.low == ANY else f"at least {self.low:.3g}"
        if math.isinf(self.low):
            return "below 0" if self.high == -ANY else f"at most {self.high:.3g}"
        return f"{self.low:.3g} to {self.high:.3g}"

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
            f"{found.value:.3g}, {interval}{each}; the criterion was {self._zone()}{test}."
        )

    def _missing(self, found: Estimate) -> str:
        """How many seeds would decide; empty if that is not what is missing."""
        between = [end for end in (self.low, self.high) if found.low < end < found.high]
        distance = min((abs(found.value - end) for end in between), default=0.0)
        if not isinstance(found, SeedMean) or len(found.values) < 2 or distance == 0:
            return ""
        needed = max(seeds_needed(found.values, distance, found.least), len(found.values) + 1)
        count = f"About {needed}" if needed <= _MANY else f"More than {_MANY}"
        return f" {count} seeds would tell, if mean and scatter stayed as they are."


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
