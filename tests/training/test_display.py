"""The time that is left, as a person sees it."""

from __future__ import annotations

import datetime
import io

import pytest
from rich.console import Console

from fp8rl_jax.training import progress


@pytest.mark.parametrize("terminal", [False, True])
def test_one_long_step_does_not_change_the_time_left(terminal, monkeypatch):
    """Step 1 compiles for 60 s, step 7 analyses a drift for 100 s; the others take 2 s."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", 0.0)
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, color_system=None)
    with progress.Display(console) as display:
        display.phase("SFT", total=1000, completed=0)
        for step in range(1, 11):
            clock[0] += {1: 60.0, 7: 100.0}.get(step, 2.0)
            text.truncate(0)
            display.step("sft", {"step": step, "loss": 1.0})
            display._progress.refresh()
            left = datetime.timedelta(seconds=2 * (1000 - step))
            assert (f"left {left}" in text.getvalue()) == (step > 1)
