"""The form of an environment: a question with rewards is the one of a single reply."""

from __future__ import annotations

import math
import pickle
import sys

import pytest

from fp8rl_jax.envs import Question, Scoring, Step, Tally, load_rewards, one_reply

_SOURCE = """
import math
def text(prompt, response, answer): return len(prompt) + (response == answer)
def length(response): return len(response)
def level(response, row): return row["level"]
def trl(completions, level, **kwargs): return [l + len(c) for c, l in zip(completions, level)]
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths)]
def verl_dict(solution_str, ground_truth): return {"score": float(solution_str == ground_truth)}
def nothing(prompt, response, answer): return None
def fails(prompt, response, answer): raise LookupError("nothing")
def leaves(prompt, response, answer): raise SystemExit
def no_number(prompt, response, answer): return "1"
def infinite(prompt, response, answer): return math.inf
def large(prompt, response, answer): return 3e38
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "steps.py").write_text(_SOURCE)
    yield
    sys.modules.pop("steps", None)


def test_a_question_with_rewards_is_an_environment_of_one_reply():
    """Its step pays what `Scoring` does, in every form of a reward, and in sums of them."""
    question, row = Question("quest", "5", row={"level": 2}), {"level": 2}
    expected = {
        "steps:text": 6.0,
        "steps:trl": 3.0,
        "steps:verl_batch": 1.0,
        "steps:verl_dict": 1.0,
        "steps:level": 2.0,
        "exact_match": 1.0,
        "gsm8k": 1.0,
        "math_equal": 1.0,
        "0.1*steps:text, 0.2*steps:length, -0.7*exact_match": 0.1 * 6 + 0.2 * 1 + -0.7 * 1,
        "steps:nothing, 3*steps:length": 3.0,
        "steps:nothing": math.nan,
        "steps:fails": math.nan,
        "exact_match, steps:fails": math.nan,
        "steps:leaves": math.nan,
        "steps:no_number": math.nan,
        "steps:infinite": math.nan,
        "steps:large": 3e38,
        "2*steps:large": math.nan,
    }
    terms = {text: load_rewards(text) for text in expected}
    scorings = {text: Scoring(terms[text], [question], ["5"]) for text in expected}
    for text, reward in expected.items():
        (scored,), _ = scorings[text].result(Tally("RL step 1"))
        found = one_reply(question, terms[text])(None, "5", row)
        assert str(found) == str(Step(None, "", scored, True)), text
        assert str(scored) == str(reward), text


def _guess(state, reply, row):
    """Two replies, by hand: the form needs no more than this."""
    turn = (state or 0) + 1
    if reply == row["number"]:
        return Step(turn, reward=1.0 / turn, done=True)
    return Step(turn, observation="<" if reply > row["number"] else ">", done=turn == 2)


def test_a_function_of_several_replies():
    """State in, state out: an episode can go on in another process, from its last step."""
    first = _guess(None, "7", {"number": "5"})
    assert first == (1, "<", 0.0, False)
    again = pickle.loads(pickle.dumps(first))
    assert _guess(again.state, "5", {"number": "5"}) == (2, "", 0.5, True)
    assert _guess(first.state, "2", {"number": "5"}) == (2, ">", 0.0, True)
