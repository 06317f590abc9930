"""Reward functions in the forms of TRL and verl, and rewards that are no numbers."""

from __future__ import annotations

import array
import sys
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import Question, Scoring, Tally, load_rewards
from fp8rl_jax.envs.rewards.call import as_number

_SOURCE = """
import functools
import json
def trl(completions, answer, **kwargs):
    assert isinstance(completions[0], str) and "prompts" in kwargs and "level" in kwargs
    return [float(c == a) for c, a in zip(completions, answer)]
def trl_columns(prompts, completions, level):
    return [len(p) * l for p, l in zip(prompts, level)]
def trl_chat(prompts, completions, **kwargs):
    assert prompts[0][-1]["role"] == "user" and "prompt" not in kwargs
    return [float(len(c[0]["content"])) for c in completions]
def trl_none(completions, level, **kwargs):
    return [None if l == 1 else 1.0 for l in level]
def swapped(prompt, answer, response): return float((prompt, answer, response) == RIGHT)
def without_prompt(response, answer, tolerance=0.1):
    return float((answer, response) == RIGHT[1:]) - tolerance
def prompt_last(response, answer, prompt=None): return swapped(prompt, answer, response)
def row_first(row, response): return row["level"] + len(response)
def alone(response): return len(response)
def keywords(response, **given): return float({**given, "response": response} == NAMED)
def keyword_only(*, answer, response, prompt): return swapped(prompt, answer, response)
def other_names(x, y, z): return swapped(x, z, y)
def usual_names(question, prediction, reference): return swapped(question, reference, prediction)
def any_number(*texts): return swapped(texts[0], texts[2], texts[1])
def positional_only(prompt, response, answer, /): return swapped(prompt, answer, response)
def bound(scale, response, answer): return scale * (answer, response) == RIGHT[1:]
RIGHT, NAMED = ("quest", "5", "ab"), {"prompt": "quest", "answer": "5", "response": "ab"}
partial_keyword = functools.partial(swapped, prompt="quest")
partial_place = functools.partial(bound, 1)
partial_option = functools.partial(without_prompt, tolerance=0.5)
def completion_first(completion, answer, prompt=None): return 1.0
def prediction_first(prediction, reference, question=None): return 1.0
def answer_second(question, answer, reference): return 1.0
def needs_more(response, answer, tolerance): return 1.0
def prompt_fourth(text, completion, reference, prompt=None): return 1.0
def row_in_place(text, row, other): return 1.0
def swapped_only(prompt, answer, response, /): return 1.0
def trl_two(completions, **kwargs): return [1.0, 2.0]
def trl_ids(completions, completion_ids): return [1.0]
async def trl_async(completions, **kwargs): return [1.0]
def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "math" and extra_info == {"index": 7} and ground_truth == {"target": 5}
    return float(solution_str)
def verl_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str == ground_truth), "acc": True}
def verl_no_score(solution_str, ground_truth): return {"acc": 1.0}
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]
def verl_more(data_source, solution_str, ground_truth, tokenizer): return 1.0
def text(prompt, response, answer): return "0.5"
def data(prompt, response, answer): return b"1"
def true(prompt, response, answer): return True
def nothing(prompt, response, answer): pass
def some(prompt, response, answer): return len(response) or None
"""
_VERL = {
    "reward_model": {"ground_truth": {"target": 5}},
    "data_source": "math",
    "extra_info": {"index": 7},
}
_CHAT = {"prompt": [{"role": "user", "content": "q"}]}


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards_of_others.py").write_text(_SOURCE)
    yield
    sys.modules.pop("rewards_of_others", None)


def _score(names: str, rows: list[dict], responses: list[str]):
    terms = load_rewards(", ".join(f"rewards_of_others:{name}" for name in names.split()))
    questions = [Question("quest", "5", row=row) for row in rows]
    tally = Tally("RL step 1")
    values, by_name = Scoring(terms, questions, responses).result(tally)
    return str(values), [str(v) for v in by_name.values()], tally


