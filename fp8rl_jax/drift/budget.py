"""The time limit of an analysis."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Budget:
    """A deadline; the default never ends.

    A part of an analysis (compiling and running a program) cannot be interrupted, so it begins only
    if it would end in time, assuming that it takes as long as the longest similar part so far.

    Attributes:
      ends: the deadline, in seconds of `clock`.
      clock: function that returns the time in seconds.
    """

    ends: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def allows(self, seconds: float) -> bool:
        """Returns whether a part of this many seconds would end in time."""
        return self.clock() + seconds <= self.ends


NO_END = Budget()
