"""The space over which zero drift is promised, covered in pairs.

Every value of every factor meets every value of every other factor in some case (but for the pairs
of `_TOO_LARGE`). `python tests/helpers/drift_space.py` runs all cases and prints a table of them;
`python tests/helpers/drift_space.py 3 17` runs cases 3 and 17.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys

import numpy as np
from drift_harness import Case, run

from fp8rl_jax.quant import Recipe, get_recipe

# Factor -> label of a value -> what it is.
FACTORS: dict[str, dict[str, object]] = {
    "recipe": {
        "f32": "f32",
        "bf16": "bf16",
        "blockwise": "fp8_blockwise",
        "pow2": "fp8_blockwise_pow2",
        "delayed": "fp8_delayed",
        "mxfp8": "mxfp8",
        "ends bf16": dataclasses.replace(
            get_recipe("fp8_blockwise"), name="ends in bf16", first_layers=1, last_layers=1
        ),
    },
    "kv": {"as recipe": None, "bf16": "none", "fp8": "dynamic", "calibrated": "calibrated"},
    "ffn": {"dense": (0, 2), "2 of 8": (8, 2), "8 of 64": (64, 8)},
    "G": {"1": 8, "2": 4, "4": 2, "8": 1},
    "vocabulary": {"259": 259, "14": 14, "49": 49, "97": 97, "1000": 1000},
    "head dim": {"64": 64, "96": 96, "128": 128},
    "width": {"128": 128, "256": 256, "512": 512},
    "weights": {"random": False, "outliers": True},
    "head": {"own": False, "tied": True},
    "sampling": {  # temperature, top-k, top-p, whether the kept tokens are recorded
        "T 1": (1.0, 0, 1.0, False),
        "T 0.5 top-k": (0.5, 20, 1.0, True),
        "T 1.5 top-p": (1.5, 0, 0.9, False),
    },
    "end": {"late": 0.0, "early": 1.0},
    "prompts": {
        "1": (9,),
        "3 to 40": (1, 13, 40),
        "17": tuple(1 + 5 * i % 23 for i in range(17)),
        "64": tuple(1 + i % 8 for i in range(64)),
        "to 300": (1, 300),
    },
    "length": {str(n): n for n in (96, 97, 127, 128, 129, 513)},
    "cache": {"as needed": 0, "longer": 65},
    "micro-batches": {"1": 1, "3": 3},
    "remat": {"none": "none", "full": "full"},
    "layers": {"scanned": False, "unrolled": True},
    "updates": {"0": 0, "1": 1, "3": 3},
}
# Pairs that a CPU would take many minutes for.
_TOO_LARGE = {
    ("prompts", "64", "length", "513"),
    ("prompts", "64", "ffn", "8 of 64"),
    ("prompts", "17", "length", "513"),
    ("ffn", "8 of 64", "length", "513"),
    ("prompts", "64", "updates", "3"),
    ("length", "513", "updates", "3"),
    ("width", "512", "prompts", "64"),
    ("prompts", "to 300", "ffn", "8 of 64"),  # these have 513 tokens
    ("prompts", "to 300", "updates", "3"),
}
Choice = dict[str, str]  # factor -> label


def _impossible(choice: Choice) -> bool:
    if choice.get("prompts") == "to 300" and choice.get("length", "513") != "513":
        return True  # prompts of 300 tokens take the longest sequences
    if choice.get("vocabulary") == "14" and choice.get("sampling") == "T 0.5 top-k":
        return True  # of 20
    # With a tied head no bias can be planted that ends sequences early.
    if choice.get("head") == "tied" and choice.get("end") == "early":
        return True
    return any(choice.get(a) == x and choice.get(b) == y for a, x, b, y in _TOO_LARGE)


def _pairs(choice: Choice) -> set[tuple[str, str, str, str]]:
    return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(FACTORS, 2)}


def all_pairs() -> set[tuple[str, str, str, str]]:
    """Every pair of values that is possible."""
    return {
        (a, x, b, y)
        for a, b in itertools.combinations(FACTORS, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if not _impossible({a: x, b: y})
    }


def _complete(start: Choice, missing: set, rng: random.Random) -> Choice | None:
    """`start` with the other factors chosen one by one, each to cover most missing pairs."""
    choice = dict(start)
    for factor in rng.sample(sorted(set(FACTORS) - set(start)), len(FACTORS) - len(start)):
        best, best_gain = None, -1
        for label in rng.sample(sorted(FACTORS[factor]), len(FACTORS[factor])):
            if _impossible({**choice, factor: label}):
                continue
            order = list(FACTORS)
            gain = 0
            for other, value in choice.items():
                a, b = sorted((factor, other), key=order.index)
                labels = {factor: label, other: value}
                gain += (a, labels[a], b, labels[b]) in missing
            if gain > best_gain:
                best, best_gain = label, gain
        if best is None:
            return None
        choice[factor] = best
    return choice


@functools.cache
def choices() -> tuple[Choice, ...]:
    """Cases that cover all pairs; always the same ones."""
    rng, missing, found = random.Random(0), all_pairs(), []
    while missing:
        a, x, b, y = min(missing)
        candidates = (_complete({a: x, b: y}, missing, rng) for _ in range(60))
        best = max((c for c in candidates if c is not None), key=lambda c: len(_pairs(c) & missing))
        found.append(best)
        missing -= _pairs(best)
    return tuple(found)


def case_of(choice: Choice, tap_logits: bool = False) -> Case:
    """The harness's case of a choice."""
    v = {factor: FACTORS[factor][label] for factor, label in choice.items()}
    recipe = get_recipe(v["recipe"])  # type: ignore[arg-type]
    if v["kv"] is not None:
        recipe = dataclasses.replace(recipe, kv=v["kv"])
    prompts: tuple[int, ...] = v["prompts"]  # type: ignore[assignment]
    new_tokens = v["length"] - max(prompts)  # type: ignore[operator]
    temperature, top_k, top_p, records_kept = v["sampling"]  # type: ignore[misc]
    experts, chosen = v["ffn"]  # type: ignore[misc]
    three = isinstance(recipe, Recipe) and recipe.first_layers
    return Case(
        recipe,
        prompts=prompts,
        group_size=1,
        new_tokens=new_tokens,
        cache_slots=v["length"] + v["cache"] if v["cache"] else 0,
        vocabulary=v["vocabulary"],
        hidden=v["width"],
        layers=3 if three else 2,
        heads=8,
        kv_heads=v["G"],
        head_dim=v["head dim"],
        tied=v["head"],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        records_kept=records_kept,
        remat=v["remat"],
        micro_batches=v["micro-batches"],
        eos_share=v["end"],
        outliers=v["weights"],
        updates=v["updates"],
        unroll=v["layers"],
        experts=experts,
        experts_per_token=chosen,
        tap_logits=tap_logits,
    )


def main() -> None:
    """Prints the table as Markdown, a row as it is measured."""
    numbers = [int(n) for n in sys.argv[1:]] or range(len(choices()))
    head = ("case", *FACTORS, "tokens", "log-probs that differ", "logits that differ")
    for cells in (head, ("---",) * len(head)):
        print("| " + " | ".join(cells) + " |")
    for number in numbers:
        choice = choices()[number]
        result = run(case_of(choice, tap_logits=True))
        logp, logits = result.differing()
        assert result.checksum_ok and np.isfinite(result.rollout_logp).all()
        cells = (number, *choice_cells(choice), result.rollout_logp.size, logp, logits)
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def choice_cells(choice: Choice) -> list[str]:
    """The labels in the order of the factors."""
    return [choice[factor] for factor in FACTORS]


if __name__ == "__main__":
    main()
