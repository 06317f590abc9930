"""The form of every study, and the one loop that runs it.

A study lists the cells that it needs of a subject, and makes verdicts, tables and a figure of their
numbers. `run` plans all cells first, so that mistakes show before anything is measured; then it
gets each cell, finished or measured now, and returns the content of study.json.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8rl_jax.base.whole_file import write_whole
from studies.cells import Cell, Cells
from studies.progress import Note, silent
from studies.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUP = 8  # samples of each question that is scored
Numbers = dict[str, Any]  # numbers of a cell
Verdict = dict[str, Any]  # result of `Hypothesis.judge`
Result = dict[str, Any]  # content of study.json, or a part of it


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured; 0 where a study has no such size.

    Attributes:
      questions: number of held-out questions that are answered and scored, GROUP samples each.
      steps: number of steps of each RL run; 0 leaves the runs out.
      sequences: number of sequences of the study's text.
    """

    questions: int = 0
    steps: int = 0
    sequences: int = 0


class Plan(NamedTuple):
    """The subjects and the size of a study, and where its runs are written.

    Attributes:
      subjects: models, each once for every seed; subjects of equal name follow each other.
      size: how much is measured.
      out: directory of RL runs.
      note: called with lines of progress.
    """

    subjects: Sequence[Subject]
    size: Size
    out: pathlib.Path
    note: Note = silent


class Found(NamedTuple):
    """The numbers that were measured.

    Attributes:
      subjects: subjects of the plan.
      size: size of the plan.
      numbers: {label: the cell's numbers} for each subject.
    """

    subjects: Sequence[Subject]
    size: Size
    numbers: Sequence[dict[str, Numbers]]

    def each(self, label: str) -> list[Numbers]:
        """Returns the numbers of the cell with this label, for each subject that has it."""
        return [numbers[label] for numbers in self.numbers if label in numbers]


@dataclasses.dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
      name: name of its command, its module and its file of cells.
      full, quick: its size, and its size with --quick.
      cells: (subject, plan) -> {label: cell}; raises UserError if the plan cannot be carried out.
      judge: (found) -> verdicts.
      result: (found) -> entries of study.json besides those that all studies have.
      tables: (content of study.json) -> Markdown.
      figure: (content of study.json) -> figure.
      questions: whether it asks the questions of the subject's task.
      remark: (content of study.json) -> a line that is printed below the verdicts.
    """

    name: str
    full: Size
    quick: Size
    cells: Callable[[Subject, Plan], dict[str, Cell]]
    judge: Callable[[Found], list[Verdict]]
    result: Callable[[Found], Result]
    tables: Callable[[Result], str]
    figure: Callable[[Result], Figure]
    questions: bool = True
    remark: Callable[[Result], str] | None = None


def load(name: str) -> Study:
    """Imports the study of this name."""
    return importlib.import_module(f"studies.{name}").STUDY


def run(study: Study, plan: Plan, cells: Cells) -> Result:
    """Measures the cells that are missing, and judges the hypotheses.

    Returns:
      The content of study.json.

    Raises:
      UserError: `study.cells` refuses the plan, or `Cells.get` a finished cell.
    """
    planned = [(subject, study.cells(subject, plan)) for subject in plan.subjects]
    left = total = sum(len(wanted) for _, wanted in planned)
    finished: list[dict[str, Any]] = []
    numbers: list[dict[str, Numbers]] = []
    for subject, wanted in planned:
        numbers.append({})
        for label, cell in wanted.items():
            finished.append(cells.get(study.name, cell))
            numbers[-1][label] = finished[-1]["numbers"]
            left -= 1
            plan.note(
                f"{subject.name}, seed {subject.seed}, {label} is there; {total - left} of {total} "
                f"cells, {left} left"
            )
    found = Found(plan.subjects, plan.size, numbers)
    has = dataclasses.asdict(study.full)
    sizes = {name: size for name, size in dataclasses.asdict(plan.size).items() if has[name]}
    return {
        "study": study.name,
        "name": plan.subjects[0].name,
        "subjects": [subject.identity for subject in plan.subjects],
        **sizes,
        **({"group": GROUP} if has["questions"] else {}),
        **study.result(found),
        "hypotheses": study.judge(found),
        "origins": _origins(finished),
    }


def _origins(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns commits, CPUs and versions under which cells were measured, without duplicates."""
    found = {}
    for cell in cells:
        origin = {name: cell[name] for name in ("commit", "cpu", "versions")}
        found[json.dumps(origin, sort_keys=True)] = origin
    return [found[text] for text in sorted(found)]


def write(study: Study, result: Result, out: pathlib.Path) -> list[str]:
    """Writes study.json, study.png and study.md into `out`; returns their paths.

    study.md has a sentence for each hypothesis, the tables, and a line for each origin.
    """
    sentences = "".join(f"* {found['sentence']}\n" for found in result["hypotheses"])
    measured = "".join(
        f"* commit {found['commit']}, {found['cpu']}, jax {found['versions']['jax']}\n"
        for found in result["origins"]
    )
    write_whole(out / "study.json", json.dumps(result, indent=1, sort_keys=True) + "\n")
    write_whole(
        out / "study.md",
        f"# python -m studies {study.name}\n\n{sentences}\n{study.tables(result)}\n"
        f"Measured at:\n\n{measured}",
    )
    study.figure(result).savefig(out / "study.png")
    return [str(out / name) for name in ("study.json", "study.md", "study.png")]
