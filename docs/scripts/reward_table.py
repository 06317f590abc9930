"""Writes docs/rewards_of_pairs.md: rewards of 100 pairs of answer and response, by our scorers and
those of TRL and verl.

    python docs/scripts/reward_table.py

tests/envs/rewards/pairs.json has the pairs, and the rewards by TRL and verl.
"""

from __future__ import annotations

import json
import pathlib
import textwrap

from fp8rl_jax.envs import load_rewards

_ROOT = pathlib.Path(__file__).parents[2]
FILE = _ROOT / "docs/rewards_of_pairs.md"
_OURS = ("exact_match", "math_equal", "gsm8k", "gsm8k_strict")
_PEERS = {
    "trl": "TRL",
    "verl math_verify": "verl, math_verify",
    "verl math": "verl, math",
    "verl gsm8k": "verl, gsm8k",
}
_COUNT = 100


def _pays(name: str, pair: dict) -> str:
    try:
        return f"{load_rewards(name)[0].function('', pair['response'], pair['answer']):g}"
    except ValueError:
        return "error"


def _code(text: str) -> str:
    """Returns a text as Markdown code for a cell of a table."""
    return "``" + text.replace("|", "\\|").replace("\n", " ") + "``" if text else "(empty)"


def _wrapped(text: str) -> str:
    """Returns a paragraph in lines of at most 120 columns."""
    indent = "  " if text.startswith("* ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False)


def table() -> str:
    """Returns the text of the page."""
    content = json.loads((_ROOT / "tests/envs/rewards/pairs.json").read_text())
    pairs = [p for p in content["pairs"] if p["answer"]]
    differ = [p for p in pairs if p.get("why")]
    step = len(differ) / _COUNT
    chosen = [differ[int(i * step)] for i in range(_COUNT)]
    columns = ["math-verify", "trl", "verl math_verify", "verl math", "verl gsm8k"]
    head = ["answer", "response", *(f"`{name}`" for name in _OURS), *_PEERS.values(), "why"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for pair in chosen:
        peers = dict(zip(columns, pair["peers"], strict=True))
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
            "with the right reward of each. `math_equal` pays the right reward for all of them. "
            f"The scorers of other libraries ({versions}) differ:"
        ),
        f"| scorer | pairs, of {len(pairs)}, with another reward or none |\n|---|---|\n"
        + "\n".join(f"| {_PEERS[name]} | {count} |" for name, count in differing.items()),
        _wrapped(
            "verl's `math` and `gsm8k` compare texts; they are made for data sets in which every "
            "answer has one spelling."
        ),
        _wrapped(
            f"The last table shows {_COUNT} of the pairs for which one of these scorers, or "
            "math-verify alone, differs. `error`: the reward raises an exception, because the "
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
