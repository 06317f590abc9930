"""Cells of RL runs that nobody ran: the figures are made up."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np

from fp8rl_jax.study import subjects
from fp8rl_jax.study.measures import CAPS, POSITIONS, PROBABILITIES, SUMS
from fp8rl_jax.study.runs import Arms


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


def run_cell(
    steps: int = 4, *, bf16: float = 0.5, own: float = 0.5, error: float = 0.004, **series
) -> dict[str, Any]:
    """A cell of `Arms.run`: curves by name, or a constant; and two sampled accuracies with a
    standard error."""
    curves = {"reward_mean": 0.5, "train_rollout_logprob_abs_diff": 0.01, **series}
    return {
        "numbers": {
            "series": {
                name: np.broadcast_to(np.asarray(curve, float), steps).tolist()
                for name, curve in curves.items()
            },
            "bf16": {"accuracy_sampled": bf16, "accuracy_sampled_se": error},
            "own": {"accuracy_sampled": own, "accuracy_sampled_se": error},
        },
        "commit": "c",
        "cpu": "c",
        "versions": {"jax": "0"},
    }


def arm_config(fields: dict[str, Any]):
    """The configuration that `Arms` trains for an arm of the quick model, and what it resolves to;
    the start's weights are left out."""
    from fp8rl_jax.config import default_config
    from fp8rl_jax.config.resolve import resolve_config

    config = subjects.quick_config()
    config.model.checkpoint = "start"
    runtime = types.SimpleNamespace(config=config, data_digest="")
    subject = subjects.Subject("two_layers", runtime, dict, trained=False, released=True)
    arms = Arms.__new__(Arms)
    arms._subject = subject
    found = arms._config({"run.steps": 4, **fields})
    found.model = default_config().model
    return found, resolve_config(found)


def fake_subject(seed: int) -> Any:
    """What the studies of RL runs ask of a subject."""
    config = subjects.quick_config(seed)
    return types.SimpleNamespace(
        name="two_layers",
        seed=seed,
        identity={"seed": seed},
        model=types.SimpleNamespace(num_experts=0),
        runtime=types.SimpleNamespace(config=config, data_digest=""),
    )


@dataclasses.dataclass
class FakeArms:
    """In the place of `Arms`: `cell(seed, name)` is made up, and `asked` holds what was wanted."""

    cell: Any
    asked: dict[tuple[int, str], dict] = dataclasses.field(default_factory=dict)

    def __call__(self, subject, common, out, cells, note):
        def run(study: str, name: str, fields, after=None):
            self.asked[subject.seed, name] = {**common, **fields}
            return self.cell(subject.seed, name)

        return types.SimpleNamespace(run=run)
