"""Steps of an environment, called in workers: right results come back, wrong ones are failures that
name the user's line."""

from __future__ import annotations

import pickle
import sys

import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import Answered, StepCall, load_step
from fp8rl_jax.envs.rewards.call import Failure
from fp8rl_jax.envs.rewards.scoring import begin_calls

_SOURCE = """
import math, random, time
from fp8rl_jax.envs import Step

class Counted:
    def __init__(self, turns): self.turns = turns

def count(state, reply, row):
    turns = 1 + (state.turns if state else 0)
    return Step(Counted(turns), f"{row['name']} {turns}", reward=0.5 * turns, done=turns == 2)

def plain(state, reply, row): return (None, reply.upper(), 1, False)
def chance(state, reply, row): return Step(None, str(random.random()))
def unscored(state, reply, row): return Step(None, "", math.nan, True)
def fails(state, reply, row): raise LookupError("nothing there")
def text(state, reply, row): return "higher"
def number(state, reply, row): return Step(None, 7)
def infinite(state, reply, row): return Step(None, "", math.inf)
def worth(state, reply, row): return Step(None, "", "1")
def holds(state, reply, row): return Step(lambda: 0, "")
def sleeps(state, reply, row): time.sleep(30)
def many(state, reply, row): return Step(None, "", 0.0, __import__("numpy").zeros(2))
def false(state, reply, row): return Step(None, done="false")
def large(state, reply, row): return Step(bytes(2**24))
def two(state, reply): return Step(state)
def four(state, reply, row, more): return Step(state)
def named(cut, reply, row): return Step(None, f"{reply} {cut}")
def any_name(state, reply, row, **more): return Step(None, f"{reply} {more}")
def told(state, reply, row, cut): return Step(None, f"{reply} {cut}")
def half(state, reply, row): return Step(None, "\\ud800")

def double(x: int) -> int:
    '''Doubles a number.

    Args:
      x: the number.
    '''
    return 2 * x

TOOLS = [double]
NOTHING = []
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_steps.py").write_text(_SOURCE)
    yield
    sys.modules.pop("some_steps", None)


def _called(
    name: str, reply: str = "a", state: bytes = b"", role: str = "step", seconds=30.0, **more
):
    term = load_step(f"some_steps:{name}", role, seconds)
    (call,) = begin_calls(term, [StepCall(reply, state, {"name": "turn"}, **more)])
    return call.result()


def test_an_episode_goes_from_worker_to_worker():
    """The state is the worker's alone: here it stays pickled, and the next call gets it back."""
    first = _called("count")
    assert first == Answered(first.state, ["turn 1"], 0.5, False, [])
    assert isinstance(first.state, bytes)
    assert _called("count", state=first.state)[1:4] == (["turn 2"], 1.0, True)
    assert _called("count") == first


def test_results_of_every_form():
    assert _called("plain", "low") == Answered(b"", ["LOW"], 1.0, False, [])
    assert _called("chance", "a") == _called("chance", "a") != _called("chance", "b")
    assert _called("half").texts == ["?"], "what no tokenizer encodes"
    call = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
    found = _called("TOOLS", call, role="tools")
    assert found == Answered(b"", ["8"], 0.0, False, [("double", "")])
    assert _called("TOOLS", call * 2, role="tools").texts == ["8", "8"]
    assert _called("TOOLS", "8", role="tools") == Answered(b"", [""], 0.0, True, [])


def test_a_step_may_ask_whether_the_reply_was_cut():
    """By a parameter of this name; a first one of this name is the state."""
    assert [_called("told", cut=cut).texts for cut in (False, True)] == [["a False"], ["a True"]]
    assert _called("any_name", cut=True).texts == ["a {'cut': True}"]
    assert _called("named", cut=True).texts == ["a None"]
    assert _called("plain", cut=True).texts == ["A"]
    cut = _called("TOOLS", "8", role="tools", cut=True)
    assert "was cut" in cut.texts[0] and not cut.done


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("fails", "LookupError", "nothing there"),
        ("text", "no Step", "it returned str, and not Step(state, ...)"),
        ("number", "no text", "an observation of type int"),
        ("infinite", "no finite number", "the reward inf"),
        ("unscored", "no finite number", "the reward nan"),
        ("worth", "no number", "a value of type str"),
        ("false", "no bool", "done='false', and not True or False"),
        ("holds", "AttributeError", "its state cannot be pickled"),
        ("many", "ValueError", "truth value of an array"),
        ("large", "large state", "16.0 MiB pickled, more than 16.0 (env.reward_memory_gb / 256)"),
        ("sleeps", "time limit", "longer than env.reward_timeout = 0.5 s"),
    ],
)
def test_failures_name_the_line(name, kind, text):
    found = _called(name, seconds=0.5 if name == "sleeps" else 30.0)
    assert isinstance(found, Failure) and found.kind == kind
    assert text in found.text and "some_steps.py, line" in found.place


@pytest.mark.parametrize(
    ("name", "role", "message"),
    [
        ("some_steps:two", "step", "takes other arguments; write a function of (state, reply, row"),
        ("some_steps:four", "step", "or of (state, reply, row, cut), that returns"),
        ("some_steps:TOOLS", "step", "is not a function; name one"),
        ("some_steps", "step", "write 'package.module:function'"),
        ("some_steps:missing", "tools", "env.tools: 'some_steps:missing' cannot be imported"),
        ("some_steps:NOTHING", "tools", "name a list of functions"),
        ("some_steps:double", "tools", "name a list of functions"),
    ],
)
def test_what_is_no_environment(name, role, message):
    with pytest.raises(UserError) as raised:
        load_step(name, role)
    assert message in str(raised.value)


def test_states_are_pickled_once_for_all_calls():
    """A step's result can be sent on as it is: to another process, or into a checkpoint."""
    first = _called("count")
    assert pickle.loads(pickle.dumps(first)) == first
