"""What a person sees of a run: the time that is left, what compiles, evaluations."""

from __future__ import annotations

import datetime
import io

import pytest
from rich.console import Console

from fp8rl_jax.base import compiling
from fp8rl_jax.training import progress


class _Times:
    """Stands for `CompileTimes`."""

    def __init__(self, seconds):
        self.seconds, self.kept = seconds, []

    def expected(self, phase):
        return self.seconds

    left = expected

    def begin(self):
        self.kept.clear()

    def end(self, phase):
        self.kept.append(phase)


@pytest.mark.parametrize("terminal", [False, True])
def test_one_long_step_does_not_change_the_time_left(terminal, monkeypatch):
    """Step 1 compiles for 60 s, step 7 analyses a drift for 100 s; the others take 2 s."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", 0.0)
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, color_system=None)
    with progress.Display(console) as display:
        display.phase("SFT", total=1000, completed=0, times=_Times(60.0))
        for step in range(1, 11):
            clock[0] += {1: 60.0, 7: 100.0}.get(step, 2.0)
            text.truncate(0)
            display.step("sft", {"step": step, "loss": 1.0})
            display._progress.refresh()
            left = datetime.timedelta(seconds=2 * (1000 - step))
            assert (f"left {left}" in text.getvalue()) == (step > 1)


def _compile(name, *seconds):
    """What JAX reports: tracing, lowering and, with a third number, compiling."""
    parts = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
    for part, taken in zip(parts, seconds, strict=False):
        text = name if part == "jaxpr_trace" else f"jit({name})"
        compiling._heard(f"/jax/core/compile/{part}_duration", taken, fun_name=text)


def test_compiling_is_shown_until_the_first_step_ends():
    text, times = io.StringIO(), _Times(75.0)
    with progress.Display(Console(file=text, width=100)) as display:
        display.phase("RL", total=2, completed=0, times=times)
        assert "RL: 2 steps; the first one compiles, about 1 min 15 s (less if" in text.getvalue()
        times.seconds = 21.0
        _compile("tiny", 0.01, 0.01, 0.01)
        _compile("sample", 40.0, 10.0, 4.0)
        assert times.kept == []
        display.step("metrics", {"step": 1, "reward_mean": 1.0})
        assert times.kept == ["RL"]
        _compile("score", 2.0, 2.0, 2.0)
        display.step("metrics", {"step": 2, "reward_mean": 1.0})
    lines = [line for line in text.getvalue().splitlines() if "compiled" in line]
    assert lines == [
        "  compiled sample in 40 s, about 21 s of compiling left",
        "  compiled score in 2 s",
    ]
    assert times.kept == ["RL"]


def test_a_terminal_shows_the_program_at_hand():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    with progress.Display(console) as display:
        display.phase("RL", total=2, completed=0, times=_Times(30.0))
        _compile("train_step", 12.0, 3.0)
        display._progress.refresh()
        assert "compiling train_step, 12 s, about 30 s of compiling left" in text.getvalue()
        _compile("train_step", 0.0, 0.0, 5.0)
        text.truncate(0)
        display._progress.refresh()
        assert "compil" not in text.getvalue()


def test_the_first_set_is_shown():
    text = io.StringIO()
    display = progress.Display(Console(file=text, highlight=False))
    record = {"phase": "rl", "step": 2, "accuracy_greedy": 0.5, "questions": 4}
    display.evaluations(
        [
            record | {"set": "a", "accuracy_sampled": 0.25},
            record | {"set": "b", "accuracy_sampled": 0.75},
        ]
    )
    display.phase("SFT", 9, 0, _Times(60.0))
    display.step("sft", {"step": 9, "loss": 1.0})
    assert "held out of a after rl step 2: sampled 0.250" in text.getvalue()
    assert "held out of b after rl step 2: sampled 0.750" in text.getvalue()
    assert "accuracy 0.250/0.500" in text.getvalue()
