"""A task with long answers: the running sums of sixteen digits (`env.task` of the ladder).

An answer has about fifty bytes and is a chain of easy steps; a small model learns it in minutes,
and its samples are long enough for a mismatch to add up.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

DIGITS = 16
_ROWS = 8192


def rows() -> Iterator[dict[str, str]]:
    """Yields questions such as '3 1 4 ...=' and answers such as '3 4 8 ...', always the same."""
    random_digits = random.Random(0)
    for _ in range(_ROWS):
        digits = random_digits.choices(range(10), k=DIGITS)
        sums = itertools.accumulate(digits)
        yield {"question": " ".join(map(str, digits)) + "=", "answer": " ".join(map(str, sums))}
