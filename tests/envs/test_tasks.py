"""Questions of generators: nothing leaks between splits."""

import collections
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import check_task, make_questions, split_of

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
