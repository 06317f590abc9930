"""A train step beside one of transformers at a real model's shapes: CPU seconds on one core.

    python docs/scripts/beside_transformers.py    # SmolLM2-135M

docs/cpu_speed.md has the variables that make it a measurement of a CPU without bf16 instructions.

Random weights, 4 sequences of 32 + 32 tokens; forward, backward and AdamW of float32 masters, with
the loss and the output head on the 32 response tokens alone. Here under the recipes bf16 and fp8;
transformers in float32 and in bf16 (autocast). Each runs in processes of its own, in turns, on one
core: a step's memory is that of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

_ROWS, _PROMPT, _RESPONSE = 4, 32, 32
_STEPS_A_TURN = 3


def _ours(name: str, recipe: str) -> Callable[[], None]:
    """Returns a train step of the library under a recipe."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fp8rl_jax import learner, models
    from fp8rl_jax.batch import make_batch
    from fp8rl_jax.models.presets import preset
    from fp8rl_jax.quant import get_recipe
    from fp8rl_jax.training.optimizer import learning_rates, make_optimizer

    model, length = preset(name), _PROMPT + _RESPONSE
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (_ROWS, length)).astype(np.int32)
    prompts, ones = np.full(_ROWS, _PROMPT, np.int32), np.ones(_ROWS, np.float32)
    mask = np.ones((_ROWS, _RESPONSE), bool)
    batch = make_batch(tokens, prompts, tokens[:, _PROMPT:], mask, ones, rng.standard_normal(_ROWS))
    optimizer = make_optimizer(learning_rates(1e-4, 1), 0.9, 0.99, 0.0, 1.0)
    params = models.init_params(model, jax.random.key(0, impl="threefry2x32"))
    state = learner.new_state(params, optimizer, np.zeros(2, np.uint32), recipe)
    gradients = learner.GradientProgram(learner.ForwardPass(model, get_recipe(recipe)))
    step = learner.make_train_step(gradients, optimizer)
    rope = tuple(map(jnp.asarray, models.rope_tables(model, length)))

    def run() -> None:
        nonlocal state
        state, *rest = step(state, batch, rope)
        jax.block_until_ready((state, rest))

    return run


def _transformers(name: str, autocast: bool) -> Callable[[], None]:
    """Returns a train step of transformers: policy gradient, clipped by norm, AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fp8rl_jax.models.presets import preset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = preset(name)
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "tie_word_embeddings",
    )
    model = LlamaForCausalLM(LlamaConfig(**{size: getattr(shape, size) for size in sizes}))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.99), weight_decay=0.0)
    tokens = torch.randint(shape.vocab_size, (_ROWS, _PROMPT + _RESPONSE))
    advantages = torch.randn(_ROWS, 1)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens, logits_to_keep=_RESPONSE + 1).logits[:, :-1]
        logp = logits.float().log_softmax(-1).gather(2, tokens[:, _PROMPT:, None])[..., 0]
        (-(advantages * logp).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


_STEPS: dict[str, Callable[[str], Callable[[], None]]] = {
    "ours, fp8": lambda model: _ours(model, "fp8"),
    "ours, bf16": lambda model: _ours(model, "bf16"),
    "transformers, float32": lambda model: _transformers(model, False),
    "transformers, bf16 autocast": lambda model: _transformers(model, True),
}


def _measure(name: str, model: str) -> None:
    """Prints the CPU seconds of the first step, and the median of those after it."""
    step, times = _STEPS[name](model), []
    for _ in range(1 + _STEPS_A_TURN):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    print(json.dumps([times[0], statistics.median(times[1:])]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2_135m", help="a preset of the Llama family")
    parser.add_argument("--turns", type=int, default=3, help="processes of each")
    parser.add_argument("--measure", choices=_STEPS, help=argparse.SUPPRESS)
    values = parser.parse_args()
    if values.measure:
        return _measure(values.measure, values.model)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    own = [sys.executable, __file__, f"--model={values.model}", "--measure"]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    found: dict[str, list[list[float]]] = {name: [] for name in _STEPS}
    for _ in range(values.turns):
        for name, times in found.items():
            text = subprocess.check_output([*own, name], env=environment)
            times.append(json.loads(text.splitlines()[-1]))
    medians = {n: [statistics.median(x) for x in zip(*t, strict=True)] for n, t in found.items()}
    fastest = min(step for n, (_, step) in medians.items() if n.startswith("transformers"))
    print(f"{values.model}, {_ROWS} x ({_PROMPT} + {_RESPONSE}) tokens\n")
    print("| | first call | CPU s a step | over the faster of transformers' |\n|---|---|---|---|")
    for name, (first, step) in medians.items():
        print(f"| {name} | {first:.1f} | {step:.2f} | {step / fastest:.2f} |")


if __name__ == "__main__":
    main()
