"""How long an analysis may take."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Budget:
    """A time until which parts of an analysis may begin; without end by default.

    A part, such as compiling and running a program, cannot be interrupted: it is begun if one that
    takes as long as the longest of its kind so far would end in time.

    Attributes:
      ends: a time of `clock`, in seconds.
      clock: of the time that passes.
    """

    ends: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def allows(self, seconds: float) -> bool:
        """Whether what takes so many seconds would end in time."""
        return self.clock() + seconds <= self.ends


NO_END = Budget()


def budget_of(seconds: float, clock: Callable[[], float] = time.monotonic) -> Budget:
    """The budget of so many seconds from now on."""
    return Budget(clock() + seconds, clock)
