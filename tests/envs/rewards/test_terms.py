"""Built-in rewards against tables, a user's own, weighted sums, and rewards that take the row."""

from __future__ import annotations

import sys

import pytest

from fp8rl_jax.base.errors import RewardError, UserError
from fp8rl_jax.envs import Question, Scoring, Tally, load_rewards, reward_names
from fp8rl_jax.envs.rewards.final_number import gsm8k, gsm8k_strict

_LONG = "So we add 12 and 30, then 5. " * 400
# (response, answer, reward, reward of the strict form)
_PAIRS = [
    ("#### 72", "72", 1, 1),
    ("#### 72.0", "72", 1, 1),
    ("#### 72.", "72", 1, 1),
    ("#### 72", "72.00", 1, 1),
    ("#### 1,072", "1072", 1, 1),
    ("#### 1072", "1,072", 1, 1),
    ("#### $18", "18", 1, 1),
    ("#### 18$", "18", 1, 1),
    ("#### -5", "-5", 1, 1),
    ("#### −5", "-5", 1, 1),
    ("#### -0", "0", 1, 1),
    ("#### 0.5", "1/2", 1, 1),
    ("####72", "72", 1, 0),
    ("####\n72", "72", 1, 0),
    ("work\n#### 72\nThat is 6 dozen.", "72", 1, 1),
    ("#### 10\nno, wait\n#### 72", "72", 1, 1),
    ("#### 72\nno, wait\n#### 10", "72", 0, 0),
    ("#### 10 #### 72", "72", 1, 1),
    ("#### seventy-two", "72", 0, 0),
    ("#### \nThe answer is 72", "72", 1, 0),
    ("72", "72", 1, 0),
    ("The answer is 72.", "72", 1, 0),
    ("6 dozen are 6*12=72", "72", 1, 0),
    ("72 is the answer to question 3", "72", 0, 0),
    (r"so \boxed{72}, as question 3 says", "72", 1, 0),
    (r"\boxed{10} or rather \boxed{72}.", "72", 1, 0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1, 0),
    (r"\boxed{\$1{,}072.50}", "1072.5", 1, 0),
    (r"\boxed{none} of 72", "72", 0, 0),
    ("1/2", "0.5", 1, 0),
    ("144/2", "72", 0, 0),
    ("72/0", "72", 0, 0),
    ("10-7=3", "3", 1, 0),
    ("10 - 7", "-7", 0, 0),
    ("temperature: (-4)", "-4", 1, 0),
    ("50%", "50", 1, 0),
    ("it costs 12,345.67, as agreed", "12345.67", 1, 0),
    (".5", "1/2", 1, 0),
    ("", "72", 0, 0),
    ("no number", "72", 0, 0),
    (_LONG + "#### 72", "72", 1, 1),
    ("#### 72 " + _LONG, "72", 0, 0),
    ("9" * 10_000, "9", 0, 0),
    ("1," * 5_000 + "072", "1072", 1, 0),
]


@pytest.mark.parametrize(("response", "answer", "value", "strict"), _PAIRS, ids=range(len(_PAIRS)))
def test_gsm8k(response, answer, value, strict):
    """Compared as numbers, not as text; the strict form wants the mark, near the end."""
    assert gsm8k("question", response, answer) == value
    assert gsm8k_strict("question", response, answer) == strict


def test_an_answer_without_a_number_is_an_error():
    """Else a run on the wrong data set would earn nothing and not say why."""
    tally = Tally("RL step 1")
    scoring = Scoring(load_rewards("gsm8k"), [Question("q", "Paris")], ["Paris"])
    assert str(scoring.result(tally)) == "([nan], {'gsm8k': [nan]})"
    assert tally.errors == 1
    with pytest.raises(RewardError, match="the answer 'Paris' is not a number"):
        tally.check()


