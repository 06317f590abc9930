"""Pairs of an answer and a response: what the rewards of mathematics pay, beside their peers.

pairs.json has for each pair the right value, what the scorers of TRL, verl and math-verify pay
(tests/helpers/peer_rewards.py), and why where that is not right.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import runpy

import peer_rewards
import pytest
from fuzz import time_limit
from peer_rewards import PEERS

from fp8rl_jax.envs import load_rewards
from fp8rl_jax.envs.rewards.answer_part import bold_number
from fp8rl_jax.envs.rewards.final_number import gsm8k
from fp8rl_jax.envs.rewards.math_answer import math_answer, math_equal
from fp8rl_jax.envs.rewards.written_number import last_number, whole_number

_ALL = json.loads(peer_rewards.FILE.read_text())
_PAIRS = _ALL["pairs"]


def _box(content: str) -> str:
    return rf"\boxed{{{content}}}"


def _wrong(reward, pairs, expected) -> list:
    found = [(p, reward("question", p["response"], p["answer"])) for p in pairs]
    return [(p["answer"], p["response"], value) for p, value in found if value != expected(p)]


@pytest.mark.parametrize("part", range(4))
def test_math_equal(part):
    assert not _wrong(math_equal, _PAIRS[part::4], lambda p: p["right"])


def test_further_pairs_of_a_careful_reader():
    """[answer, response, right reward], without what other libraries pay."""
    pairs = json.loads(peer_rewards.FILE.with_name("further_pairs.json").read_text())
    assert [p for p in pairs if math_equal("question", p[1], p[0]) != p[2]] == []


def test_gsm8k():
    """The same, where the answer is a number: it is the number alone that counts, not its name, and
    a box that is not closed is no mark."""
    numbers = [p for p in _PAIRS if whole_number(p["answer"], right=True)]
    assert len(numbers) > 100
    assert not _wrong(gsm8k, numbers, lambda p: p.get("gsm8k", p["right"]))


def test_gsm8k_reads_bold_numbers_and_denials():
    pairs = json.loads(peer_rewards.FILE.with_name("further_pairs.json").read_text())
    chosen = [p for p in pairs if bold_number(p[1]) or ", not " in p[1]]
    chosen = [p for p in chosen if whole_number(p[0], right=True)]
    assert len(chosen) > 10
    assert [p for p in chosen if gsm8k("question", p[1], p[0]) != p[2]] == []


def test_every_difference_from_a_peer_has_its_reason():
    for pair in _PAIRS:
        differ = {n for n, v in zip(PEERS, pair["peers"], strict=True) if v != pair["right"]}
        assert differ == {*pair.get("why", {})}, pair
        assert {*pair.get("why", {}).values()} <= {*_ALL["reasons"]}


@pytest.mark.parametrize("counted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_of_pairs_is_what_the_rewards_pay(counted):
    scripts = pathlib.Path(__file__).parents[3] / "docs/scripts"
    page = runpy.run_path(str(scripts / "reward_table.py"))
    written, found = page["FILE"].read_text(), page["table"](counted)
    if not counted:
        written = re.sub(r"^(\| \w+ \| .* \|) \d+ \|$", r"\1  |", written, flags=re.MULTILINE)
    assert written == found


@pytest.mark.slow
def test_peers_pay_what_is_recorded():
    try:
        scorers = peer_rewards.scorers()
    except ImportError as error:
        pytest.skip(f"needs trl, verl and math-verify ({error})")
    for pair in _PAIRS:
        found = [scorers[name](pair["answer"], pair["response"]) for name in PEERS]
        assert found == pair["peers"], pair


@pytest.mark.parametrize(
    ("votes", "count"),
    [
        ([r"\boxed{5}", r"\boxed{x=5}", r"\boxed{5.0}", "The answer is 5.", "#### 5"], 1),
        ([r"\boxed{50\%}", r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{1/2}"], 1),
        ([r"\boxed{2\sqrt{5}}", r"\boxed{\sqrt{20}}"], 1),
        ([r"\boxed{(x+1)^2}", r"\boxed{x^2+2x+1}"], 1),
        ([r"\boxed{1, 2}", r"\boxed{\{2,1\}}", r"\boxed{x=1, x=2}"], 1),
        ([r"\boxed{\text{East}}", r"\boxed{east}", "The answer is east."], 1),
        ([r"\boxed{(1,2)}", r"\boxed{(2,1)}"], 2),
        ([r"\boxed{5}", r"\boxed{-5}", r"\boxed{5x}"], 3),
        ([r"\boxed{5}", r"\boxed{5 t}", r"$5 \mathrm{mph}, 6 \mathrm{mph}$"], 3),
        ([r"\boxed{m+n = 5}", "<think>8</think>5", r"<answer>5</answer>", r"5\text{ cm}"], 1),
        ([r"\boxed{12_7}", r"\boxed{12}"], 2),
    ],
)
def test_one_vote_for_one_value(votes, count):
    found = {math_answer(vote) for vote in votes}
    assert len(found) == count and None not in found


@pytest.mark.parametrize("answer", ["", "?", "We add the numbers and " * 5])
def test_an_answer_that_cannot_be_read_is_an_error(answer):
    with pytest.raises(ValueError, match="is neither mathematics nor a few words"):
        math_equal("question", r"\boxed{5}", answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-₹72", "-72"),
        ("$-72", "-72"),
        ("US$ 72", "72"),
        ("Rs. 72", "72"),
        ("USD 72", "72"),
        ("1'072", "1072"),
        ("1_072", "1072"),
        ("₹1,00,000", "100000"),
        ("2.5e-3", "1/400"),
        (r"3 \times 10^{-2}", "3/100"),
        ("10⁵", "100000"),
        ("2½", "5/2"),
        ("12 and 1/2", "25/2"),
        (r"-\frac{1}{2}", "-1/2"),
        ("72 m^2", "72"),
        ("72 km/h", "72"),
        ("**72**", "72"),
        (r"\text{72 apples}", "72"),
        (r"x \approx 72", "72"),
        ("5 m", "5"),
        ("1.5 million", "1500000"),
        ("1 000", "1000"),
        ("100 N", "100"),
        (r"72\mathrm{~miles}", "72"),
        (r"m + n = 72", "72"),
        (r"AB = \sqrt{25} = 5", "5"),
        (r"x = \frac13 \approx 0.333", "1/3"),
        *(
            (text, None)
            for text in (
                "5x",
                "5 t",
                "5N",
                "2x = 8",
                "x + 1 = 8",
                "n! = 8",
                "5i",
                r"2\pi",
                "5!",
                "72^2",
                "72 or 73",
                "72 - y",
                "10:30",
                "1, 2",
                "8/2",
                "7+8",
                "5 4/2",
                "x=5, y=72",
                "72 mio",
                "2 dozen",
                "72 hours and 30 minutes",
                "[72]",
                "A",
                "9" * 300,
            )
        ),
    ],
)
def test_a_text_that_is_a_number(text, number):
    found = whole_number(text)
    assert (None if found is None else str(found.value)) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("No.72", "72"), ("v1.2: 72", "72"), ("in 2024, H2O and x2", "2024"), ("1, 2 3/4", "11/4")],
)
def test_the_last_number(text, number):
    assert str(last_number(text).value) == number


def test_another_right_answer_of_a_task():
    """Scored by the task's own scorer; tasks without one compare texts."""
    import reasoning_gym

    score = load_rewards("task_score")[0].function
    item = reasoning_gym.create_dataset("countdown", size=1, seed=1)[0]
    (first, *rest) = item["answer"].split(" - ")
    others = [" - ".join([f"({first})", *reversed(rest)]), f"<answer>{item['answer']}</answer>"]
    assert [score("", text, item["answer"], item) for text in others] == [1.0, 1.0]
    assert score("", "1 + 1", item["answer"], item) < 0.1
    equation = reasoning_gym.create_dataset("polynomial_equations", size=9, seed=1)
    item = next(x for x in equation if x["answer"].count(",") == 1)
    assert score("", ", ".join(item["answer"].split(", ")[::-1]), item["answer"], item) == 1.0
    assert score("", " 5 ", "5", {"metadata": {"source_dataset": "basic_arithmetic"}}) == 1.0
    assert score("", "5", "6", {}) == 0.0


