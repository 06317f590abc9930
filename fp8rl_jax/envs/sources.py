"""Where questions come from, by `env.task`: a generator of reasoning_gym, or a data set.

A data set is a file, a directory, a prepared or downloadable data set of tensorflow-datasets, or a
user's function that returns rows. Its own split 'test' (else 'validation') is held out; without one
the questions are split by the hash of their text. A question counts once, and one that is held out
is never trained on.

All rows are read at the start and kept in memory. Not done: streaming data sets that do not fit.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fp8rl_jax import user_code
from fp8rl_jax.envs import files, tfds, tfds_prepare
from fp8rl_jax.envs.question import SPLITS, Question, split_of, subset, with_template
from fp8rl_jax.envs.rows import RowForm, Rows, recognise
from fp8rl_jax.envs.tasks import check_task, make_questions
from fp8rl_jax.errors import UserError

_HELD_OUT = ("test", "validation")  # a data set's own split for evaluation, the first that it has
_TFDS = "tfds:"
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


def is_generated(task: str) -> bool:
    """Whether the task is one of reasoning_gym's, by its name alone."""
    if ":" in task or task == tfds_prepare.GSM8K or files.looks_like_a_path(task):
        return False
    if not os.path.exists(task):
        return True
    from reasoning_gym.factory import DATASETS

    return task in DATASETS


def check_source(env: Any) -> None:
    """Raises UserError if questions cannot come from where section `env` of a configuration says;
    reads no rows."""
    if "{question}" not in env.prompt_template:
        raise UserError(
            f"env.prompt_template is {env.prompt_template!r}; write a text with {{question}} in it"
        )
    try:
        re.compile(env.answer_pattern)
    except re.error as error:
        raise UserError(
            f"env.answer_pattern is {env.answer_pattern!r}, and no regular expression ({error}); "
            r"write one, such as 'Answer: (\d+)'"
        ) from None
    for task, options in ((env.task, env.task_options.to_dict()), (env.eval_task, {})):
        if task and is_generated(task):
            check_task(task, options)
        elif task:
            _check_data_set(task, env)


def _check_data_set(task: str, env: Any) -> None:
    name = _tfds_name(task)
    if name is None:
        if ":" in task and not files.looks_like_a_path(task):
            _function(task)
        elif not tfds.is_prepared(pathlib.Path(task)):
            files.find(task)
        return
    root = tfds.data_dir(env.data_dir)
    directory = tfds.find(name, root)
    if directory is not None:
        tfds.check_format(directory)
    elif env.download:
        tfds_prepare.check_known(name)
    else:
        raise UserError(
            f"env.task: {name} is not prepared in {root}, and env.download is False: "
            f"{tfds_prepare.ways(name)}"
        )


def _tfds_name(task: str) -> str | None:
    """The name within 'tfds:NAME', or of the data set that goes by its own; None for others."""
    if task == tfds_prepare.GSM8K:
        return task
    return task.removeprefix(_TFDS) if task.startswith(_TFDS) else None


def _function(task: str) -> Callable:
    function = user_code.load(task, "env.task:")
    if not callable(function):
        raise UserError(f"env.task: {task!r} is not a function; name one that returns rows")
    return function


def read_rows(task: str, env: Any) -> dict[str, Rows]:
    """{split: rows} of a data set, each row with its place; downloads what is missing.

    Raises:
      UserError: of `check_source`, or there is no network.
    """
    _check_data_set(task, env)
    name = _tfds_name(task)
    if name is not None:
        root = tfds.data_dir(env.data_dir)
        return tfds.read(tfds.find(name, root) or tfds_prepare.prepare(name, root))
    path = pathlib.Path(task).expanduser()
    if tfds.is_prepared(path):
        return tfds.read(path)
    if ":" not in task or files.looks_like_a_path(task):
        return {split: files.read(paths) for split, paths in files.find(task).items()}
    return _rows_of_function(task)


def _rows_of_function(task: str) -> dict[str, Rows]:
    """What a user's function returns: rows, or {split: rows}."""
    try:
        value = _function(task)()
    except UserError:
        raise
    except Exception as error:  # whatever a user's code raises
        raise UserError(
            f"env.task: {task!r} fails with {type(error).__name__}: {error}; it takes no argument "
            "and returns rows"
        ) from None
    parts = value if isinstance(value, Mapping) else {"train": value}
    return {split: _checked(f"{task} {split}", rows) for split, rows in parts.items()}


