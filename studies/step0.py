"""Scores of a policy before RL: its samples, compared under several views."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.training.runtime import Runtime
from studies.cells import Cell, described
from studies.frame import GROUP
from studies.measures import measure
from studies.progress import Note, silent
from studies.scoring import Scorer, View, sample
from studies.subjects import Subject


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Held-out questions, sampled under one view and scored under all.

    Attributes:
      views: {name: view}.
      pairs: {name: names of two views that are compared}.
      rollout: name of the view whose recipe samples.
      questions: number of questions that are asked.
      group: number of samples of each question.
    """

    views: dict[str, View]
    pairs: dict[str, tuple[str, str]]
    rollout: str
    questions: int
    group: int = GROUP

    def cell(self, study: str, subject: Subject, note: Note) -> Cell:
        """Returns the cell of a subject's scores.

        Its numbers are those of `numbers`, and 'warmup': `Subject.warmup`.

        Args:
          study: name with which the cell's name begins.
          subject: model, task, weights.
          note: called with the progress.

        Raises:
          UserError: there are too few questions.
        """
        held_out = len(subject.runtime.questions["eval"])
        size = subject.runtime.config.rollout.prompts_per_step
        if held_out < self.questions or self.questions % size:
            raise UserError(
                f"study {study}: step 0 takes {self.questions} held-out questions, {size} at a "
                f"time (rollout.prompts_per_step), and there are {held_out}: set eval.questions to "
                f"{self.questions} or more, and prompts_per_step to a divisor of that"
            )
        key = {
            "study": study,
            **subject.identity,
            **subject.settings,
            "questions": self.questions,
            "group": self.group,
            "rollout": self.rollout,
            "pairs": {name: list(pair) for name, pair in self.pairs.items()},
            "views": {
                name: described(view.recipe) | {"replay": view.replay, "of": view.of}
                for name, view in self.views.items()
            },
        }

        def measured() -> dict[str, Any]:
            numbers = self.numbers(subject.runtime, subject.params, note)
            return {**numbers, "warmup": subject.warmup()}

        return Cell(f"{study}-{subject.tag}-seed{subject.seed}", key, measured)

    def numbers(self, runtime: Runtime, params: Any, note: Note = silent) -> dict[str, Any]:
        """Samples and scores float32 parameters; returns the numbers as JSON.

        Returns:
          'pairs': {name: numbers of `measures.Pair`}; 'decode': differences between the
          log-probabilities that the sampler recorded and the score under its recipe, with the share
          of tokens that differ ('unequal'), the largest difference ('most') and the number of
          'tokens'; and 'margins', the quantiles of the routers' margins.
        """
        questions = runtime.questions["eval"][: self.questions]
        batch = sample(
            runtime, params, self.views[self.rollout].recipe, questions, self.group, note
        )
        mask, lengths = np.asarray(batch.mask) > 0, np.asarray(batch.lengths)
        differ, most = 0, 0.0
        margins: list[np.ndarray] = []

        def watched():
            nonlocal differ, most
            for part in Scorer(runtime, self.views, note).score(params, batch):
                own, kept = part.logprobs[self.rollout], mask[part.rows]
                off = np.abs(own.astype(np.float64) - batch.old_logprobs[part.rows])[kept]
                differ += int((off > 0).sum())
                most = max(most, float(off.max(initial=0.0)))
                if part.margins:
                    found = part.margins[self.rollout]
                    real = np.arange(found.shape[2]) < lengths[part.rows, None]
                    margins.append(found[:, real])
                yield part

        pairs, tokens = measure(watched(), self.pairs, mask, lengths, self.group), int(mask.sum())
        levels = np.linspace(0.05, 0.95, 19) if margins else np.zeros(0)
        found = np.quantile(np.concatenate(margins, axis=1), levels) if margins else levels
        return {
            "pairs": pairs,
            "decode": {"tokens": tokens, "unequal": differ / tokens, "most": most},
            "margins": {
                f"{level:.2f}": float(value) for level, value in zip(levels, found, strict=True)
            },
        }
