"""What makes the train step fast on a CPU: each change left out by itself, in turns.

    python docs/scripts/cpu_speed.py               # the table of docs/cpu_speed.md, ten minutes
    python docs/scripts/cpu_speed.py --repeats=1   # fewer turns

Every variant is a process of its own, pinned to one core, in which what the change brought is
replaced by what XLA does by itself. Figures are CPU seconds of a train step, the least of all
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

SHAPES = {  # width, MLP, head, vocabulary, prompts, samples, prompt tokens, new tokens
    "4.5M parameters, 32 x 192 tokens": (256, 512, 64, 8192, 4, 8, 64, 128),
    "0.85M parameters, 128 x 40 tokens": (128, 384, 32, 259, 16, 8, 36, 4),
}
RECIPES = ("fp8", "bf16")


def _replace(name: str, new: Callable) -> None:
    """Puts `new` in the place of a function of that name in all modules of the library."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("fp8rl_jax") and hasattr(module, name):
            setattr(module, name, new)


def _residuals_as_numbers() -> None:
    _replace("keep", lambda tree: tree)


def _gradients_in_blocks() -> None:
    from fp8rl_jax.quant import products

    _replace("_multiply_for_gradient", products._multiply)


def _reductions_by_xla() -> None:
    _replace("folded", lambda x, combine: x)
    _replace("sum_last", lambda x: x.sum(-1))
    _replace("max_last", lambda x: x.max(-1))
    _replace("sum_rows", lambda x: x.sum(0))


def _conversions_by_xla() -> None:
    import jax.numpy as jnp

    _replace("to_e4m3", lambda x: x.astype(jnp.float8_e4m3fn))
    _replace("widened", lambda x, dtype: x.astype(dtype))


def _nothing_stored() -> None:
    _replace("stored", lambda x: x)


def _head_by_autodiff() -> None:
    import jax

    from fp8rl_jax.models import logprobs

    def rows(recipe, parallel, hidden, head, draws):
        assert draws.truncation is None and draws.counts is None
        inverse = logprobs.inverse_temperature(draws.temperature)
        return logprobs._row_logprobs(recipe, parallel, hidden, head, draws.targets, inverse)[:2]

    _replace("_chunk_logprobs", jax.checkpoint(rows, static_argnums=(0, 1)))


def _in_float32() -> None:
    from fp8rl_jax.kernels.reference import probe

    way = probe.tried(next(way for way in probe.WAYS if way.name == "float32"))
    _replace("cpu_way", lambda: way)


def _exactly() -> None:
    from fp8rl_jax.kernels.reference import probe

    _replace("cpu_way", lambda: probe.EXACT)


VARIANTS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "residuals kept as numbers": _residuals_as_numbers,
    "gradients' products in blocks": _gradients_in_blocks,
    "reductions by XLA": _reductions_by_xla,
    "E4M3 converted by XLA": _conversions_by_xla,
    "scales and norms' weights fused": _nothing_stored,
    "the head's gradient by autodiff": _head_by_autodiff,
    "float32, as without bf16 instructions": _in_float32,
    "exact": _exactly,
}


def measure(variant: str, repeats: int) -> dict[str, float]:
    """{shape and recipe: CPU seconds of a train step} of one variant, in this process."""
    import jax
    import numpy as np
    import optax

    import fp8rl_jax.learner as learner
    from fp8rl_jax.batch import make_batch
    from fp8rl_jax.models import ModelConfig, init_params, rope_tables
    from fp8rl_jax.quant import get_recipe

    VARIANTS[variant]()
    found = {}
    for shape, (width, mlp, head, vocabulary, prompts, group, before, new) in SHAPES.items():
        model = ModelConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head,
            tie_word_embeddings=True,
            embedding_init_std=0.02,
        )
        rng, rows = np.random.default_rng(0), prompts * group
        tokens = rng.integers(3, vocabulary, (rows, before + new)).astype(np.int32)
        numbers = np.zeros((rows, new), np.float32)
        batch = make_batch(
            tokens=tokens,
            prompt_lengths=np.full(rows, before, np.int32),
            targets=tokens[:, before:],
            mask=numbers + 1,
            temperature=np.ones(rows, np.float32),
            advantages=rng.standard_normal(rows).astype(np.float32),
            old_logprobs=numbers - 9,
        )
        params = init_params(model, jax.random.key(0, impl="threefry2x32"))
        rope, optimizer = rope_tables(model, before + new), optax.adamw(1e-4)
        for recipe in RECIPES:
            state = learner.new_state(
                params,
                optimizer,
                jax.random.key_data(jax.random.key(1, impl="threefry2x32")),
                recipe,
            )
            forward_pass = learner.ForwardPass(model, get_recipe(recipe))
            gradients = learner.GradientProgram(forward_pass, health=True)
            step = learner.make_train_step(gradients, optimizer, donate=False)
            jax.block_until_ready(step(state, batch, rope))
            times = []
            for _ in range(repeats):
                start = time.process_time()
                jax.block_until_ready(step(state, batch, rope))
                times.append(time.process_time() - start)
            found[f"{shape}, {recipe}"] = min(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=2, help="turns, of five steps each")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(json.dumps(measure(arguments.variant, 5)))
        return
    least: dict[str, dict[str, float]] = {name: {} for name in VARIANTS}
    for _ in range(arguments.repeats):
        for name in VARIANTS:
            command = [sys.executable, __file__, f"--variant={name}"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            for cell, seconds in json.loads(done.stdout).items():
                least[name][cell] = min(seconds, least[name].get(cell, seconds))
    cells = list(next(iter(least.values())))
    print("| left out | " + " | ".join(cells) + " |")
    print("|---" * (1 + len(cells)) + "|")
    whole = next(iter(least.values()))
    for name, found in least.items():
        shown = (f"{found[c]:.2f} ({found[c] / whole[c]:.2f})" for c in cells)
        print(f"| {name} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
