"""A cell of scores: samples of a policy before RL, under several views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import Question
from fp8rl_jax.study.cells import Cells, described
from fp8rl_jax.study.measures import measure
from fp8rl_jax.study.progress import Note, silent
from fp8rl_jax.study.scoring import Scorer, View, sample
from fp8rl_jax.study.subjects import Subject
from fp8rl_jax.training.runtime import Runtime


def score_cell(
    study: str,
    subject: Subject,
    cells: Cells,
    views: dict[str, View],
    pairs: dict[str, tuple[str, str]],
    *,
    rollout: str,
    questions: int,
    group: int,
    note: Note = silent,
) -> dict[str, Any]:
    """The cell of a subject: held-out questions, sampled under one view and scored under all.

    Args:
      study: for the cell's name.
      subject: model, task, weights.
      cells: finished ones.
      views: ways to score; `pairs` are compared.
      rollout: the view whose recipe samples.
      questions, group: how many, and samples of each.
      note: told how far it is.

    Returns:
      A cell whose numbers are 'pairs': {name: see `measures.Pair`}; 'decode': how the sampler's own
      log-probabilities differ from the score under its recipe: the share of tokens that differ
      ('unequal'), the largest difference ('most'), the number of 'tokens';
      'margins', the quantiles of the routers' margins; and 'warmup', of `Subject.warmup`.

    Raises:
      UserError: there are too few questions.
    """
    held_out = subject.runtime.questions["eval"]
    size = subject.runtime.config.rollout.prompts_per_step
    if len(held_out) < questions or questions % size:
        raise UserError(
            f"study {study}: step 0 takes {questions} held-out questions, {size} at a time "
            f"(rollout.prompts_per_step), and there are {len(held_out)}: set eval.questions to "
            f"{questions} or more, and prompts_per_step to a divisor of that"
        )
    key = {
        "study": study,
        **subject.identity,
        **subject.settings,
        "questions": questions,
        "group": group,
        "rollout": rollout,
        "pairs": {name: list(pair) for name, pair in pairs.items()},
        "views": {
            name: {**described(v.recipe), "replay": v.replay, "of": v.of}
            for name, v in views.items()
        },
    }

    def numbers() -> dict[str, Any]:
        found = scored(
            subject.runtime,
            subject.params,
            views,
            pairs,
            rollout=rollout,
            questions=held_out[:questions],
            group=group,
            note=note,
        )
        return {**found, "warmup": subject.warmup()}

    return cells.get(f"{study}-{subject.tag}-seed{subject.seed}", key, numbers)


def scored(
    runtime: Runtime,
    params: Any,
    views: dict[str, View],
    pairs: dict[str, tuple[str, str]],
    *,
    rollout: str,
    questions: Sequence[Question],
    group: int,
    note: Note = silent,
) -> dict[str, Any]:
    """The numbers of `score_cell` but 'warmup', of float32 parameters; a multiple of
    `rollout.prompts_per_step` questions."""
    batch = sample(runtime, params, views[rollout].recipe, questions, group, note)
    scorer = Scorer(runtime, views, note)
    decode = {"differ": 0, "most": 0.0}
    margins: list[np.ndarray] = []
    mask, lengths = np.asarray(batch.mask) > 0, np.asarray(batch.lengths)

    def watched():
        for part in scorer.score(params, batch):
            own, kept = part.logprobs[rollout], mask[part.rows]
            off = np.abs(own.astype(np.float64) - batch.old_logprobs[part.rows])[kept]
            decode["differ"] += int((off > 0).sum())
            decode["most"] = max(decode["most"], float(off.max(initial=0.0)))
            if part.margins:
                real = np.arange(part.margins[rollout].shape[2]) < lengths[part.rows, None]
                margins.append(part.margins[rollout][:, real])
            yield part

    found = measure(watched(), pairs, mask, lengths, group)
    tokens = int(mask.sum())
    levels = np.linspace(0.05, 0.95, 19)
    return {
        "pairs": found,
        "decode": {"tokens": tokens, "unequal": decode["differ"] / tokens, "most": decode["most"]},
        "margins": {
            f"{level:.2f}": float(value)
            for level, value in zip(
                levels, np.quantile(np.concatenate(margins, axis=1), levels), strict=True
            )
        }
        if margins
        else {},
    }