@pytest.mark.parametrize(
    ("name", "response", "answer"),
    [
        ("exact_match", " 72\n", "72"),
        ("exact_match", "7 2", "7 2"),
        ("exact_match", " \n", None),
        ("math_equal", "The answer is $72$.", "72"),
        ("math_equal", r"\boxed{\frac{1}{2}}", "1/2"),
        ("math_equal", "none of those that we have been looking at all day long", None),
        ("gsm8k", "6*12=72, so\n#### 72.0", "72"),
        ("gsm8k", "1,072 or 1072.0", "1072"),
        ("gsm8k", "0.5", "1/2"),
        ("gsm8k", "none", None),
        ("gsm8k_strict", "3\n#### $1,072", "1072"),
        ("gsm8k_strict", "72", None),
    ],
)
def test_extract(name, response, answer):
    """Responses that are equal for the reward have one text, the vote of a majority."""
    assert load_rewards(name)[0].function.extract(response) == answer


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes `rewards_of_rows`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> None:
        (tmp_path / "rewards_of_rows.py").write_text(source)

    yield write
    sys.modules.pop("rewards_of_rows", None)


def test_the_row_is_the_fourth_argument(module):
    """By its name; rewards of three arguments go on as before."""
    module(
        "def level(prompt, response, answer, row):\n    return row['level']\n"
        "def length(prompt, response, answer):\n    return len(response)\n"
        "def scaled(prompt, response, answer, by=2):\n    return by\n"
    )
    questions = [Question("q", "a", row={"level": 3}), Question("q", "a", row={})]
    terms = load_rewards("rewards_of_rows:level, rewards_of_rows:length,rewards_of_rows:scaled")
    tally = Tally("RL step 1")
    values, by_name = Scoring(terms, questions, ["ab", "c"]).result(tally)
    assert str(by_name["rewards_of_rows:level"]) == "[3.0, nan]"
    assert by_name["rewards_of_rows:length"] == [2, 1]
    assert by_name["rewards_of_rows:scaled"] == [2, 2]
    assert (str(values), tally.errors) == ("[7.0, nan]", 1)


def test_a_reward_that_does_not_apply_leaves_a_conversation_its_environments(module):
    """The sum of nothing is 0 beside the environment's reward; a failure is no reward."""
    module(
        "def rare(prompt, response, answer, row):\n"
        "    return {'none': None, 'one': 1.0}[response]\n"
    )
    questions, said = [Question("q", "a")] * 3, [[{"role": "assistant", "content": "x"}]] * 3
    terms, tally = load_rewards("0.5*rewards_of_rows:rare"), Tally("RL step 1")
    values, _ = Scoring(terms, questions, ["none", "one", "other"], said).result(tally)
    assert (str(values), tally.errors) == ("[0.0, 0.5, nan]", 1)
    values, _ = Scoring(terms, questions[:1], ["none"]).result(tally)
    assert str(values) == "[nan]"


def test_weights():
    """A sum with weights; one reward alone is itself, without rounding."""
    question = [Question("q", "0.1")]
    terms = load_rewards("exact_match, -0.5*gsm8k, 2e-1 * gsm8k_strict")
    assert [(term.name, term.weight) for term in terms] == [
        ("exact_match", 1.0),
        ("gsm8k", -0.5),
        ("gsm8k_strict", 0.2),
    ]
    values, _ = Scoring(terms, question, ["0.1"]).result(Tally("RL step 1"))
    assert values == [1.0 - 0.5]
    assert reward_names("exact_match, 0.5*a.b:c") == ["exact_match", "a.b:c"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("much*gsm8k", "and 'much' is no weight: write a number other than 0"),
        ("0*gsm8k", "'0' is no weight"),
        ("1e-50*gsm8k", "'1e-50' is no weight"),
        ("nan*gsm8k", "'nan' is no weight"),
        ("gsm8k, 2*gsm8k", "with 'gsm8k' twice"),
        ("gsm8k,", "env.reward is ''; write one of auto, exact_match"),
        ("gsm8k, near", "env.reward is 'near'; write one of"),
        (
            "rewards_of_rows:two",
            r"takes \(prompt, answer\); write a function of \(prompt, response",
        ),
        ("rewards_of_rows:four", r"takes \(a, b, c, d\)"),
    ],
)
def test_what_cannot_be_a_reward(text, message, module):
    module("def two(prompt, answer):\n    pass\ndef four(a, b, c, d):\n    pass\n")
    with pytest.raises(UserError, match=message):
        load_rewards(text)


