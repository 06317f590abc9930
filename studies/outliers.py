"""Plants outliers in a model without changing its function.

In every layer one channel of each norm's output is made 2^k times larger, and the row that
multiplies it in each matrix after the norm 2^k times smaller. Powers of two are exact in float32
and bf16, so the model computes the same bits; FP8 sees an outlier among small values. E4M3's normal
numbers span 448 / 2^-6 = 2^14.8 and subnormal ones 2^3 more, so up to about 2^14 nothing changes,
and from 2^18 on the outlier's neighbours in its block become zero.
Activations of 10^3 to 10^4 times the median are found in large models (Sun et al., "Massive
Activations in Large Language Models", arXiv:2402.17762).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fp8rl_jax.batch import Batch
from fp8rl_jax.models.arrays import ATTENTION, MLP
from fp8rl_jax.quant import get_recipe
from studies.measures import measure
from studies.progress import Note, Part, silent
from studies.scoring import Scorer, View
from studies.subjects import Subject

POWERS = (0, 8, 12, 14, 16, 18, 20)
RECIPES = ("fp8_tensorwise", "fp8_blockwise", "mxfp8")  # from coarse to fine blocks
_CANARIES = ("bf16", "f32")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def plant(params: Any, power: int) -> Any:
    """Returns a dense model's parameters with an outlier of 2^power in a channel of every norm."""
    layers = flatten_dict(params["layers"], sep="/")
    for norm in _NORMS:
        gain = f"{norm}/weight"  # (L, D)
        factor = np.ones(layers[gain].shape[1], np.float32)
        factor[len(factor) // 3] = 2.0**power
        layers[gain] = jnp.asarray(layers[gain]) * factor
        for array in (*ATTENTION, *MLP):
            if f"{norm}/output" in array.reads:
                kernel = "/".join(array.path)  # (L, D, N)
                layers[kernel] = jnp.asarray(layers[kernel]) / factor[:, None]
    return params | {"layers": unflatten_dict(layers, sep="/")}


def measure_outliers(
    subject: Subject, samples: Batch, group: int, note: Note = silent
) -> dict[str, Any]:
    """Compares every recipe with bf16, for outliers of every power.

    Args:
      subject: a dense model with ordinary attention.
      samples: samples on the host; they are scored under every recipe.
      group: number of samples of a question.
      note: called with the progress of the scores.

    Returns:
      {power: {recipe: {'kl': sums (Q,), 'tokens': (Q,)}, canary: number of tokens whose
      log-probability differs from that without an outlier}}; canaries are bf16 and f32.
    """
    views = {name: View(get_recipe(name)) for name in (*_CANARIES, *RECIPES)}
    scorer, mask = Scorer(subject.runtime, views), np.asarray(samples.mask) > 0
    found: dict[str, Any] = {}
    plain: dict[str, np.ndarray] = {}
    progress = Part("powers of two scored", len(POWERS), note)
    for count, power in enumerate(POWERS, 1):
        own: dict[str, list[np.ndarray]] = {name: [] for name in _CANARIES}
        params = plant(subject.params, power)

        def watched(params=params, own=own):
            for part in scorer.score(params, samples):
                for name in _CANARIES:
                    own[name].append(part.logprobs[name])
                yield part

        pairs = {name: ("bf16", name) for name in RECIPES}
        numbers = measure(watched(), pairs, mask, np.asarray(samples.lengths), group)
        logprobs = {name: np.concatenate(parts) for name, parts in own.items()}
        plain = plain or logprobs
        found[str(power)] = {
            name: {"kl": numbers[name]["sums"]["kl"], "tokens": numbers[name]["tokens"]}
            for name in RECIPES
        } | {name: int((logprobs[name] != plain[name]).sum()) for name in _CANARIES}
        progress.reach(count)
    return found
