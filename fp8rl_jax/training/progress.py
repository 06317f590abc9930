"""Displays the progress of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import datetime
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fp8rl_jax.report.metrics import live_line

_PLAIN_SECONDS = 10.0  # least time between two plain lines of steps
_RECENT = 20  # number of last steps that the remaining time is estimated from


class Display:
    """Shows SFT updates, RL steps and evaluations. Use as a context manager."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[status]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._ended = time.perf_counter()
        self._durations: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._accuracy = "-"

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exc) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Prints a line above the live line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def phase(self, name: str, total: int, completed: int) -> None:
        """Starts a bar of `total` steps."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(
            name, total=total, completed=completed, status="", left=""
        )
        self._name, self._total = name, total
        if completed < total:
            self.note(f"{name}: {total} steps; the first one compiles, which takes up to a minute")
        self._ended = time.perf_counter()
        self._durations.clear()

    def _update(self, step: int, status: str) -> None:
        assert self._task is not None
        now = time.perf_counter()
        self._durations.append(now - self._ended)
        self._ended = now
        # The median, because the first step compiles, and later ones may.
        left = statistics.median_low(self._durations) * (self._total - step)
        text = f"left {datetime.timedelta(seconds=round(left))}" if len(self._durations) > 1 else ""
        self._progress.update(self._task, completed=step, status=status, left=text)
        last = step == self._total
        if not self._live and (now - self._last_line > _PLAIN_SECONDS or last):
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
