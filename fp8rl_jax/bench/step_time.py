"""`fp8rl bench`: time of a rollout and of a train step under several recipes, in one process.

Every recipe runs on the same prompts and the same random model, on real questions of the
configured task; recipes take turns within each repetition, so that a machine that slows down slows
all of them. The figures are medians; the ratios are to the first recipe, which is timed a second
time without the counts of `precision.health`. Compilation is timed, too, without the compilation
cache: as what the first call takes longer than the median. On a CPU FP8 is emulated (operands are
converted to bf16 or float32), so FP8 is slower there than bf16: the table says how much.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import ml_collections
import numpy as np

from fp8rl_jax.compilation_cache import without_compilation_cache
from fp8rl_jax.envs import Question
from fp8rl_jax.errors import UserError
from fp8rl_jax.learner import Batch, LossConfig
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.training.optimizer import make_optimizer
from fp8rl_jax.training.runtime import make_runtime, to_device


class Subject:
    """One recipe's programs and data."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        recipe: str,
        health: bool,
        name: str | None = None,
    ):
        """`name`: of the recipe; programs of equal recipes may share what was traced."""
        config = config.copy_and_resolve_references()
        config.precision.rollout = config.precision.learner = recipe
        config.precision.zero_drift = "report"
        config.precision.health = health
        self.runtime = rt = make_runtime(config)
        if name is not None:
            sides = (rt.rollout_recipe, rt.learner_recipe)
            rt.rollout_recipe, rt.learner_recipe = (
                dataclasses.replace(side, name=name) for side in sides
            )
        optimizer, _ = make_optimizer(1e-4, 1, 0.9, 0.99, 0.0, 1.0)
        self.questions: list[Question] = rt.questions["train"][: config.rollout.prompts_per_step]
        state = rt.new_state(rt.init_params(), optimizer)
        self.state = rt.calibrate_state(state, *rt.pad_prompts(self.questions))
        self.step = rt.train_step(optimizer, LossConfig(), config.learner.micro_batches)
        self.weights, _, _ = rt.refit_state(self.state)

    def rollout(self) -> tuple:
        config, rt = self.runtime.config, self.runtime
        rows = len(self.questions) * config.rollout.group_size
        return rt.generate(
            rt.sampler, self.weights, self.questions, rt.keys["rollout"],
            np.full(rows, config.rollout.temperature, np.float32),
        )  # fmt: skip

    def batch(self, rolled_out: tuple) -> Batch:
        """What `rollout` returned as a training batch, advantages drawn at random."""
        rt = self.runtime
        rollout, prompts, lengths = rolled_out
        rows = len(rollout.tokens)
        temperature = np.full(rows, rt.config.rollout.temperature, np.float32)
        advantages = np.random.default_rng(0).standard_normal(rows).astype(np.float32)
        batch = rt.rollout_batch(rollout, prompts, lengths, temperature, advantages)
        return to_device(batch, rt)

    def train(self, batch: Batch) -> jax.Array:
        """One step; the log-probabilities that it computed."""
        self.state, logp, metrics = self.step(self.state, batch, self.runtime.rope)
        return jax.block_until_ready((logp, self.state, metrics))[0]


def bench(
    config: ml_collections.ConfigDict, recipes: list[str], repeats: int
) -> list[dict[str, float | str]]:
    """Times each recipe; see the module.

    Args:
      config: shapes and batch sizes.
      recipes: names; the first is the one that ratios refer to.
      repeats: timed repetitions after the one that compiles.

    Returns:
      One row a recipe, and one of the first without health counts: recipe, decode_s, train_s
      (median seconds), decode_compile_s, train_compile_s (seconds), decode_tokens_per_s,
      decode_ratio, train_ratio (median over repetitions of this recipe over the first).
    """
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; write at least 1")
    for recipe in recipes:
        get_recipe(recipe)
    health = config.precision.health
    subjects = {recipe: Subject(config, recipe, health) for recipe in recipes}
    if health:
        subjects[f"{recipes[0]}, no health"] = Subject(config, recipes[0], False)
    first = next(iter(subjects.values()))
    times: dict[str, dict[str, list[float]]] = {r: {"decode": [], "train": []} for r in subjects}
    tokens = {}
    with jax.set_mesh(first.runtime.mesh), without_compilation_cache():
        batches = {}
        for turn in range(1 + repeats):
            for name, subject in subjects.items():
                start = time.perf_counter()
                rolled_out = subject.rollout()
                times[name]["decode"].append(time.perf_counter() - start)
                if turn == 0:
                    batches[name] = subject.batch(rolled_out)
                    tokens[name] = float(np.asarray(batches[name].mask).sum())
                start = time.perf_counter()
                subject.train(batches[name])
                times[name]["train"].append(time.perf_counter() - start)
    rows = []
    for name in subjects:
        decode, train = (np.array(times[name][k][1:]) for k in ("decode", "train"))
        base_decode, base_train = (np.array(times[recipes[0]][k][1:]) for k in ("decode", "train"))
        rows.append(
            {
                "recipe": name,
                "decode_s": float(np.median(decode)),
                "decode_tokens_per_s": tokens[name] / float(np.median(decode)),
                "train_s": float(np.median(train)),
                "decode_compile_s": times[name]["decode"][0] - float(np.median(decode)),
                "train_compile_s": times[name]["train"][0] - float(np.median(train)),
                "decode_ratio": float(np.median(decode / base_decode)),
                "train_ratio": float(np.median(train / base_train)),
            }
        )
    return rows


def format_table(rows: list[dict]) -> str:
    """The rows of `bench` as text; ratios above 1 are slower than the first recipe."""
    head = (
        "recipe", "rollout s", "tokens/s", "train step s", "rollout ratio", "train ratio",
        "compile s",
    )  # fmt: skip
    width = max(13, *(len(row["recipe"]) for row in rows))
    lines = ["  ".join(f"{h:>{width if i == 0 else 13}}" for i, h in enumerate(head))]
    for row in rows:
        cells = (
            row["recipe"], f"{row['decode_s']:.3f}", f"{row['decode_tokens_per_s']:.0f}",
            f"{row['train_s']:.3f}", f"{row['decode_ratio']:.2f}", f"{row['train_ratio']:.2f}",
            f"{row['decode_compile_s'] + row['train_compile_s']:.1f}",
        )  # fmt: skip
        lines.append("  ".join(f"{c:>{width if i == 0 else 13}}" for i, c in enumerate(cells)))
    platform = jax.devices()[0].platform
    lines.append(f"platform {platform}; ratios are to {rows[0]['recipe']}, above 1 is slower")
    if platform == "cpu":
        lines.append("FP8 is emulated on a CPU: its speed here says nothing about a GPU")
    return "\n".join(lines)