# Built-in rewards.


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42", 1.0),
        ("42", "42 ", 1.0),
        ("42.", "42", 0.0),
        ("4 2", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        ("", "42", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match(response, answer, value):
    """The whole response or nothing: no credit for an answer inside other text."""
    assert load_rewards("exact_match")[0].function("question", response, answer) == value


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("1/2", "0.5", 1.0),
        ("0.5", "1/2", 1.0),
        (r"$\frac{1}{2}$", "0.5", 1.0),
        ("the answer is 4", "4", 1.0),
        ("50%", "0.5", 1.0),
        ("-1/2", "-0.5", 1.0),
        ("2 + 4 = 6.", "6", 1.0),
        ("2 + 4 =", "6", 0.0),
        ("6 + 0", "6", 0.0),
        ("2 * 3", "6", 0.0),
        ("8 / 2 =", "4", 0.0),
        ("2^3", "8", 0.0),
        ("$x + 1$", "$1 + x$", 1.0),
        ("1/3", "0.5", 0.0),
        ("5", "4", 0.0),
        ("", "4", 0.0),
        ("no idea", "4", 0.0),
        ("no idea", "no idea", 1.0),
    ],
)
def test_math_equal(response, answer, value):
    """Equal as mathematics, or the same few words; where a number is asked for, the question that
    it answers earns nothing."""
    assert load_rewards("math_equal")[0].function("question", response, answer) == value


# Rewards of a user.


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module with the given source and makes it importable; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(source):
        name = f"user_reward_{len(names)}_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_function_of_a_module(user_module):
    """It is called with prompt, response and answer, in this order."""
    name = user_module(
        "def join(prompt, response, answer):\n    return prompt + response + answer\n"
    )
    assert load_rewards(f"{name}:join")[0].function("a", "b", "c") == "abc"


def test_a_module_in_the_current_directory(tmp_path, monkeypatch):
    """No PYTHONPATH is needed for a file beside the user."""
    (tmp_path / "reward_beside_me.py").write_text("def one(*_):\n    return 1\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert load_rewards("reward_beside_me:one")[0].function("", "", "") == 1
    del sys.modules["reward_beside_me"]


@pytest.mark.parametrize("name", ["nearly_exact", "module:", ":function", ""])
def test_a_name_that_is_neither(name):
    with pytest.raises(
        UserError,
        match=r"write one of auto, exact_match, task_score, math_equal, gsm8k, gsm8k_strict, or",
    ):
        load_rewards(name)


def test_a_module_that_is_not_there():
    with pytest.raises(
        UserError,
        match=r"'no_such_module:f' cannot be imported \(ModuleNotFoundError: .*\); check that it "
        r"is written 'package.module:function' and that the module is in the current directory",
    ):
        load_rewards("no_such_module:f")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise RuntimeError('broken inside')\n", r"RuntimeError: broken inside"),
        ("def f(:\n", "SyntaxError"),
        ("x = 1\n", "AttributeError"),
        ("import no_such_dependency\n", "ModuleNotFoundError"),
    ],
)
def test_a_module_that_fails(user_module, source, error):
    """Whatever the module raises stands in the sentence."""
    with pytest.raises(UserError, match=rf"cannot be imported \({error}"):
        load_rewards(f"{user_module(source)}:f")


def test_something_that_is_no_function(user_module):
    with pytest.raises(UserError, match="is not a function"):
        load_rewards(f"{user_module('f = 3')}:f")
