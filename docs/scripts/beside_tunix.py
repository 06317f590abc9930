"""Tokens per second of our sampler beside tunix's, in one run.

tunix (google-tunix on PyPI) wants packages of its own, so it runs in an environment of its own, as
a process that samples once whenever it is told to; the two take turns.

    python -m venv tunix-env && tunix-env/bin/pip install google-tunix
    JAX_PLATFORMS=cpu python docs/scripts/beside_tunix.py --python=tunix-env/bin/python \
        --model=qwen3_4p5m

Both have random weights of the same Qwen3 shape, 32 random prompts of 64 tokens, 128 new tokens at
temperature 1 from the whole vocabulary, and record log-probabilities. tunix's top-p mode at 1.0 is
its way to sample so; float32 and bf16 are both tried and the faster one is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time

BATCH, PROMPT, NEW = 32, 64, 128


class _Numbers:
    """A tokenizer whose text is its ids, as tunix asks for one."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def _serve(shape: dict) -> None:
    """The process with tunix: answers each line, a type's name, with seconds of one call."""
    import flax.nnx as nnx
    import jax.numpy as jnp
    import numpy as np
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    rng = np.random.default_rng(0)
    prompts = rng.integers(3, shape["vocab_size"], (BATCH, PROMPT - 1))  # and one in front
    texts = [" ".join(map(str, row)) for row in prompts]
    samplers = {}
    for line in sys.stdin:
        dtype = line.strip()
        if dtype not in samplers:
            number = jnp.dtype(dtype)
            config = ModelConfig(
                num_layers=shape["num_hidden_layers"],
                vocab_size=shape["vocab_size"],
                embed_dim=shape["hidden_size"],
                hidden_dim=shape["intermediate_size"],
                num_heads=shape["num_attention_heads"],
                head_dim=shape["head_dim"],
                num_kv_heads=shape["num_key_value_heads"],
                rope_theta=1_000_000,
                norm_eps=1e-6,
                use_tied_embedding=True,
                dtype=number,
                param_dtype=number,
            )
            cache = CacheConfig(
                PROMPT + NEW, config.num_layers, config.num_kv_heads, config.head_dim
            )
            samplers[dtype] = Sampler(Qwen3(config, rngs=nnx.Rngs(0)), _Numbers(), cache)
        start = time.perf_counter()
        out = samplers[dtype](
            texts,
            max_generation_steps=NEW,
            max_prompt_length=PROMPT,
            eos_tokens=[-1],
            temperature=1.0,
            top_p=1.0,
            seed=0,
            return_logprobs=True,
        )
        seconds = time.perf_counter() - start
        tokens = sum(len(row) for row in out.tokens)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


def _compare(python: str, name: str, repeats: int) -> None:
    import jax
    import numpy as np

    from fp8rl_jax.bench import rollout
    from fp8rl_jax.models import init_params
    from fp8rl_jax.rollout import make_sampler

    child = subprocess.Popen(
        [python, __file__, "--serve", json.dumps(dataclasses.asdict(rollout.SMALL[name]))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def theirs(dtype: str) -> float:
        print(dtype, file=child.stdin, flush=True)
        answer = json.loads(child.stdout.readline())
        assert answer["tokens"] == BATCH * NEW, answer
        return answer["seconds"]

    model, cell = rollout.model_of(name), rollout.Cell(BATCH, PROMPT, NEW, 1)
    params = init_params(model, jax.random.key(0, impl="threefry2x32"))
    calls = {}
    for case in ("bf16", "fp8"):
        recipe = rollout.CASES[case]()
        sample = make_sampler(model, recipe, cell.settings)
        weights = rollout.served_weights(params, recipe)
        limits = np.full(BATCH, NEW, np.int32)
        call = rollout.arguments(model, weights, cell, BATCH, limits)
        calls[case] = lambda sample=sample, call=call: jax.block_until_ready(sample(*call))
        calls[case]()
    tried = {}
    for dtype in ("float32", "bfloat16"):
        theirs(dtype)
        tried[dtype] = theirs(dtype)
    dtype = min(tried, key=tried.get)
    seconds = {case: [] for case in (*calls, "tunix")}
    for _ in range(repeats):
        for case, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[case].append(time.perf_counter() - start)
        seconds["tunix"].append(theirs(dtype))
    child.stdin.close()
    print(f"{name}: batch {BATCH}, {PROMPT}+{NEW} tokens, medians of {repeats}")
    peer = np.array(seconds["tunix"])
    for case, found in seconds.items():
        rate, ratio = BATCH * NEW / np.median(found), np.median(peer / np.array(found))
        title = f"tunix {dtype}" if case == "tunix" else case
        print(f"{title:16} {rate:8.0f} tokens/s  {ratio:5.2f} x tunix")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", help="of the environment with tunix")
    parser.add_argument("--model", default="qwen3_4p5m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        _serve(json.loads(chosen.serve))
    elif not chosen.python:
        parser.error("--python: name the python of the environment with tunix")
    else:
        _compare(chosen.python, chosen.model, chosen.repeats)


if __name__ == "__main__":
    main()
