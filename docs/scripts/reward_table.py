"""Writes docs/rewards_of_pairs.md: rewards of 100 pairs of answer and response, by our scorers and
those of TRL and verl.

    python docs/scripts/reward_table.py

tests/envs/rewards/pairs.json has the pairs, and the rewards by TRL and verl.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any
from unittest import mock

from fp8rl_jax.envs import load_rewards
from fp8rl_jax.envs.rewards import math_answer
from fp8rl_jax.envs.rewards.terms import BUILT_IN

_ROOT = pathlib.Path(__file__).parents[2]
FILE = _ROOT / "docs/rewards_of_pairs.md"
_OURS = [name for name in BUILT_IN if name != "task_score"]  # which needs a task's row
_PEERS = {
    "math-verify": "math-verify alone",
    "trl": "TRL",
    "verl math_verify": "verl, math_verify",
    "verl math": "verl, math",
    "verl gsm8k": "verl, gsm8k",
}
_COUNT = 100


def _pays(name: str, pair: dict) -> str:
    math_answer._parsed.cache_clear()
    try:
        return f"{load_rewards(name)[0].function('', pair['response'], pair['answer']):g}"
    except ValueError:
        return "error"


def _rules() -> list[tuple[str, str, Any, str, Callable]]:
    """Returns (name, what it says, its place, its name there, what to do without it) of each own
    rule of `math_equal`; which part of a response is the answer is not counted."""
    readers = [
        (name, says, math_answer, function, without)
        for name, says, function, without in (
            ("thought", "Only what is behind the reasoning counts.", "behind_reasoning", str),
            (
                "texts",
                "Equal texts are equal answers, also where math-verify can parse neither.",
                "_equal_as_written",
                lambda *texts: False,
            ),
            (
                "spelled",
                "A number has one value in all its spellings, with names and units.",
                "whole_number",
                lambda text, right=False: None,
            ),
            (
                "sides",
                "Of an equation, or a chain of them, the last finished side counts.",
                "sides",
                lambda text, is_number, right=False: None,
            ),
            (
                "last",
                "Prose without marks answers with its last number.",
                "last_number",
                lambda text: None,
            ),
            (
                "latex",
                "Signs of Unicode, roots, oo and sets by a condition become LaTeX.",
                "_in_latex",
                str,
            ),
            (
                "joined",
                "Inequalities joined by 'or' or 'and' are the set of their solutions.",
                "_solutions",
                lambda text, relations: relations,
            ),
        )
    ]
    asked = [
        (name, rule.__doc__ or "", math_answer.RULES, name, lambda gold, given: None)
        for name, rule in math_answer.RULES.items()
    ]
    return readers + asked


def _replaced(place: Any, name: str, function: Callable) -> Any:
    if isinstance(place, dict):
        return mock.patch.dict(place, {name: function})
    return mock.patch.object(place, name, function)


def _needed(pairs: list[dict]) -> dict[str, int]:
    """Returns for each rule the number of pairs that get a wrong reward without it."""
    counts = dict.fromkeys((name for name, *_ in _rules()), 0)
    for pair in pairs:
        said = _said(pair)
        for name, _, place, where, without in _rules():
            if name in said:
                with _replaced(place, where, without):
                    counts[name] += _pays("math_equal", pair) != f"{pair['right']:g}"
    return counts


def _said(pair: dict) -> set[str]:
    """Returns the rules that say anything when a pair is scored."""
    said = set()

    def recorded(name: str, rule: Callable, without: Callable) -> Callable:
        def call(*given, **named):
            found = rule(*given, **named)
            if found != without(*given, **named):
                said.add(name)
            return found

        return call

    with contextlib.ExitStack() as stack:
        for name, _, place, where, without in _rules():
            rule = place[where] if isinstance(place, dict) else getattr(place, where)
            stack.enter_context(_replaced(place, where, recorded(name, rule, without)))
        _pays("math_equal", pair)
    return said


def _code(text: str) -> str:
    """Returns a text as Markdown code for a cell of a table."""
    return "``" + text.replace("|", "\\|").replace("\n", " ") + "``" if text else "(empty)"


def _wrapped(text: str) -> str:
    """Returns a paragraph in lines of at most 120 columns."""
    indent = "  " if text.startswith("* ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False)


def table(counted: bool = True) -> str:
    """Returns the text of the page; `counted`: with the pairs that need each rule, which takes a
    minute."""
    content = json.loads((_ROOT / "tests/envs/rewards/pairs.json").read_text())
    pairs = [p for p in content["pairs"] if p["answer"]]
    differ = [p for p in pairs if p.get("why")]
    step = len(differ) / _COUNT
    chosen = [differ[int(i * step)] for i in range(_COUNT)]
    needed = _needed(pairs) if counted else {}
    head = ["answer", "response", *(f"`{name}`" for name in _OURS), *_PEERS.values(), "why"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for pair in chosen:
        peers = dict(zip(_PEERS, pair["peers"], strict=True))
        found = ["-" if peers[name] is None else f"{peers[name]:g}" for name in _PEERS]
        why = sorted({pair["why"][name] for name in _PEERS if name in pair["why"]})
        cells = [
            _code(pair["answer"]),
            _code(pair["response"]),
            *(_pays(name, pair) for name in _OURS),
            *found,
            ", ".join(why),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    differing = {name: sum(name in p.get("why", {}) for p in pairs) for name in _PEERS}
    parts = [
        "# What rewards pay, compared with TRL and verl",
        _wrapped(
            f"tests/envs/rewards/pairs.json has {len(pairs)} pairs of an answer and a response, "
            "with the reward that a careful reader gives. `math_equal` pays it for all of them. "
            f"The scorers of other libraries ({versions}) differ:"
        ),
        f"| scorer | pairs, of {len(pairs)}, with another reward or none |\n|---|---|\n"
        + "\n".join(f"| {_PEERS[name]} | {count} |" for name, count in differing.items()),
        _wrapped(
            "verl's `math` and `gsm8k` compare texts; they are made for data sets in which every "
            "answer has one spelling."
        ),
        _wrapped(
            "`math_equal` is math-verify with the rules below, which say what it is given and when "
            "it is not asked. The last column counts the pairs that get another reward without the "
            "rule."
        ),
        "| rule | what it says | pairs that need it |\n|---|---|---|\n"
        + "\n".join(
            f"| {name} | {' '.join(says.split())} | {needed.get(name, '')} |"
            for name, says, *_ in _rules()
        ),
        _wrapped(
            f"The last table shows {_COUNT} of the pairs for which one of these scorers "
            "differs. `error`: the reward raises an exception, because the "
            "answer is not a number. `-`: TRL does not score the pair. `why` has the reasons of "
            "the scorers that differ:"
        ),
        "\n".join(_wrapped(f"* *{name}*: {text}") for name, text in content["reasons"].items()),
        "\n".join(lines),
        _wrapped(
            "`python tests/helpers/peer_rewards.py --write` scores the pairs by the other "
            "libraries again, and `python docs/scripts/reward_table.py` writes this page."
        ),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(table())