@pytest.mark.parametrize(
    ("name", "row", "response", "value"),
    [
        ("trl", {"level": 1}, "5", 1.0),
        ("trl", {"level": 1, "answer": "6"}, "5", 0.0),
        ("trl_columns", {"level": 3}, "", 15.0),
        ("trl_chat", _CHAT, "abc", 3.0),
        ("verl", _VERL, "0.5", 0.5),
        ("verl_dict", {}, "5", 1.0),
        ("verl_batch", {}, "5", 1.0),
        ("true", {}, "", 1.0),
    ],
)
def test_functions_of_trl_and_verl_are_called_as_there(name, row, response, value):
    values, _, tally = _score(name, [row], [response])
    assert (values, tally.errors) == (f"[{value}]", 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "a value of type str, which is no number"),
        ("data", "a value of type bytes, which is no number"),
        ("trl_two", "and not a list with one reward"),
        ("verl_no_score", "a dict without 'score'"),
    ],
)
def test_what_is_no_reward_is_a_failure(name, message):
    values, _, tally = _score(name, [{}], ["0.5"])
    assert (values, tally.errors) == ("[nan]", 1) and message in tally._first[
        f"the reward 'rewards_of_others:{name}'"
    ].text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("swapped", 1.0),
        ("without_prompt", 0.9),
        ("prompt_last", 1.0),
        ("row_first", 5.0),
        ("alone", 2.0),
        ("keywords", 1.0),
        ("keyword_only", 1.0),
        ("other_names", 1.0),
        ("usual_names", 1.0),
        ("any_number", 1.0),
        ("positional_only", 1.0),
        ("partial_keyword", 1.0),
        ("partial_place", 1.0),
        ("partial_option", 0.5),
    ],
)
def test_arguments_go_by_the_names_of_parameters(name, value):
    values, _, tally = _score(name, [{"level": 3}], ["ab"])
    assert (values, tally.errors) == (f"[{value}]", 0)


@pytest.mark.parametrize(
    "name",
    [
        "completion_first",
        "prediction_first",
        "answer_second",
        "needs_more",
        "prompt_fourth",
        "row_in_place",
        "swapped_only",
    ],
)
def test_names_that_contradict_their_places_are_refused(name):
    with pytest.raises(UserError, match=f"{name}' takes .*; write a function of .prompt, resp"):
        load_rewards(f"rewards_of_others:{name}")


@pytest.mark.parametrize(
    "value",
    [
        memoryview(b"1"),
        array.array("b", b"1"),
        bytearray(b"1"),
        np.array("1"),
        np.bytes_(b"1"),
        np.array("1", object),
        1 + 0j,
        np.complex64(1),
        jnp.complex64(1),
    ],
    ids=range(9),
)
def test_buffers_texts_and_complex_numbers_are_no_numbers(value):
    assert as_number(value).kind == "no number"


@pytest.mark.parametrize(
    "value", [1, True, np.int8(1), np.bool_(1), jnp.bfloat16(1), Fraction(1), np.array(1, object)]
)
def test_numbers_of_any_class_are_numbers(value):
    assert as_number(value) == 1.0


def test_none_says_that_a_reward_does_not_apply():
    """The others are summed; a response to which none applies is not scored; a call that fails
    leaves its response out, whatever the others pay."""
    rows = [{"level": 1}, {"level": 2}, {"level": 1}]
    values, by_name, tally = _score("trl_none some", rows, ["ab", "abc", ""])
    assert values == "[2.0, 4.0, nan]" and by_name == ["[nan, 1.0, nan]", "[2.0, 3.0, nan]"]
    assert tally.errors == 0
    tally.check()
    values, _, tally = _score("text some", [{}], ["ab"])
    assert (values, tally.errors) == ("[nan]", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trl_ids", "is called as TRL does, without completion_ids: give it a default value"),
        ("trl_async", "is asynchronous; write a plain function"),
        ("verl_more", "is called as verl does, without tokenizer: give it a default value"),
    ],
)
def test_what_cannot_be_given_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_rewards(f"rewards_of_others:{name}")


def test_auto():
    """A task's own scorer where there is one."""
    names = [
        load_rewards("auto", tasks=[task])[0].name
        for task in ("countdown", "basic_arithmetic", "train.jsonl")
    ]
    assert names == ["task_score", "exact_match", "exact_match"]
    assert load_rewards("auto", tasks=["a.jsonl", "countdown"])[0].name == "task_score"
