"""Displays the progress of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import contextlib
import datetime
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from fp8rl_jax.base import compiling
from fp8rl_jax.report.metrics import live_line
from fp8rl_jax.training.compile_times import CompileTimes

_PLAIN_SECONDS = 10.0  # least time between two plain lines of steps
_LARGE_SECONDS = 1.0  # programs that compile for less are not shown
_RECENT = 20  # number of last steps that the remaining time is estimated from


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class _Compiling(ProgressColumn):
    """Shows the program that is being compiled."""

    def __init__(self, display: Display):
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        program = compiling.at_hand()
        if program is None or program[1] < _LARGE_SECONDS:
            return Text("")
        name, seconds = program
        return Text(f"compiling {name}, {_duration(seconds)}{self._display.compiling_left()}")


class Display:
    """Shows SFT updates, RL steps, evaluations, and what is being compiled. Use as a context
    manager."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[status]}"),
            TextColumn("{task.fields[left]}"),
            _Compiling(self),
            console=self._console,
            disable=not self._live,
        )
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._ended = time.perf_counter()
        self._durations: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._accuracy = "-"
        self._opened = contextlib.ExitStack()
        self._times: CompileTimes | None = None  # until the first step of a phase ends

    def __enter__(self) -> Display:
        self._opened.enter_context(compiling.watch(self._compiled))
        self._opened.enter_context(self._progress)
        return self

    def __exit__(self, *exc) -> None:
        self._opened.close()

    def note(self, text: str) -> None:
        """Prints a line above the live line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _compiled(self, name: str, seconds: float) -> None:
        """Prints a line for a program that was compiled, where there is no live line."""
        if not self._live and seconds >= _LARGE_SECONDS:
            self.note(f"  compiled {name} in {_duration(seconds)}{self.compiling_left()}")

    def compiling_left(self) -> str:
        """Returns how long the first step still compiles, as the end of a line; '' if unknown."""
        if self._times is None:
            return ""
        left = self._times.left(self._name)
        return f", about {_duration(left)} of compiling left" if left >= 1 else ""

    def phase(self, name: str, total: int, completed: int, times: CompileTimes) -> None:
        """Starts a bar of `total` steps; `times` estimates what the first one compiles."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(
            name, total=total, completed=completed, status="", left=""
        )
        self._name = name
        self._total = total
        if completed < total:
            self._times = times
            times.begin()
            about = _duration(times.expected(name))
            self.note(
                f"{name}: {total} steps; the first one compiles, about {about} (less if programs "
                "are cached)"
            )
        self._ended = time.perf_counter()
        self._durations.clear()

    def _update(self, step: int, status: str) -> None:
        assert self._task is not None
        if self._times is not None:
            self._times.end(self._name)
            self._times = None
        now = time.perf_counter()
        self._durations.append(now - self._ended)
        self._ended = now
        # The median, because the first step compiles, and later ones may.
        left = statistics.median_low(self._durations) * (self._total - step)
        text = f"left {datetime.timedelta(seconds=round(left))}" if len(self._durations) > 1 else ""
        self._progress.update(self._task, completed=step, status=status, left=text)
        if not self._live and (now - self._last_line > _PLAIN_SECONDS or step == self._total):
            self._last_line = now
            self.note(f"{self._name} {step}/{self._total}  {status}  {text}")

    def step(self, file: str, record: dict) -> None:
        """Shows a record of sft.jsonl or metrics.jsonl; `file` is the name without .jsonl."""
        self._update(record["step"], live_line(file, record, self._accuracy))

    def rollout(self, step: int, progress) -> None:
        """Shows how many responses of an RL step are done; `progress`: rollout's `Progress`."""
        done = progress.done
        status = f"rollout {done.sum()}/{len(done)} responses, {progress.drawn.sum()} tokens"
        now = time.perf_counter()
        if self._live:
            assert self._task is not None
            self._progress.update(self._task, status=status)
        elif now - self._last_line > _PLAIN_SECONDS and not done.all():
            self._last_line = now
            self.note(f"{self._name} {step}/{self._total}  {status}")

    def evaluations(self, records: Sequence[dict]) -> None:
        """Prints a line for each set's evaluation; later steps show the first set's accuracy."""
        first = records[0]
        self._accuracy = f"{first['accuracy_sampled']:.3f}/{first['accuracy_greedy']:.3f}"
        for record in records:
            name = f" of {record['set']}" if "set" in record else ""
            self.note(
                f"  held out{name} after {record['phase']} step {record['step']}: "
                f"sampled {record['accuracy_sampled']:.3f}, greedy {record['accuracy_greedy']:.3f} "
                f"({record['questions']} questions)"
            )
