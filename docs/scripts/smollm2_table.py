"""Perplexity of a real model under five recipes, on a fixed text.

    python docs/scripts/smollm2_table.py checkpoints/SmolLM2-135M-Instruct

prints the table of docs/smollm2.md. The text is below; each of its paragraphs is one sequence.
"""

from __future__ import annotations

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.data.pretrained import PretrainedTokenizer
from fp8rl_jax.models import (
    Draws,
    Tokens,
    hf,
    hidden_states,
    output_head,
    quantize_params,
    rope_tables,
    token_logprobs,
)
from fp8rl_jax.quant import get_recipe
from studies.passages import TEXT

_FP8 = get_recipe("fp8_blockwise")
RECIPES = {
    "f32": get_recipe("f32"),
    "bf16": get_recipe("bf16"),
    "fp8, KV in bf16": dataclasses.replace(_FP8, kv="none"),
    "fp8, KV in INT8": get_recipe("fp8"),
    "fp8, KV in E4M3": _FP8,
}
_PARAGRAPHS = TEXT.split("\n\n")[:4]


def main() -> None:
    """Loads the checkpoint once and prints a row for each recipe."""
    directory = sys.argv[1]
    config, params = hf.load(directory)
    tokenizer = PretrainedTokenizer(directory)
    rows = [tokenizer.encode(" ".join(part.split())) for part in _PARAGRAPHS]
    slots = max(map(len, rows))
    tokens = np.zeros((len(rows), slots), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows])
    scored = np.arange(slots - 1) < lengths[:, None] - 1
    rope = tuple(jnp.asarray(t) for t in rope_tables(config, slots))
    reference = None
    print(f"{scored.sum()} tokens of {len(rows)} paragraphs\n")
    print("| recipe | perplexity | mean absolute change of a log-probability |\n|---|---|---|")
    for name, recipe in RECIPES.items():

        def score(weights, tokens, rope, recipe=recipe):
            hidden = hidden_states(weights, Tokens.of(tokens, rope), config, recipe).hidden
            targets, ones = jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape)
            draws = Draws(targets, ones)
            return token_logprobs(hidden, output_head(weights, config), draws, recipe)[0]

        weights = exact_jit(lambda p, recipe=recipe: quantize_params(p, recipe))(params)
        logp = np.float64(exact_jit(score)(weights, tokens, rope))[:, :-1][scored]
        reference = logp if reference is None else reference
        change = np.abs(logp - reference).mean()
        print(f"| {name} | {np.exp(-logp.mean()):.3f} | {change:.4f} |", flush=True)


if __name__ == "__main__":
    main()
