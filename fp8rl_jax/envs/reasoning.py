"""Separates what a reply thinks from what it answers.

Models write their thoughts between marks of their own. `THOUGHTS` lists these marks, `FINAL` is the
head of the channel in which a model of the harmony form (gpt-oss) answers, and `ANSWERS` lists the
marks around an answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Marks(NamedTuple):
    """The texts before and behind a part of a reply."""

    begin: str
    end: str


FINAL = "<|channel|>final<|message|>"
THOUGHTS = (
    Marks("<think>", "</think>"),
    Marks("<thinking>", "</thinking>"),
    Marks("<reasoning>", "</reasoning>"),
    Marks("<reason>", "</reason>"),
    Marks("<thought>", "</thought>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("[THINK]", "[/THINK]"),  # Magistral
    Marks("◁think▷", "◁/think▷"),  # Kimi-VL
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Marks("<|channel|>analysis", FINAL),
    Marks("<|channel|>commentary", FINAL),
)
ANSWERS = (
    Marks("<answer>", "</answer>"),
    Marks("<|begin_of_box|>", "<|end_of_box|>"),  # GLM
)
_ENDS = re.compile(r"(?:<\|(?:return|end|im_end|eot_id|endoftext)\|>|</s>)\s*\Z")
_MARK = re.compile("|".join(re.escape(m) for m in sorted({*sum(THOUGHTS, ())}, reverse=True)))


def behind_reasoning(reply: str) -> str:
    """Returns the part of a reply behind its last thought: its answer. '' if a thought has no end,
    or nothing follows it.

    A thought that the prompt began has only the mark of its end. The time is linear in the reply's
    length.

    Example:
      >>> behind_reasoning("<think>Perhaps 8?</think>It is 9.")
      'It is 9.'
    """
    ends: set[str] = set()  # of the thought that is open
    start = 0
    for mark in _MARK.finditer(reply):
        if not ends:
            ends = {end for begin, end in THOUGHTS if begin == mark[0]}
            start = mark.end()
        elif mark[0] in ends:
            ends = set()
            start = mark.end()
    return "" if ends else _ENDS.sub("", reply[start:])


def last_tagged(text: str) -> str | None:
    """Returns the content of the last closed <answer>, or of GLM's box; None without one."""
    for begin, end in ANSWERS:
        before, closed, _ = text.rpartition(end)
        _, opened, inside = before.rpartition(begin)
        if opened and closed:
            return inside
    return None