@pytest.mark.slow
def test_right_answers_of_every_task_pay_and_other_answers_do_not():
    """As they are, between $ and in a box; the answers of other rows are wrong if they differ."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    for name in sorted({*DATASETS} - {"composite", "puzzle24"}):  # 24 is reached in many ways
        items = reasoning_gym.create_dataset(name, size=4, seed=7)
        answers = [str(item["answer"]) for item in items if str(item["answer"]).strip()]
        for answer in answers:
            for response in (answer, f"${answer}$", _box(answer)):
                assert math_equal("question", response, answer) == 1.0, (name, answer)
            for other in answers:
                if other.split() != answer.split():
                    with contextlib.suppress(ValueError):  # prose
                        assert not math_equal("question", _box(other), answer), (
                            name,
                            answer,
                            other,
                        )


_PAYS = [
    ("1/3", _box("0.333333")),
    ("9", "The answer is 8. Wait, no. The answer is 9."),
    ("D", "The answer is C. But the answer is D."),
    ("9", r"<think>maybe \boxed{8}</think>\boxed{9}"),
    ("9", "<think>The answer is 8.</think>9"),
    ("8", r"\boxed{7}. Hmm, recheck. \boxed{8}"),
    ("9", r"\boxed{8} \boxed{9}"),
    (r"\{8,9\}", r"\boxed{8} and \boxed{9}"),
    ("9", r"\fbox{9}"),
    ("9", r"\boxed {9}"),
    ("B", "The answer is option B"),
    ("B", "The answer is (B) 12."),
    ("B", "The answer is B) 12"),
    (r"\text{A, C}", _box("A,C")),
    ("A, C", _box(r"\text{C, A}")),
    (r"0.\overline{3}", _box(r"\frac13")),
    (r"\frac16", _box(r"0.1\overline{6}")),
    (r"\angle ABC", _box(r"\angle ABC")),
    ("BAD_{16}", _box("BAD_{16}")),
    ("－7", _box("-7")),
    ("∅", _box(r"\varnothing")),
    ("x^2+y^2=25", _box("x^2+y^2=25")),
    ("f(x)=2x", _box("2x")),
    ("2024-01-05", _box("2024-01-05")),
    ("72 square feet", _box("72")),
    ("10:45 a.m.", _box("10:45 a.m.")),
]
_PAYS_NOTHING = [
    ("1e-10", _box("2e-10")),
    ("0.1234567", _box("0.1234568")),
    ("x^2+y^2=25", _box("25")),
    ("2x+3y=7", _box("7")),
    *(
        ("8", _box(x))
        for x in (
            "2x=8",
            "x+1=8",
            "-x=8",
            "n! = 8",
            r"\le 8",
            r"\neq 8",
            "≤ 8",
            r"\frac{16}{2}",
            r"16\div2",
            r"8\text{ million}",
            r"8\text{ bn}",
            r"8\text{万}",
            r"8\text{x}",
            r"8\mathrm{i}",
            r"8\text{ hours and 20 minutes}",
            r"8\text{ ft }11\text{ in}",
            r"8\text{ or more}",
            r"8\text{ more than }x",
            r"8\text{ is wrong}",
        )
    ),
    ("1,234", _box("(1,234)")),
    ("(1,234)", _box("1234")),
    ("2024-01-05", _box("2018")),
    ("8", "The answer is 8. Wait, no. The answer is 9."),
    ("555-1234", _box("-679")),
    ("8", r"<think>it is \boxed{8}</think>The answer is 9."),
    ("12", "#### 12 is not right"),
]


@pytest.mark.parametrize(("value", "pairs"), [(1, _PAYS), (0, _PAYS_NOTHING)])
def test_further_pairs(value, pairs):
    assert [p for p in pairs if math_equal("question", p[1], p[0]) != value] == []


@pytest.mark.parametrize(
    "rest",
    [
        "millones",
        "Millionen",
        "lakh",
        "万",
        "tenths",
        "squared",
        "factorial",
        "per mille",
        "‰",
        "π",
        "₂",
        "is wrong",
        "or nine",
        "divided by two",
        "out of ten",
        "more than x",
        "half",
    ],
)
def test_a_number_that_goes_on_is_another_one(rest):
    assert gsm8k("question", f"#### 8 {rest}", "8") == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>#### 71</think>72", 1),
        (r"<think>\boxed{71}</think>The answer is 72", 1),
        ("#### 72 dollars per day", 1),
        ("#### 72 元", 1),
        ("It is 72 million", 0),
    ],
)
def test_further_numbers(response, value):
    assert gsm8k("question", response, "72") == value


@pytest.mark.parametrize(
    "text",
    [
        " " * 64_000 + "5",
        "<answer>" * 16_000,
        "1 1/" * 16_000,
        r"\boxed{1}, " * 4_000,
        "$1$, " * 8_000,
        r"\(" * 16_000,
        "x=" * 16_000,
        "{" * 32_000,
        "The answer is 5. " * 4_000,
        r"\text{ and }" * 4_000,
    ],
)
def test_long_responses_take_time_in_proportion(text):
    """A quadratic reader takes minutes of them."""
    with time_limit():
        gsm8k("question", text, "8")
        math_equal("question", text, "x^2")


@pytest.mark.parametrize(
    "formula",
    [
        "9^{9^{9^{9}}}",
        "99999999!",
        r"\binom{10^9}{5\cdot10^8}",
        "(x+y+z)^{500}",
        "2^{1000000000}",
        "((((9!)!)!)!)!",
    ],
)
def test_a_vote_of_a_formula_that_nobody_works_out(formula):
    with time_limit():
        assert math_answer(_box(formula))
