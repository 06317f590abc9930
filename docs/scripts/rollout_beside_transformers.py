"""Tokens per second of the sampler beside transformers' `generate`, on the same random weights.

    python docs/scripts/rollout_beside_transformers.py    # the cells of docs/bench_rollout.md

The weights go through a checkpoint in Hugging Face's format, so both run the same model. `generate`
is called as users call it: eager, with the default attention and cache, sampling from the full
vocabulary at temperature 1. float32 and bf16 are both tried in every cell, and the faster one takes
turns with ours: on a CPU without bf16 matrix instructions that is float32. Unlike our sampler it
records no log-probabilities.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
import time

import jax
import numpy as np

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.bench import rollout
from fp8rl_jax.bench.rollout_ways import Cell
from fp8rl_jax.bench.table import text_table
from fp8rl_jax.models import ModelConfig, hf, init_params

DTYPES = ("float32", "bfloat16")
# Targets of the project: tokens per second over transformers', on a CPU, in this cell.
_TARGETS = {"bf16": 3.0, "fp8": 1.5}
_TARGET_CELL = Cell(32, 64, 128, 1)


class Peer:
    """One model in both DTYPES, by transformers."""

    def __init__(self, config: ModelConfig, params):
        """Loads `params`, float32 masters of `config`."""
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.models = {}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model"
            hf.save(path, config, jax.device_get(params), dtype="float32")
            for name in DTYPES:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, name)
                )
                self.models[name] = model.to(device).eval()

    def generate(self, dtype: str, prompts: np.ndarray, new: int, group: int) -> np.ndarray:
        """Samples `group` responses of `new` tokens to each of prompts (P, Tp): (P*group, new)."""
        torch = self._torch
        model = self.models[dtype]
        tokens = torch.tensor(prompts, dtype=torch.long, device=model.device)
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
                num_return_sequences=group,
            )
        return out[:, prompts.shape[1] :].cpu().numpy()

    def faster(self, prompts: np.ndarray, new: int, group: int) -> dict[str, float]:
        """Times a call per dtype after a warm-up; returns {dtype: seconds}, the faster first."""
        seconds = {}
        for dtype in DTYPES:
            self.generate(dtype, prompts, min(new, 8), group)
            start = time.perf_counter()
            self.generate(dtype, prompts, new, group)
            seconds[dtype] = time.perf_counter() - start
        return dict(sorted(seconds.items(), key=lambda item: item[1]))


def compare(
    name: str, model: ModelConfig, cases: list[str], cells: list[Cell], repeats: int
) -> list[dict]:
    """Prints a table for each cell of a model; returns a row for each of its lines."""
    key = jax.random.key(0, impl="threefry2x32")
    params = exact_jit(lambda key: init_params(model, key))(key)
    weights = {case: rollout.served_weights(params, rollout.CASES[case]()) for case in cases}
    peer = Peer(model, params)
    rows = []
    for cell in cells:
        prompts = rollout.random_prompts(model, cell, cell.batch)
        tried = peer.faster(prompts, cell.new, cell.group)
        dtype = next(iter(tried))
        theirs = "transformers", dtype
        calls = rollout.sampling_calls("full", model, weights, cell)
        calls[theirs] = lambda dtype=dtype, prompts=prompts, cell=cell: (
            peer.generate(dtype, prompts, cell.new, cell.group).size
        )
        measured = rollout.timed(calls, repeats)
        table = [("", "tokens/s", "over transformers")]
        for (case, way), found in measured.items():
            rate = found["tokens"] / float(np.median(found["seconds"]))
            over = rollout.faster(found, measured[theirs])
            target = name in rollout.SMALL and cell == _TARGET_CELL and _TARGETS.get(case)
            about = {"model": name, **dataclasses.asdict(cell), "case": case, "tried_s": tried}
            rows.append(about | found | {"tokens_per_s": rate, "over_transformers": over})
            wanted = f" (target {target} on a CPU)" if target else ""
            table.append((f"{case} {way}", f"{rate:.0f}", f"{over:.2f}{wanted}"))
        print(f"\n{name}, {cell}", *text_table(table), sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="qwen3_4p5m,qwen3_29m")
    parser.add_argument("--cases", default="bf16,fp8_linear,fp8_kv,fp8")
    for name, default in (("batch", "32"), ("prompt", "64"), ("new", "128"), ("group", "1")):
        parser.add_argument(f"--{name}", default=default, help="a number, or several with commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, help="directory for rollout.json")
    chosen = parser.parse_args()
    sizes = (chosen.batch, chosen.prompt, chosen.new, chosen.group)
    cells = [Cell(*size) for size in itertools.product(*(map(int, s.split(",")) for s in sizes))]
    rows = []
    for name in chosen.models.split(","):
        model = rollout.model_of(name)
        rows += compare(name, model, chosen.cases.split(","), cells, chosen.repeats)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "rollout.json").write_text(json.dumps({"full": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