def _checked(place: str, rows: Any) -> Rows:
    """The rows of a user's function, if they are mappings."""
    try:
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise UserError(
                    f"env.task: {place}, row {number} is {type(row).__name__}; return dicts, such "
                    "as {'question': TEXT, 'answer': TEXT}"
                )
            yield f"{place}, row {number}", row
    except UserError:
        raise
    except Exception as error:  # not iterable, or the user's generator fails
        raise UserError(f"env.task: {place} fails with {type(error).__name__}: {error}") from None


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
        of data sets only.

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
        self._held_out_of = ""

    def load(self) -> Data:
        env, own = self._env, dict(self._counts)
        if separate := bool(env.eval_task and own["eval"]):
            own["eval"] = 0
        found: dict[str, dict[str, Question]] = {split: {} for split in SPLITS}
        if is_generated(env.task):
            if any(own.values()):
                found = self._generated(env.task, env.task_options.to_dict(), own)
        elif any(own.values()):
            found = self._data_set(own, separate)
        if separate:
            found["eval"] = self._separate()
        for split in ("sft", "train"):
            for text in found["eval"].keys() & found[split].keys():
                del found[split][text]
                self._left_out["training", "held out too"] += 1
        if not self._forms:
            return Data({split: self._filled(q.values()) for split, q in found.items()})
        questions = {split: self._fitting(split, q.values()) for split, q in found.items()}
        return Data(questions, self._note(questions), _digest(questions))

    def _generated(self, task: str, options: dict, counts: dict[str, int]):
        made = make_questions(task, options, counts, self._seed)
        return {split: {q.text: q for q in questions} for split, questions in made.items()}

    def _data_set(self, counts: dict[str, int], separate: bool) -> dict[str, dict[str, Question]]:
        """The questions of `env.task` by split, and by their texts."""
        task, env = self._env.task, self._env
        rows = read_rows(task, env)
        own = next((split for split in _HELD_OUT if split in rows and len(rows) > 1), "")
        main = "train" if "train" in rows else next(iter(rows)) if len(rows) == 1 else ""
        if not main:
            raise UserError(
                f"env.task: {task} has the splits {', '.join(rows)}, and none is called 'train': "
                "name a file, or one by env.task and the other by env.eval_task"
            )
        found: dict[str, dict[str, Question]] = {split: {} for split in SPLITS}
        if own and not separate:
            self._held_out_of = f"its split {own!r}"
            found["eval"] = self._read(task, rows[own], "evaluation")
            if not counts["sft"] and not counts["train"]:
                return found
        fraction = 0.0 if own or separate else env.eval_fraction
        if fraction:
            self._held_out_of = f"{fraction:g} of all, by the hash of the question"
        for text, question in self._read(task, rows[main], "training").items():
            split = split_of(text, fraction)
            found["train" if split == "sft" and not counts["sft"] else split][text] = question
        return found

    def _separate(self) -> dict[str, Question]:
        """The questions of `env.eval_task`: its own held-out split if it has one, else all."""
        task = self._env.eval_task
        if is_generated(task):
            self._held_out_of = task
            return self._generated(task, {}, {"eval": self._counts["eval"]})["eval"]
        rows = read_rows(task, self._env)
        split = next((s for s in (*_HELD_OUT, *rows) if s in rows), "")
        self._held_out_of = f"{task}, split {split!r}" if len(rows) > 1 else task
        return self._read(task, rows[split], "evaluation")

    def _read(self, task: str, rows: Iterable, use: str) -> dict[str, Question]:
        """Distinct questions of rows by their texts, in order."""
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
            elif question.text in found:
                self._left_out[use, "repeated"] += 1
            else:
                found[question.text] = question
        if not found:
            what = "rows" if not place else "rows with both question and answer"
            raise UserError(f"env.task: {task} has no {what}: name another file, or other columns")
        return found

    def _filled(self, questions: Iterable[Question]) -> list[Question]:
        """The questions in `env.prompt_template`."""
        return [with_template(question, self._env.prompt_template) for question in questions]

    def _fitting(self, split: str, questions: Iterable[Question]) -> list[Question]:
        """Those that are short enough, at most as many as are asked for."""
        kept = []
        for question in self._filled(questions):
            if self._fits(split, question):
                kept.append(question)
            else:
                self._left_out["evaluation" if split == "eval" else "training", "too long"] += 1
        count = self._counts[split]
        if split == "train" and count:
            count = self._env.max_questions or len(kept)
        return subset(kept, count)

    def _note(self, questions: dict[str, list[Question]]) -> str:
        counted = {split: f"{len(questions[split]):,}" for split in SPLITS}
        parts = []
        if self._counts["sft"]:
            parts.append(f"{counted['sft']} to fine-tune on")
        if self._counts["train"]:
            parts.append(f"{counted['train']} to train on")
        if self._counts["eval"]:
            parts.append(f"{counted['eval']} held out ({self._held_out_of})")
        note = "; ".join(f"{task}: {form}" for task, form in self._forms.items())
        note += f"; {', '.join(parts)}"
        for use, reasons in itertools.groupby(sorted(self._left_out), lambda key: key[0]):
            counts = (f"{self._left_out[key]:,} {key[1]}" for key in reasons)
            note += f"; left out of {use}: {', '.join(counts)}"
        return note


def _digest(questions: Mapping[str, Iterable[Question]]) -> str:
    """A hash of all that training and evaluation take from a data set."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for q in questions[split]:
            line = [split, q.text, q.answer, q.solution, [dict(m) for m in q.messages]]
            digest.update(json.dumps(line).encode())
    return digest.hexdigest()
