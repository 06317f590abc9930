"""Writes word problems with one-digit numbers: `python docs/scripts/word_problems.py DIR`.

`train.jsonl` has 512 of them and `test.jsonl` 64 others, in rows of a question and an answer.
"""

from __future__ import annotations

import itertools
import json
import operator
import pathlib
import random
import sys

_COUNTS = {"train": 512, "test": 64}
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps")
_FORMS = {
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?": (
        operator.add
    ),
    "{name} has {a} {things} and gives away {b}. How many {things} are left?": operator.sub,
    "A box holds {a} {things}. {name} has {b} boxes. How many {things} does {name} have?": (
        operator.mul
    ),
    "{name} and a friend share {a} {things}. The friend takes {b}. "
    "How many {things} does {name} get?": operator.sub,
}


def problems() -> list[dict[str, str]]:
    """Every problem, in a fixed random order."""
    numbers = [(a, b) for a in range(2, 10) for b in range(2, a)]
    rows = []
    for (form, result), name, things, (a, b) in itertools.product(
        _FORMS.items(), _NAMES, _THINGS, numbers
    ):
        question = form.format(name=name, things=things, a=a, b=b)
        rows.append({"question": question, "answer": str(result(a, b))})
    random.Random(0).shuffle(rows)
    return rows


def main(directory: str) -> None:
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    rows = iter(problems())
    for split, count in _COUNTS.items():
        lines = (json.dumps(row) for row in itertools.islice(rows, count))
        (path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        print(path / f"{split}.jsonl")


if __name__ == "__main__":
    main(*sys.argv[1:])
