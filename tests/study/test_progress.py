"""What is printed while a cell is measured."""

import types

from studies import progress


def test_part_says_what_is_left_every_ten_seconds(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    part = progress.Part("sequences scored", 80, lines.append)
    for done in range(10, 81, 10):
        now[0] += 4.0
        part.reach(done)
    assert lines == [
        "  sequences scored: 30 of 80, left 20 s",
        "  sequences scored: 60 of 80, left 8 s",
    ]
