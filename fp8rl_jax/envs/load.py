"""Loads the questions of a run: reads or generates, splits, and counts them.

A data set's split 'test' (else 'validation') is held out, and trained on only if the user names it;
without one, questions are held out by the hash of their text. Equal prompts (text, roles and tools)
count once. A held-out question is never trained on, even with other white space.

All rows are read at the start and kept in memory. Not done: streaming data sets that do not fit.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fp8rl_jax.base.errors import UserError, visible
from fp8rl_jax.base.json_file import plain
from fp8rl_jax.envs.digest import digest_of
from fp8rl_jax.envs.question import SPLITS, Question, split_of, subset, with_template
from fp8rl_jax.envs.rows import RowForm, is_json_of_messages, names_of, recognise
from fp8rl_jax.envs.sources import DataSet, about, eval_tasks, is_generated, read_rows
from fp8rl_jax.envs.splits import roles
from fp8rl_jax.envs.tasks import make_questions

_AHEAD = 1000  # rows from which the form of a data set is recognised
_MOST_ROWS = 1_000_000  # of a user's function, plus 10 * `env.max_questions`
Fits = Callable[[str, Question], bool]


class Data(NamedTuple):
    """The questions of a run.

    Attributes:
      questions: lists of questions by split; the splits are disjoint.
      note: a line on what was read and left out; '' if all questions were generated.
      digest: hash of the questions and their rows; '' if all questions were generated.
    """

    questions: dict[str, list[Question]]
    note: str = ""
    digest: str = ""


def load_questions(
    env: Any,
    counts: Mapping[str, int],
    seed: int,
    fits: Fits | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Data:
    """Loads the questions of a run.

    Args:
      env: the section of a checked configuration.
      counts: number of questions by split. From a data set, 'train' with a number above 0 is
        complete (at most `env.max_questions`), and other splits may be smaller.
      seed: seed of generators.
      fits: function (split, question): whether the question is short enough; None if all are. Only
        called if a data set is among the sources.
      tools: function schemas of questions whose rows have none.

    Raises:
      UserError: a source cannot be read, or has too few questions.
    """
    counts = {split: counts.get(split, 0) for split in SPLITS}
    return _Loader(env, counts, seed, fits or (lambda split, question: True), tools).load()


class _Loader:
    """The state of `load_questions`: what it has counted and noted so far."""

    def __init__(self, env: Any, counts: Mapping[str, int], seed: int, fits: Fits, tools: Sequence):
        self._env = env
        self._counts = counts
        self._seed = seed
        self._fits = fits
        self._tools = tools
        self._left_out: collections.Counter[tuple[str, str]] = collections.Counter()
        self._forms: dict[str, list[RowForm]] = {}  # by source
        self._not_shown: dict[str, dict[str, None]] = {}  # columns, by source
        self._said: list[str] = []  # further parts of the note
        self._held_out_of: list[str] = []  # where each evaluation set comes from

    def load(self) -> Data:
        env = self._env
        counts = dict(self._counts)  # of `env.task`
        separate = eval_tasks(env) if counts["eval"] else []
        if separate:
            counts["eval"] = 0
        by_split: dict[str, list[Question]] = {split: [] for split in SPLITS}
        source: DataSet | None = None
        if is_generated(env.task):
            if any(counts.values()):
                by_split = make_questions(
                    env.task, plain(env.task_options.to_dict()), counts, self._seed
                )
        elif any(counts.values()):
            with about("env.task"):
                source = read_rows(env.task, env)
                by_split["eval"] = [] if separate else self._own_held_out(source)
        sets = [by_split["eval"]]
        if separate:
            with about("env.eval_task"):
                sets = [self._separate(task) for task in separate]
        if len(sets) > 1:
            sets = [
                [dataclasses.replace(question, set=task) for question in part]
                for task, part in zip(separate, sets, strict=True)
            ]
        held_out = {_key(question.text) for part in sets for question in part}
        trains = counts["sft"] or counts["train"]
        if source is not None and (trains or not held_out):
            with about("env.task"):
                questions = self._training(source, held_out, bool(separate))
        else:
            questions = {s: self._kept(s, by_split[s], held_out) for s in ("sft", "train")}
        evaluated = [self._kept("eval", part) for part in sets]
        if source is not None and not held_out:  # a share of the data set
            evaluated = [questions["eval"]]
        evaluated = [self._drawn("eval", part) for part in evaluated]
        questions = {split: self._drawn(split, questions[split]) for split in ("sft", "train")}
        questions["eval"] = list(itertools.chain.from_iterable(evaluated))
        if not self._forms:
            return Data(questions)
        return Data(
            questions,
            visible(self._note([env.task, *separate], questions, evaluated)),
            digest_of(questions),
        )

    def _own_held_out(self, source: DataSet) -> list[Question]:
        """Returns the questions of the held-out split of `env.task`; [] without one."""
        split = roles(self._env.task, source.rows).held_out
        if not split:
            return []
        self._held_out_of = [f"its split {split!r}"]
        return list(self._distinct(self._env.task, source, split, "evaluation"))

    def _training(
        self, source: DataSet, held_out: Collection[str], separate: bool
    ) -> dict[str, list[Question]]:
        """Returns {split: questions} of `env.task`; 'eval' has the questions held out of training,
        if there is no other evaluation set."""
        task = self._env.task
        main, held_out_split, unused = roles(task, source.rows)
        if not main:
            raise _no_training_split(task, source, held_out_split)
        fraction = 0.0 if held_out_split or separate else self._env.eval_fraction
        if fraction:
            self._held_out_of = [f"{fraction:g} of all, by the hash of the question"]
        if source.named and (self._counts["sft"] or self._counts["train"]):
            self._said.append(f"trained on although its name says {source.named!r}")
        if held_out_split and separate:
            unused = (held_out_split, *unused)
        if unused:
            self._said.append(f"splits not used: {names_of(unused)}")
        by_split: dict[str, list[Question]] = {split: [] for split in SPLITS}
        for question in self._distinct(task, source, main, "training"):
            split = split_of(_key(question.text), fraction)
            split = "train" if split == "sft" and not self._counts["sft"] else split
            by_split[split] += self._kept(split, [question], held_out)
            if source.a_function and len(by_split["train"]) == self._env.max_questions > 0:
                break
        return by_split

    def _separate(self, task: str) -> list[Question]:
        """Returns the questions of an evaluation source: of its held-out split, else all."""
        if is_generated(task):
            self._held_out_of.append(task)
            return make_questions(task, {}, {"eval": self._counts["eval"]}, self._seed)["eval"]
        source = read_rows(task, self._env)
        train, held_out, unused = roles(task, source.rows)
        split = held_out or train
        if not split:
            raise UserError(
                f"{task} has the splits {names_of(source.rows)}, and none is called 'test': name "
                "the directory or the files of one"
            )
        if unused and held_out:
            self._said.append(f"splits of {task} not used: {names_of(unused)}")
        self._held_out_of.append(f"{task}, split {split!r}" if len(source.rows) > 1 else task)
        return list(self._distinct(task, source, split, "evaluation"))

    def _distinct(self, task: str, source: DataSet, split: str, use: str) -> Iterator[Question]:
        """Yields the questions of a split that have text and answer, each prompt once, in order."""
        rows = source.rows[split]
        most = self._env.max_questions
        ahead = min(_AHEAD, most) if source.a_function and most else _AHEAD
        head = list(itertools.islice(rows, ahead))
        whole = f"the split {split!r} of {task}" if len(source.rows) > 1 else task
        if not head:
            raise UserError(f"{whole} has no rows: fill it, or name a file that has some")
        form = recognise(head[0][0], [row for _, row in head], self._env)
        if source.unread and task not in self._forms:
            self._said.append(f"not read: {names_of(source.unread)}")
        said = self._forms.setdefault(task, [])
        said.append(dataclasses.replace(form, input_key=""))  # until a row has an input
        here = len(said) - 1
        not_shown = self._not_shown.setdefault(task, {})
        answers: dict[str, str] = {}  # by prompt
        json_texts = 0
        for number, (place, row) in enumerate(itertools.chain(head, rows), 1):
            if source.a_function and number > _MOST_ROWS + 10 * most:
                way = ", or set env.max_questions to fewer than it has" if use == "training" else ""
                raise UserError(f"{task} has given {number:,} rows and goes on: let it end{way}")
            try:
                question = form.question(place, row)
                if form.has_input(row):
                    said[here] = form
                not_shown.update(dict.fromkeys(form.not_shown(row, not_shown)))
            except RecursionError:
                raise UserError(f"{place} is nested too deeply: write flatter rows") from None
            if not question.text.strip():
                self._left_out[use, "without a question"] += 1
            elif form.has_answer and not question.answer.strip():
                self._left_out[use, "without an answer"] += 1
            elif (before := answers.get(question.identity)) is not None:
                other = "" if before.strip() == question.answer.strip() else " with another answer"
                self._left_out[use, f"repeated{other}"] += 1
            else:
                answers[question.identity] = question.answer
                json_texts += is_json_of_messages(question)
                yield question
        if json_texts:
            self._said.append(
                f"{json_texts:,} questions of {task} are JSON of messages and asked as that text"
            )
        if not answers:
            raise UserError(
                f"{whole} has no rows with both question and answer: name another file, or other "
                "columns"
            )

    def _kept(
        self, split: str, questions: Iterable[Question], held_out: Collection[str] = ()
    ) -> list[Question]:
        """Puts questions into `env.prompt_template`; leaves out those that are held out or (if any
        source is a data set) too long."""
        use = "evaluation" if split == "eval" else "training"
        kept = []
        for question in questions:
            filled = with_template(question, self._env.prompt_template)
            if self._tools and not filled.tools:
                filled = dataclasses.replace(filled, tools=self._tools)
            if _key(question.text) in held_out:
                self._left_out[use, "held out too"] += 1
            elif self._forms and not self._fits(split, filled):
                self._left_out[use, "too long"] += 1
            else:
                kept.append(filled)
        return kept

    def _drawn(self, split: str, questions: list[Question]) -> list[Question]:
        """Reduces the questions to the requested number, if any source is a data set."""
        count = self._counts[split]
        if split == "train" and count:
            count = self._env.max_questions or len(questions)
        return subset(questions, count) if self._forms else questions

    def _note(
        self,
        tasks: Iterable[str],
        questions: dict[str, list[Question]],
        evaluated: list[list[Question]],
    ) -> str:
        uses = {"sft": "to fine-tune on", "train": "to train on"}
        parts = [f"{len(questions[s]):,} {use}" for s, use in uses.items() if self._counts[s]]
        if self._counts["eval"]:
            sets = zip(evaluated, self._held_out_of, strict=False)
            parts += [f"{len(part):,} held out ({source})" for part, source in sets]
        read = [task for task in dict.fromkeys(tasks) if task in self._forms]
        note = "; ".join(
            f"{task}: {' and '.join(dict.fromkeys(map(str, self._forms[task])))}" for task in read
        )
        note += f"; {', '.join(parts)}"
        for use, reasons in itertools.groupby(sorted(self._left_out), lambda key: key[0]):
            counts = (f"{self._left_out[key]:,} {key[1]}" for key in reasons)
            note += f"; left out of {use}: {', '.join(counts)}"
        for task in read:
            if columns := self._not_shown[task]:
                of = f" of {task}" if len(read) > 1 else ""
                note += f"; columns{of} not shown: {names_of(columns)}"
        return "; ".join([note, *self._said])


def _no_training_split(task: str, source: DataSet, held_out: str) -> UserError:
    """Returns the error for a data set without a split to train on."""
    beside = f", and {names_of(source.unread)}, which is not read" if source.unread else ""
    if not held_out or len(source.rows) > 1:
        return UserError(
            f"{task} has the splits {names_of(source.rows)}, and none is called 'train'{beside}: "
            "name a file, or one by env.task and the other by env.eval_task"
        )
    if source.a_function:
        way = "return its rows without a split's name"
    else:
        way = "name its files themselves by env.task"
    return UserError(
        f"{task} has the split {held_out!r} alone, which is held out and not trained on{beside}: "
        f"name it by env.eval_task, or, to train on it, {way}"
    )


def _key(text: str) -> str:
    """Normalises white space in a question's text, to compare it with held-out ones."""
    return " ".join(text.split())
