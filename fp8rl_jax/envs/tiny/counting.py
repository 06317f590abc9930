"""Counting in steps: questions whose answers have long-tailed lengths.

``from 3 by 4 to 27`` is answered by ``3 7 11 15 19 23 27``. The number of terms is drawn from an
exponential distribution, so a few answers of a batch are many times as long as most.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

_MEAN, _MOST = 32, 120  # terms of an answer; the most have 512 characters at most
_ROWS = 20_000


def right_terms(response: str, answer: str) -> float:
    """Returns the share of the answer's terms that the response has before its first wrong one; 1
    only if it has no others."""
    found, wanted = response.split(), answer.split()
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(found, wanted, strict=False))
    right = len(list(same))
    return right / max(len(wanted), len(found)) if right < len(wanted) else len(wanted) / len(found)


def questions() -> Iterator[dict[str, str]]:
    """Yields rows of distinct questions, 'question' and 'answer', always the same."""
    drawn, seen = random.Random(0), set[str]()
    while len(seen) < _ROWS:
        terms = min(1 + int(drawn.expovariate(1 / _MEAN)), _MOST)
        first, step = drawn.randrange(100), drawn.randrange(1, 10)
        numbers = range(first, first + terms * step, step)
        question = f"from {first} by {step} to {numbers[-1]}"
        if question not in seen:
            seen.add(question)
            yield {"question": question, "answer": " ".join(map(str, numbers))}
