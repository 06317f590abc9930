"""Questions and rewards: nothing leaks between splits, and a user's code cannot kill a run."""

import collections
import re
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import (
    check_task,
    load_reward,
    make_questions,
    split_of,
)

_TASK = "basic_arithmetic"
_OPTIONS = {
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 2,
    "operators": ["+", "-"],
    "allow_parentheses": False,
    "allow_negation": False,
}
_SMALL = _OPTIONS | {"max_terms": 2, "max_digits": 1, "operators": ["+"]}
_COUNTS = {"train": 60, "sft": 30, "eval": 20}


def _texts(questions):
    return {split: [q.text for q in found] for split, found in questions.items()}


# Questions.


def test_counts_are_exact_and_questions_distinct():
    """As many as asked for, none twice, in every split."""
    texts = _texts(make_questions(_TASK, _OPTIONS, _COUNTS, 0))
    assert {split: len(found) for split, found in texts.items()} == _COUNTS
    assert all(len(set(found)) == len(found) for found in texts.values())


def test_a_split_without_a_count_is_empty():
    questions = make_questions(_TASK, _OPTIONS, {"eval": 3}, 0)
    assert {split: len(found) for split, found in questions.items()} == {
        "sft": 0,
        "train": 0,
        "eval": 3,
    }


def test_splits_are_disjoint_across_seeds():
    """A text seen in one split, under any seed and any counts, is in no other split.

    The task's space is small on purpose, so that seeds do repeat each other's questions.
    """
    home = {}
    seen = collections.Counter()
    for seed in range(6):
        counts = {"train": 25 + seed, "sft": 20 - seed, "eval": 5}
        for split, texts in _texts(make_questions(_TASK, _SMALL, counts, seed)).items():
            for text in texts:
                assert home.setdefault(text, split) == split == split_of(text)
                seen[text] += 1
    assert max(seen.values()) > 1


def test_seeds_give_other_questions():
    """The same seed repeats itself; another one gives other texts or another order."""
    first, again, other = (
        _texts(make_questions(_TASK, _OPTIONS, _COUNTS, seed)) for seed in (3, 3, 4)
    )
    assert first == again
    for split in _COUNTS:
        assert first[split] != other[split]
        assert len(set(first[split]) & set(other[split])) < len(first[split]) / 2


def test_answers_belong_to_their_questions():
    """Each answer is the value of the sum that its question asks for."""
    for found in make_questions(_TASK, _OPTIONS, _COUNTS, 1).values():
        for question in found:
            first, *rest = re.findall(r"\d+|[-+] \d+", question.text)
            assert rest
            total = sum(int(term.replace(" ", "")) for term in rest)
            assert int(question.answer) == int(first) + total


def test_too_small_a_space_names_the_split():
    """Sums of two digits: the message names split, task and both numbers."""
    message = (
        r"'basic_arithmetic' .* only \d+ distinct questions for the split 'train', "
        r"5000 are asked for: widen env\.task_options or lower"
    )
    with pytest.raises(UserError, match=message):
        make_questions(_TASK, _SMALL, {"train": 5000, "eval": 1}, 0)


def test_unknown_task_suggests_the_nearest_name():
    with pytest.raises(UserError, match=r"no task 'basic_aritmetic'; did you mean 'basic_arith"):
        check_task("basic_aritmetic", {})
    with pytest.raises(UserError, match=r"no task 'zzzz'; see reasoning_gym"):
        make_questions("zzzz", {}, {"train": 1}, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"no_such_option": 1},
        {"min_terms": 5, "max_terms": 2},
        {"min_terms": "three"},
        {"operators": []},
        {"operators": ["^"]},
        {"seed": 1},
        {"size": 10},
    ],
)
def test_bad_options_are_refused(options):
    """The message names the task and shows the options."""
    with pytest.raises(UserError, match=r"env\.task_options: task 'basic_arithmetic' refuses \{"):
        check_task(_TASK, options)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("calendar_arithmetic", {"tasks": []}),
        ("caesar_cipher", {"delimiter": "zzz"}),
        ("basic_arithmetic", {"operators": {"+": 1}}),
        ("composite", {"datasets": "chain_sum"}),
    ],
)
def test_bad_options_are_refused_whatever_the_task_raises(task, options):
    """A task may fail on its options with any exception; the user gets one sentence."""
    with pytest.raises(UserError, match="refuses"):
        check_task(task, options)


def test_good_options_pass():
    check_task(_TASK, _OPTIONS)
    check_task("chain_sum", {})


@hypothesis.given(st.text())
def test_split_of_every_text(text):
    """Each text has one split."""
    assert split_of(text) in ("sft", "train", "eval")


def test_split_shares():
    """About a tenth, three tenths and six tenths."""
    counts = collections.Counter(split_of(f"question {i}") for i in range(5000))
    assert counts["eval"] / 5000 == pytest.approx(0.1, abs=0.02)
    assert counts["sft"] / 5000 == pytest.approx(0.3, abs=0.03)
    assert counts["train"] / 5000 == pytest.approx(0.6, abs=0.03)


def test_splits_are_recorded():
    """By the first byte of sha256, modulo 10 (from the sha256sum command), for all versions."""
    first_bytes = {"": 0xE3, "15": 0xE6, "1 + 1 =": 0x15, "13": 0x3F, "3": 0x4E, "5": 0xEF}
    splits = ("eval", "sft", "sft", "sft", *["train"] * 6)
    assert {text: split_of(text) for text in first_bytes} == {
        text: splits[byte % 10] for text, byte in first_bytes.items()
    }


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
    assert load_reward("exact_match")("question", response, answer) == value


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
    assert load_reward("math_equal")("question", response, answer) == value


# Rewards of a user.


@pytest.fixture
def module(tmp_path, monkeypatch):
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


def test_a_function_of_a_module(module):
    """It is called with prompt, response and answer, in this order."""
    name = module("def join(prompt, response, answer):\n    return prompt + response + answer\n")
    assert load_reward(f"{name}:join")("a", "b", "c") == "abc"


def test_a_module_in_the_current_directory(tmp_path, monkeypatch):
    """No PYTHONPATH is needed for a file beside the user."""
    (tmp_path / "reward_beside_me.py").write_text("def one(*_):\n    return 1\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert load_reward("reward_beside_me:one")("", "", "") == 1
    del sys.modules["reward_beside_me"]


@pytest.mark.parametrize("name", ["nearly_exact", "module:", ":function", ""])
def test_a_name_that_is_neither(name):
    with pytest.raises(
        UserError,
        match=r"write one of auto, exact_match, task_score, math_equal, gsm8k, gsm8k_strict, or",
    ):
        load_reward(name)


def test_a_module_that_is_not_there():
    with pytest.raises(
        UserError,
        match=r"'no_such_module:f' cannot be imported \(ModuleNotFoundError: .*\); check that it "
        r"is written 'package.module:function' and that the module is in the current directory",
    ):
        load_reward("no_such_module:f")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise RuntimeError('broken inside')\n", r"RuntimeError: broken inside"),
        ("def f(:\n", "SyntaxError"),
        ("x = 1\n", "AttributeError"),
        ("import no_such_dependency\n", "ModuleNotFoundError"),
    ],
)
def test_a_module_that_fails(module, source, error):
    """Whatever the module raises stands in the sentence."""
    with pytest.raises(UserError, match=rf"cannot be imported \({error}"):
        load_reward(f"{module(source)}:f")


def test_something_that_is_no_function(module):
    with pytest.raises(UserError, match="is not a function"):
        load_reward(f"{module('f = 3')}:f")
