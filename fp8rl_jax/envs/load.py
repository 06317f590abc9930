"""The questions of a run: read or generated, split, and counted.

A data set's own split 'test' (else 'validation') is held out; without one its questions are split
by the hash of their text. A question counts once, and one that is held out is never trained on.

All rows are read at the start and kept in memory. Not done: streaming data sets that do not fit.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fp8rl_jax.envs.question import SPLITS, Question, split_of, subset, with_template
from fp8rl_jax.envs.rows import RowForm, recognise
from fp8rl_jax.envs.sources import about, eval_tasks, is_generated, read_rows
from fp8rl_jax.envs.tasks import make_questions
from fp8rl_jax.errors import UserError

_HELD_OUT = ("test", "validation")  # a data set's own split for evaluation, the first that it has
Fits = Callable[[str, Question], bool]


class Data(NamedTuple):
    """The questions of a run.

    Attributes:
      questions: by split, no question in two of them.
      note: what was read and left out, in one line; '' where all questions were generated.
      digest: of the questions, to notice that a data set has changed; '' likewise.
    """

    questions: dict[str, list[Question]]
    note: str = ""
    digest: str = ""


def load_questions(
    env: Any, counts: Mapping[str, int], seed: int, fits: Fits | None = None
) -> Data:
    """The questions of a run.

    Args:
      env: the section of a checked configuration.
      counts: number of questions by split. Of a data set the training split is complete (at most
        `env.max_questions`) if its number is above 0, and the others may be smaller.
      seed: other seeds give other questions of a generator.
      fits: says of a split's question whether it is short enough; without it all are. It is asked
        where a data set is among the sources.

    Raises:
      UserError: a source cannot be read, or gives no or too few questions.
    """
    return _Loader(env, counts, seed, fits or (lambda split, question: True)).load()


class _Loader:
    """`load_questions`, with what it counts on the way."""

    def __init__(self, env: Any, counts: Mapping[str, int], seed: int, fits: Fits):
        self._env, self._seed, self._fits = env, seed, fits
        self._counts = {split: counts.get(split, 0) for split in SPLITS}
        self._left_out: collections.Counter[tuple[str, str]] = collections.Counter()
        self._forms: dict[str, RowForm] = {}  # by source
        self._held_out_of: list[str] = []  # of each evaluation set

    def load(self) -> Data:
        env, own = self._env, dict(self._counts)
        separate = eval_tasks(env) if own["eval"] else []
        if separate:
            own["eval"] = 0
        found: dict[str, dict[str, Question]] = {split: {} for split in SPLITS}
        if is_generated(env.task):
            if any(own.values()):
                found = self._generated(env.task, env.task_options.to_dict(), own)
        elif any(own.values()):
            with about("env.task"):
                found = self._data_set(own, bool(separate))
        sets = [found["eval"]]
        if separate:
            with about("env.eval_task"):
                sets = [self._separate(task) for task in separate]
        if len(sets) > 1:
            for task, part in zip(separate, sets, strict=True):
                part.update({k: dataclasses.replace(q, set=task) for k, q in part.items()})
        held_out = set().union(*sets)
        for split in ("sft", "train"):
            for key in held_out & found[split].keys():
                del found[split][key]
                self._left_out["training", "held out too"] += 1
        questions = {split: self._taken(split, found[split].values()) for split in ("sft", "train")}
        evaluated = [self._taken("eval", part.values()) for part in sets]
        questions["eval"] = list(itertools.chain(*evaluated))
        if not self._forms:
            return Data(questions)
        return Data(questions, self._note(questions, evaluated), _digest(questions))

    def _generated(self, task: str, options: dict, counts: dict[str, int]):
        made = make_questions(task, options, counts, self._seed)
        return {split: {_key(q.text): q for q in part} for split, part in made.items()}

    def _data_set(self, counts: dict[str, int], separate: bool) -> dict[str, dict[str, Question]]:
        """The questions of `env.task` by split and key."""
        task, env = self._env.task, self._env
        rows = read_rows(task, env)
        own = next((split for split in _HELD_OUT if split in rows and len(rows) > 1), "")
        main = "train" if "train" in rows else next(iter(rows)) if len(rows) == 1 else ""
        if not main:
            raise UserError(
                f"{task} has the splits {', '.join(rows)}, and none is called 'train': "
                "name a file, or one by env.task and the other by env.eval_task"
            )
        found: dict[str, dict[str, Question]] = {split: {} for split in SPLITS}
        if own and not separate:
            self._held_out_of = [f"its split {own!r}"]
            found["eval"] = self._read(task, rows[own], "evaluation")
            if not counts["sft"] and not counts["train"]:
                return found
        fraction = 0.0 if own or separate else env.eval_fraction
        if fraction:
            self._held_out_of = [f"{fraction:g} of all, by the hash of the question"]
        for key, question in self._read(task, rows[main], "training").items():
            split = split_of(key, fraction)
            found["train" if split == "sft" and not counts["sft"] else split][key] = question
        return found

    def _separate(self, task: str) -> dict[str, Question]:
        """The questions of a source for evaluation: its own held-out split if it has one, else
        all."""
        if is_generated(task):
            self._held_out_of.append(task)
            return self._generated(task, {}, {"eval": self._counts["eval"]})["eval"]
        rows = read_rows(task, self._env)
        split = next((s for s in (*_HELD_OUT, *rows) if s in rows), "")
        self._held_out_of.append(f"{task}, split {split!r}" if len(rows) > 1 else task)
        return self._read(task, rows[split], "evaluation")

    def _read(self, task: str, rows: Iterable, use: str) -> dict[str, Question]:
        """Distinct questions of rows by key, in order."""
        form: RowForm | None = None
        found: dict[str, Question] = {}
        place = ""
        for place, row in rows:
            if form is None:
                form = self._forms[task] = recognise(place, row, self._env)
            question = form.question(place, row)
            if not question.text.strip():
                self._left_out[use, "without a question"] += 1
            elif form.has_answer and not question.answer.strip():
                self._left_out[use, "without an answer"] += 1
            elif (key := _key(question.text)) in found:
                self._left_out[use, "repeated"] += 1
            else:
                found[key] = question
        if not found:
            what = "rows" if not place else "rows with both question and answer"
            raise UserError(f"{task} has no {what}: name another file, or other columns")
        return found

    def _taken(self, split: str, questions: Iterable[Question]) -> list[Question]:
        """The questions in `env.prompt_template`; where there are data sets, those that are short
        enough, at most as many as are asked for."""
        filled = [with_template(question, self._env.prompt_template) for question in questions]
        if not self._forms:
            return filled
        kept = []
        for question in filled:
            if self._fits(split, question):
                kept.append(question)
            else:
                self._left_out["evaluation" if split == "eval" else "training", "too long"] += 1
        count = self._counts[split]
        if split == "train" and count:
            count = self._env.max_questions or len(kept)
        return subset(kept, count)

    def _note(self, questions: dict[str, list[Question]], evaluated: list[list[Question]]) -> str:
        counted = {split: f"{len(questions[split]):,}" for split in SPLITS}
        parts = []
        if self._counts["sft"]:
            parts.append(f"{counted['sft']} to fine-tune on")
        if self._counts["train"]:
            parts.append(f"{counted['train']} to train on")
        if self._counts["eval"]:
            for part, source in zip(evaluated, self._held_out_of, strict=False):
                parts.append(f"{len(part):,} held out ({source})")
        note = "; ".join(f"{task}: {form}" for task, form in self._forms.items())
        note += f"; {', '.join(parts)}"
        for use, reasons in itertools.groupby(sorted(self._left_out), lambda key: key[0]):
            counts = (f"{self._left_out[key]:,} {key[1]}" for key in reasons)
            note += f"; left out of {use}: {', '.join(counts)}"
        return note


def _key(text: str) -> str:
    """A question's text without differences in white space."""
    return " ".join(text.split())


def _digest(questions: Mapping[str, Iterable[Question]]) -> str:
    """A hash of all that training and evaluation take from a data set."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for q in questions[split]:
            line = [split, q.text, q.answer, q.solution, [dict(m) for m in q.messages]]
            digest.update(json.dumps(line).encode())
    return digest.hexdigest()
