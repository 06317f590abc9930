"""Perplexity of a real model under four recipes, on a fixed text.

    python docs/scripts/smollm2_table.py checkpoints/SmolLM2-135M-Instruct

prints the table of docs/smollm2.md. The text is below; each of its paragraphs is one sequence.
"""

from __future__ import annotations

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np

from fp8rl_jax.data.pretrained import PretrainedTokenizer
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import (
    forward,
    hf,
    output_head,
    quantize_params,
    rope_tables,
    token_logprobs,
)
from fp8rl_jax.quant import get_recipe

_FP8 = get_recipe("fp8")
RECIPES = {
    "f32": get_recipe("f32"),
    "bf16": get_recipe("bf16"),
    "fp8, KV in bf16": dataclasses.replace(_FP8, kv="none"),
    "fp8, KV in FP8": _FP8,
}
TEXT = """\
The river rises in the hills north of the town and runs for about sixty miles before it reaches
the sea. For most of the year it is slow and brown, and children fish from the old stone bridge on
warm evenings. In spring, when the snow melts, the water comes over the meadows and the road to
the mill is closed for a week or two. Nobody minds very much, because the soil that the flood
leaves behind is the reason why the gardens of the valley grow so well.

A clock measures time by counting something that repeats. A pendulum swings, a crystal vibrates,
an atom changes its state, and a device counts how often this has happened. The smaller the
difference between one repetition and the next, the better the clock. The first accurate clocks at
sea allowed sailors to find out how far east or west they were, since the sun stands highest at a
different moment in every place. A ship that knew the time at home and could see the sun at noon
knew where it was.

To bake a simple loaf of bread, mix five hundred grams of flour with ten grams of salt, a little
yeast and about three hundred and fifty grams of warm water. Knead the dough until it is smooth,
cover it with a cloth, and let it rest in a warm place until it has doubled in size. Shape it into
a ball, let it rise again for half an hour, and bake it in a hot oven for about forty minutes. The
bread is done when it sounds hollow if you knock on the bottom.

When two people disagree about a fact, they can look it up. When they disagree about what is fair,
there is nothing to look up, and yet they usually go on talking as if there were. One of them says
that everyone should get the same, the other that those who work more should get more, and both
believe that the matter is obvious. It often helps to ask what each of them would say if they did
not know which of the people concerned they were going to be.
"""


def main() -> None:
    """Loads the checkpoint once and prints a row for each recipe."""
    directory = sys.argv[1]
    config, params = hf.load(directory)
    tokenizer = PretrainedTokenizer(directory)
    rows = [tokenizer.encode(" ".join(part.split())) for part in TEXT.split("\n\n")]
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
            hidden = forward(weights, tokens, config, recipe, rope=rope, output="hidden").hidden
            targets, ones = jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape[0])
            return token_logprobs(hidden, output_head(weights, config), targets, ones, recipe)[0]

        weights = exact_jit(lambda p, recipe=recipe: quantize_params(p, recipe))(params)
        logp = np.float64(exact_jit(score)(weights, tokens, rope))[:, :-1][scored]
        reference = logp if reference is None else reference
        change = np.abs(logp - reference).mean()
        print(f"| {name} | {np.exp(-logp.mean()):.3f} | {change:.4f} |", flush=True)


if __name__ == "__main__":
    main()
