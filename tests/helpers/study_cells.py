"""Cells of RL runs that nobody ran: their figures are invented."""

from __future__ import annotations

import dataclasses
import pathlib
import types
from typing import Any

import numpy as np

from studies import frame, runs, subjects
from studies.cells import Cell
from studies.frame import Plan, Result, Size, Study
from studies.measures import CAPS, POSITIONS, PROBABILITIES, SUMS
from studies.progress import silent


def pair_numbers(error: float, size: float = 1.0) -> dict[str, Any]:
    """The numbers of `measures.Pair`: two questions, their logits of `size` and off by `error`."""
    tokens = np.array([40, 60])
    sums = {name: (0.01 * tokens).tolist() for name in SUMS}
    bins = {"position": POSITIONS, "probability": len(PROBABILITIES) - 1}
    binned = {name: np.ones((2, 2, count)) for name, count in bins.items()}
    binned["probability"][:, 0, 0] = 0  # an empty bin
    return {
        "sums": sums
        | {"square": (error**2 * tokens).tolist(), "size": (size**2 * tokens).tolist()},
        "binned": {name: values.tolist() for name, values in binned.items()},
        "most": 0.1,
        "tokens": tokens.tolist(),
        "tail": np.ones((2, len(CAPS))).tolist(),
        "sequence": np.ones((2, 3)).tolist(),
        "prefix": np.ones((2, 2, 3)).tolist(),
        "flips": np.zeros((2, 0)).tolist(),
        "inputs": tokens.tolist(),
    }


def run_numbers(
    steps: int = 4, *, bf16: float = 0.5, own: float = 0.5, error: float = 0.004, **series
) -> dict[str, Any]:
    """Numbers of a cell of `arm_cells`: curves by name, or a constant; and two sampled accuracies
    with a standard error."""
    curves = {"reward_mean": 0.5, "train_rollout_logprob_abs_diff": 0.01, **series}
    return {
        "series": {
            name: np.broadcast_to(np.asarray(curve, float), steps).tolist()
            for name, curve in curves.items()
        },
        "bf16": {"accuracy_sampled": bf16, "accuracy_sampled_se": error},
        "own": {"accuracy_sampled": own, "accuracy_sampled_se": error},
    }


def arm_config(fields: dict[str, Any]):
    """The configuration that an arm of the quick model is trained under, and what it resolves to;
    the start's weights are left out."""
    from fp8rl_jax.config import default_config
    from fp8rl_jax.config.resolve import resolve_config

    config = subjects.quick_config()
    config.model.checkpoint = "start"
    runtime = types.SimpleNamespace(config=config, data_digest="")
    subject = subjects.Subject("two_layers", runtime, dict, trained=False, released=True)
    found = runs.arm_config(subject, {"run.steps": 4, **fields}, pathlib.Path())
    found.model = default_config().model
    return found, resolve_config(found)


def fake_subject(seed: int = 0, name: str = "two_layers", layers: int = 2) -> Any:
    """What the studies ask of a subject."""
    config = subjects.quick_config(seed)
    return types.SimpleNamespace(
        name=name,
        seed=seed,
        identity={"seed": seed},
        model=types.SimpleNamespace(num_experts=0, num_hidden_layers=layers),
        runtime=types.SimpleNamespace(config=config, data_digest=""),
    )


def result_of(study: Study, numbers: list[dict[str, Any]], size: Size, note=silent) -> Result:
    """What study.json holds if each subject's cells have these numbers, {label: numbers}."""
    origin = {"commit": "c", "cpu": "c", "versions": {"jax": "0"}}
    made = types.SimpleNamespace(get=lambda _, cell: {"numbers": cell.measure(), **origin})

    def cells(subject, plan):
        return {
            label: Cell(label, {}, lambda found=found: found)
            for label, found in numbers[subject.seed].items()
        }

    fake = dataclasses.replace(study, cells=cells)
    plan = Plan([fake_subject(seed) for seed in range(len(numbers))], size, pathlib.Path(), note)
    return frame.run(fake, plan, made)
