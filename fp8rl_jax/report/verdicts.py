"""Reads the verdicts of drift analyses of a run's steps from its drift.json."""

from __future__ import annotations

import pathlib

from fp8rl_jax.base.json_file import read_json

NAME = "drift.json"
LONGEST = 100_000_000  # most bytes of drift.json


def step_verdicts(directory: pathlib.Path) -> list[dict]:
    """Returns the verdicts on a run's steps, in order: dicts of step, drift, culprit, sentence and
    advice; [] if no drift.json can be read."""
    try:
        result = read_json(directory / NAME, LONGEST)
        texts = ("culprit", "sentence", "advice")
        rows = list(result.get("earlier", []))
        if "step" in result:
            verdict = {name: result["verdict"][name] for name in texts}
            rows.append({"step": result["step"], "drift": result["drift"], **verdict})
        if not all(isinstance(row[name], str) for row in rows for name in texts):
            return []
        numbers = ({"step": int(row["step"]), "drift": float(row["drift"])} for row in rows)
        rows = [row | number for row, number in zip(rows, numbers, strict=True)]
        return sorted(rows, key=lambda row: row["step"])
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return []
