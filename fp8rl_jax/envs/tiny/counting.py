"""Counting in steps: questions whose answers have long-tailed lengths.

``from 3 by 4 to 27`` is answered by ``3 7 11 15 19 23 27``. The number of terms is drawn from an
exponential distribution, so a few answers of a batch are many times as long as most.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

_MEAN = 32  # terms of an answer
_MOST = 120  # which have 512 characters at most
_ROWS = 20_000


def right_terms(response: str, answer: str) -> float:
    """Returns the share of the answer's terms that the response has before its first wrong one; 1
    only if it has no others."""
    terms = response.split()
    wanted = answer.split()
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(terms, wanted, strict=False))
    right = len(list(same))
    return right / max(len(wanted), len(terms)) if right < len(wanted) else len(wanted) / len(terms)


def questions() -> Iterator[dict[str, str]]:
    """Yields rows of distinct questions, 'question' and 'answer', always the same."""
    drawn = random.Random(0)
    seen: set[str] = set()
    while len(seen) < _ROWS:
        terms = min(1 + int(drawn.expovariate(1 / _MEAN)), _MOST)
        first = drawn.randrange(100)
        step = drawn.randrange(1, 10)
        numbers = range(first, first + terms * step, step)
        question = f"from {first} by {step} to {numbers[-1]}"
        if question not in seen:
            seen.add(question)
            yield {"question": question, "answer": " ".join(map(str, numbers))}
