"""Benchmark `step`: time of a rollout and of a train step under several recipes, in one process.

Every recipe runs on the same random model and the same questions of the configured task; recipes
take turns within each repetition, so that a machine that slows down slows all of them. The figures
are medians; the ratios are to the first recipe, which is timed a second time without counts if
`precision.health` is on. Compilation is timed too, without the compilation cache: it is the first
call's time minus the median. On a CPU FP8 is emulated (operands are converted to bf16 or float32),
so FP8 is slower there than bf16: the table says how much.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import ml_collections
import numpy as np

from fp8rl_jax.base.compilation_cache import without_compilation_cache
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.batch import Batch, of_sequences
from fp8rl_jax.bench.table import EMULATED, record_table
from fp8rl_jax.learner import LossConfig
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer
from fp8rl_jax.training.runtime import make_runtime


class Subject:
    """One recipe's programs and data, and their times.

    Attributes:
      times: {'decode' or 'train': seconds of each call of `run`}; the first compiles.
      tokens: number of response tokens of the first rollout.
      drift: largest |dlogp| of the first rollout and train step.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, recipe: str, health: bool, form: str = ""
    ):
        """`form` is added to the recipes' names, since equal recipes would share traced code."""
        config = config.copy_and_resolve_references()
        config.precision.rollout = config.precision.learner = recipe
        config.precision.zero_drift = "report"
        config.precision.health = health
        rt = make_runtime(config)
        of_rollout = rt.resolved.rollout_recipe
        named = dataclasses.replace(of_rollout, name=of_rollout.name + form)
        resolved = dataclasses.replace(rt.resolved, rollout_recipe=named, learner_recipe=named)
        self._runtime = rt = dataclasses.replace(rt, resolved=resolved)
        optimizer = make_optimizer(learning_rates(1e-4, 1), 0.9, 0.99, 0.0, 1.0)
        engine, questions = rt.engine, rt.questions["train"][: config.rollout.prompts_per_step]
        rows = len(questions) * config.rollout.group_size
        temperature = np.full(rows, config.rollout.temperature, np.float32)
        prompts = rt.prompts(questions)
        self._prompts = Prompts.numbered(*prompts, engine.keys["rollout"], temperature)
        state = engine.new_state(engine.init_params(), optimizer)
        self._state = engine.calibrate(state, of_sequences(*prompts))
        self._step = engine.train_step(
            optimizer, LossConfig(), config.learner.gradient_accumulation_steps
        )
        self._weights = engine.refit(self._state).weights
        self._batch: Batch | None = None
        self.times: dict[str, list[float]] = {"decode": [], "train": []}

    def run(self) -> None:
        """Times one rollout, and one train step on the first rollout with random advantages."""
        engine = self._runtime.engine
        start = time.perf_counter()
        rollout = engine.sample(self._weights, self._prompts)
        self.times["decode"].append(time.perf_counter() - start)
        first = self._batch is None
        if self._batch is None:
            advantages = np.random.default_rng(0).standard_normal(len(rollout.tokens))
            advantages = advantages.astype(np.float32)
            batch = engine.batch(rollout, self._prompts, advantages)
            self._batch, self._slots = engine.on_devices(batch)
        start = time.perf_counter()
        self._state, logp, metrics = self._step(self._state, self._batch, engine.rope)
        jax.block_until_ready((logp, self._state, metrics))
        self.times["train"].append(time.perf_counter() - start)
        if first:
            self.tokens = int(rollout.mask.sum())
            found = np.asarray(logp)
            if self._slots:
                found = self._slots.unpack(found, rollout.tokens.shape[1])
            self.drift = float(np.abs(found - rollout.logprobs)[rollout.mask].max())

    def seconds(self, phase: str) -> float:
        return float(np.median(self.times[phase][1:]))

    def compile_seconds(self, phase: str) -> float:
        return self.times[phase][0] - self.seconds(phase)

    def ratio(self, other: Subject, phase: str) -> float:
        """Returns the median over repetitions of the time over the other subject's."""
        mine, theirs = np.array(self.times[phase][1:]), np.array(other.times[phase][1:])
        return float(np.median(mine / theirs))


def check(recipes: list[str], repeats: int) -> None:
    """Raises UserError if there are no repetitions or a recipe is unknown."""
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; write at least 1")
    for recipe in recipes:
        get_recipe(recipe)


def bench(
    config: ml_collections.ConfigDict, recipes: list[str], repeats: int
) -> list[dict[str, float | str]]:
    """Times a rollout and a train step under each recipe.

    Args:
      config: shapes and batch sizes.
      recipes: names of recipes; ratios refer to the first.
      repeats: timed repetitions after the one that compiles.

    Returns:
      A row per recipe, and one for the first without health counts: recipe, decode_s, train_s
      (median seconds), decode_compile_s, train_compile_s (seconds), decode_tokens_per_s,
      decode_ratio, train_ratio (median over repetitions of this recipe over the first).
    """
    check(recipes, repeats)
    health = config.precision.health
    subjects = {recipe: Subject(config, recipe, health) for recipe in recipes}
    if health:
        subjects[f"{recipes[0]}, no health"] = Subject(config, recipes[0], False)
    with without_compilation_cache():
        for _ in range(1 + repeats):
            for subject in subjects.values():
                subject.run()
    rows: list[dict[str, float | str]] = []
    for name, subject in subjects.items():
        row: dict[str, float | str] = {"recipe": name}
        row["decode_tokens_per_s"] = subject.tokens / subject.seconds("decode")
        for phase in subject.times:
            row[f"{phase}_s"] = subject.seconds(phase)
            row[f"{phase}_compile_s"] = subject.compile_seconds(phase)
            row[f"{phase}_ratio"] = subject.ratio(subjects[recipes[0]], phase)
        rows.append(row)
    return rows


_COLUMNS = {
    "recipe": "{recipe}",
    "rollout s": "{decode_s:.3f}",
    "tokens/s": "{decode_tokens_per_s:.0f}",
    "train step s": "{train_s:.3f}",
    "rollout ratio": "{decode_ratio:.2f}",
    "train ratio": "{train_ratio:.2f}",
    "compile s": "{compile_s:.1f}",
}


def format_table(rows: list[dict]) -> str:
    """Returns the rows of `bench` as text; ratios above 1 are slower than the first recipe."""
    records = [r | {"compile_s": r["decode_compile_s"] + r["train_compile_s"]} for r in rows]
    platform = jax.devices()[0].platform
    text = f"platform {platform}; ratios are to {rows[0]['recipe']}, above 1 is slower"
    emulated = [EMULATED] if platform == "cpu" else []
    return "\n".join([*record_table(_COLUMNS, records), text, *emulated])
