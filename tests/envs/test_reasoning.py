"""What of a reply is its answer, for every family's marks of a thought."""

from __future__ import annotations

import pytest
from fuzz import time_limit

from fp8rl_jax.envs.reasoning import THOUGHTS, behind_reasoning, last_tagged

_HARMONY = "<|channel|>analysis<|message|>5?<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("marks", THOUGHTS, ids=lambda marks: marks.begin)
def test_every_familys_thought(marks):
    begin, end = marks
    assert behind_reasoning(f"{begin}5?{end}6") == "6"
    assert behind_reasoning(f"5? begun in the prompt{end}6") == "6"
    assert behind_reasoning(f"{begin}5?{end}6?{begin}7?{end}8") == "8"
    assert behind_reasoning(f"{begin}5 is cut off") == ""
    assert behind_reasoning(f"{begin}5{end}") == ""
    assert behind_reasoning(f"6 {begin}but") == ""


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("6", "6"),
        ("", ""),
        (f"{_HARMONY}6<|return|>", "6"),
        ("<|channel|>final<|message|>6", "6"),
        ("<think>a</thinking>5", ""),
        ("<think>[THINK]a</think>6", "6"),
        ("<THINK>5</THINK>", "<THINK>5</THINK>"),
        ("6<|im_end|>\n", "6"),
    ],
)
def test_further_replies(reply, answer):
    assert behind_reasoning(reply) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer> or <answer>6</answer>", "6"),
        ("<answer>5</answer> <answer>6", "5"),
        ("<|begin_of_box|>6<|end_of_box|>", "6"),
        ("<answer>6", None),
        ("6</answer>", None),
    ],
)
def test_the_last_tag(text, answer):
    assert last_tagged(text) == answer


def test_long_replies_take_time_in_proportion():
    with time_limit():
        behind_reasoning("<think></think><" * 16_000)
