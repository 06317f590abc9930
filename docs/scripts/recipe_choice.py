"""Prints the memory and speed columns of the table of docs/recipes.md: recipes for Qwen3-8B.

    JAX_PLATFORMS=cpu python docs/scripts/recipe_choice.py

Counted from shapes: the sampler's weights and a token of the KV cache. Predicted by `fp8rl plan`'s
formulas, not measured: decode steps of 64 sequences of 2,304 keys on one H100, and a train step of
configs/qwen3_8b.py on eight, nothing overlapping. Accuracy: `python -m studies recipes`.
"""

from __future__ import annotations

import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tests" / "helpers"))

from planned import mesh_of  # noqa: E402

from fp8rl_jax.config import load_config  # noqa: E402
from fp8rl_jax.models import PAGE  # noqa: E402
from fp8rl_jax.plan.bytes import page_bytes, weight_bytes, weight_shapes  # noqa: E402
from fp8rl_jax.plan.gpus import GPUS  # noqa: E402
from fp8rl_jax.plan.learner import plan_learner  # noqa: E402
from fp8rl_jax.plan.planned import read_planned  # noqa: E402
from fp8rl_jax.plan.times import decode_seconds, step_cost  # noqa: E402

SEQUENCES, KEYS, GPU = 64, 2304, GPUS["h100"]
ARMS = {
    "bf16": ("bf16", ""),
    "fp8_linear": ("fp8_linear", ""),
    "fp8_linear, backward=dequantized": ("fp8_linear", "backward=dequantized"),
    "fp8_blockwise": ("fp8_blockwise", ""),
    "fp8": ("fp8", ""),
}


def _planned(recipe: str, more: str):
    sides = [f"--config.precision.{side}={recipe}" for side in ("rollout", "learner")]
    sides += [f"--config.precision.{more}"] if more else []
    config = load_config(str(_ROOT / "configs" / "qwen3_8b.py"), sides)
    config.model.checkpoint, config.model.name = "", "qwen3_8b"
    config.data.tokenizer, config.data.chat = "byte", False
    return read_planned(config, gpu=GPU)


def main() -> None:
    print("| recipe | weights, GiB | KiB a token | decode, relative | train step, relative |")
    print("|---|---|---|---|---|")
    first = None
    for name, arm in ARMS.items():
        planned = _planned(*arm)
        resolved = planned.resolved
        model, recipe = resolved.model, resolved.rollout_recipe
        weights = weight_bytes(weight_shapes(model, recipe, recipe), mesh_of()).stored
        decode = sum(decode_seconds(model, recipe, mesh_of(), SEQUENCES, KEYS, GPU).values())
        train = step_cost(planned, plan_learner(resolved, planned.mesh)).most_seconds
        first = first or (decode, train)
        print(
            f"| {name} | {weights / 2**30:.1f} | {page_bytes(model, recipe) / PAGE / 2**10:.0f} | "
            f"{first[0] / decode:.2f} | {first[1] / train:.2f} |"
        )


if __name__ == "__main__":
    main()
