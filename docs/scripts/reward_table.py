"""Writes docs/rewards_of_pairs.md: what each reward pays for 100 pairs of answer and response.

    python docs/scripts/reward_table.py

The pairs and what the scorers of TRL and verl pay are those of tests/envs/rewards/pairs.json.
"""

from __future__ import annotations

import json
import pathlib

from fp8rl_jax.envs import load_reward

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
        return f"{load_reward(name)('', pair['response'], pair['answer']):g}"
    except ValueError:
        return "error"


def _code(text: str) -> str:
    """As code in a cell of a table."""
    return "``" + text.replace("|", "\\|").replace("\n", " ") + "``" if text else "(empty)"


def table() -> str:
    """The page."""
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
    reasons = [f"* *{name}*: {text}" for name, text in content["reasons"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    shares = [f"{_PEERS[name]} {sum(name in p.get('why', {}) for p in pairs)}" for name in _PEERS]
    return "\n".join(
        [
            "# What rewards pay, beside those of TRL and verl",
            "",
            f"A hundred of the {len(pairs)} pairs of tests/envs/rewards/pairs.json, of those for "
            "which some scorer differs from what is right,",
            "which `math_equal` pays. `error`: the call fails, "
            "since the answer is no number. `-`: TRL does not score it.",
            f"Peers: {versions}. "
            f"Of the {len(pairs)} pairs they pay another value for: {', '.join(shares)}",
            "(verl's "
            "`math` and `gsm8k` compare texts, and are made for data sets with one spelling).",
            "`python tests/helpers/peer_rewards.py --write` records them anew, `python "
            "docs/scripts/reward_table.py` writes this page.",
            "",
            "Why they differ:",
            "",
            *reasons,
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(table())
