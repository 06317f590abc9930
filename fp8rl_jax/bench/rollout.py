"""`fp8rl bench rollout`: tokens per second of the sampler, on random weights and random prompts.

Every cell (model, batch, prompt, response, group) runs all cases, which take turns within each
repetition, so that a machine that slows down slows all of them. Figures are medians; ratios
are medians of the ratios within a repetition. A response has its full length, no token ends it, and
prefill is part of the time; compilation is not. With response lengths from `long_tail`, the ways of
sampling more sequences than slots (rollout_ways.py) are timed instead, `QUEUE` sequences per slot.

On a CPU FP8 is emulated: operands are converted to bf16 before the product.

Not done: several devices. Of a config only the model's shape is used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.base.version import __version__
from fp8rl_jax.bench.rollout_ways import WAYS, Cell, long_tail
from fp8rl_jax.bench.table import EMULATED, text_table
from fp8rl_jax.kernels import resolve
from fp8rl_jax.models import ModelConfig, init_params, kernel_formats, quantize_params, rope_tables
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.models.presets import PRESETS, preset
from fp8rl_jax.quant import Recipe
from fp8rl_jax.rollout import Requests, Rollout, make_refit
from fp8rl_jax.rollout.cases import CASES

QUEUE = 8  # sequences per slot where response lengths differ
LENGTHS = ("full", "long_tail")


def _qwen3(vocabulary: int, width: int, layers: int) -> ModelConfig:
    """Returns a model with Qwen3's rules, small enough to decode on two CPU cores."""
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        rope_theta=1e6,
        tie_word_embeddings=True,
        embedding_init_std=0.02,  # with 1 a tied embedding would repeat the last token for ever
    )


# 4,459,264 and 29,369,856 parameters.
SMALL = {"qwen3_4p5m": _qwen3(5120, 256, 4), "qwen3_29m": _qwen3(8192, 512, 8)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to time; every combination of the first four lists is a cell.

    Attributes:
      batches: sequences decoded at once, prompt and response together.
      prompts, news: tokens of a prompt and of a response.
      groups: samples per prompt.
      cases: names of CASES; ratios refer to the first.
      lengths: names of LENGTHS.
      repeats: timed repetitions after the one that compiles.

    Raises:
      UserError: a value is unknown or out of bounds.
    """

    batches: Sequence[int]
    prompts: Sequence[int]
    news: Sequence[int]
    groups: Sequence[int]
    cases: Sequence[str]
    lengths: Sequence[str]
    repeats: int

    def __post_init__(self):
        if self.repeats < 1:
            raise UserError(f"--repeats is {self.repeats}; write at least 1")
        for option, known in (("cases", CASES), ("lengths", LENGTHS)):
            names = getattr(self, option)
            for name in names:
                if name not in known:
                    raise UserError(f"--{option} holds {name!r}; write names of {', '.join(known)}")
            if not names:
                raise UserError(f"--{option} is empty; write names of {', '.join(known)}")
        for batch, group in itertools.product(self.batches, self.groups):
            if batch % group:
                raise UserError(
                    f"--batch={batch} counts sequences, of which a prompt has --group={group}: "
                    "write a batch that every group divides"
                )

    @property
    def cells(self) -> list[Cell]:
        return [
            Cell(batch, prompt, new, group)
            for batch, prompt, new, group in itertools.product(
                self.batches, self.prompts, self.news, self.groups
            )
        ]


def model_of(name: str) -> ModelConfig:
    """Returns the shapes of SMALL or of a preset.

    Raises:
      UserError: there is no such name.
    """
    if name in SMALL:
        return SMALL[name]
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}; write one of {', '.join([*SMALL, *PRESETS])}")
    return preset(name)


def served_weights(params: Any, recipe: Recipe):
    """Makes rollout weights of float32 masters; on a GPU in the layout that its kernels read."""
    shapes = jax.eval_shape(lambda params: quantize_params(params, recipe), params)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    formats = jax.tree.map(lambda _: here, shapes)
    if resolve(recipe.kernels) != "reference":
        formats = kernel_formats(shapes, formats)
    refit = make_refit(recipe, shardings={"out_shardings": (formats, here, here)})
    return refit(params)[0]


def arguments(
    model: ModelConfig, weights: Any, cell: Cell, count: int, limits: np.ndarray
) -> tuple:
    """Returns a sampler's arguments for `count` sequences of random prompts at temperature 1."""
    prompts = random_prompts(model, cell, count)
    requests = Requests(
        lengths=np.full(len(prompts), cell.prompt, np.int32),
        key=jax.random.key(0, impl="threefry2x32"),
        sample_ids=np.arange(count, dtype=np.int32),
        temperature=np.ones(count, np.float32),
        limits=limits,
        rope=tuple(jnp.asarray(t) for t in rope_tables(model, cell.prompt + cell.new)),
    )
    return weights, prompts, requests


def random_prompts(model: ModelConfig, cell: Cell, count: int) -> np.ndarray:
    """Draws the prompts of `count` sequences: tokens (count / group, prompt) int32."""
    drawn = np.random.default_rng(0).integers(
        0, model.vocab_size, size=(count // cell.group, cell.prompt)
    )
    return drawn.astype(np.int32)


def timed(
    subjects: Mapping[tuple[str, str], Callable[[], int]], repeats: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Times calls in turns; returns {name: {tokens, seconds of each repetition, first_s}}."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for turn in range(1 + repeats):
        for name, call in subjects.items():
            start = time.perf_counter()
            tokens = call()
            seconds = time.perf_counter() - start
            if turn == 0:
                found[name] = {"tokens": tokens, "seconds": [], "first_s": seconds}
            else:
                found[name]["seconds"].append(seconds)
    return found


def faster(one: dict, other: dict) -> float:
    """Returns the median over repetitions of one's tokens per second divided by the other's."""
    seconds = np.array(other["seconds"]) / np.array(one["seconds"])
    return float(np.median(seconds) * one["tokens"] / other["tokens"])


def _sampled(
    sample: Callable[..., Rollout], weights: Any, prompts: np.ndarray, requests: Requests
) -> int:
    """Calls a sampler and returns how many tokens it sampled."""
    return int(np.asarray(sample(weights, prompts, requests).mask).sum())


def sampling_calls(
    lengths: str, model: ModelConfig, weights: Mapping[str, Any], cell: Cell
) -> dict[tuple[str, str], Callable[[], int]]:
    """Returns {(case, way): function that samples a cell once and returns how many tokens}: for
    full responses static batches, else all WAYS."""
    full = lengths == "full"
    count = cell.batch if full else QUEUE * cell.batch
    limits = np.full(count, cell.new, np.int32) if full else long_tail(count, cell.new)
    subjects: dict[tuple[str, str], Callable[[], int]] = {}
    for (case, served), way in itertools.product(weights.items(), WAYS):
        if way == "static" or not full:
            sample = WAYS[way](model, CASES[case](), cell)
            _, prompts, requests = arguments(model, served, cell, count, limits)
            subjects[case, way] = functools.partial(_sampled, sample, served, prompts, requests)
    return subjects


def _rows(
    lengths: str,
    name: str,
    model: ModelConfig,
    weights: Mapping[str, Any],
    cell: Cell,
    repeats: int,
) -> list[dict[str, Any]]:
    """Times a cell; returns a row for each case and way."""
    measured = timed(sampling_calls(lengths, model, weights, cell), repeats)
    rows = []
    for (case, way), found in measured.items():
        median = float(np.median(found["seconds"]))
        row = {
            "model": name,
            **dataclasses.asdict(cell),
            "case": case,
            **found,
            "tokens_per_s": found["tokens"] / median,
        }
        if lengths == "full":
            row |= {
                "step_ms": 1e3 * median / cell.new,
                "over_first": faster(found, next(iter(measured.values()))),
            }
        else:
            row |= {
                "way": way,
                "samples": QUEUE * cell.batch,
                "over_first_way": faster(found, measured[case, next(iter(WAYS))]),
            }
        rows.append(row)
    return rows


def bench(models: Mapping[str, ModelConfig], plan: Plan, note: Callable[[str], None]) -> dict:
    """Times every cell of every model.

    Args:
      models: shapes by the name that the table shows.
      plan: what to time.
      note: called with lines of progress.

    Returns:
      The content of `rollout.json`. `models`: shapes and parameters of each. `full`: a row for each
      case of each cell: model, batch, prompt, new, group, case; tokens of one call, seconds of each
      repetition, first_s (the first call, compilation included); tokens_per_s; step_ms,
      milliseconds per token of a sequence; over_first, tokens per second over the first case's.
      `long_tail`: a row for each case and way of each cell: samples, the number of sequences;
      over_first_way, tokens per second over the first way's. Further fields describe the machine
      and the versions.
    """
    versions = {
        "fp8rl_jax": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }
    rows: dict[str, list[dict[str, Any]]] = {lengths: [] for lengths in LENGTHS}
    shapes = {}
    for name, model in models.items():
        params = exact_jit(lambda key, model=model: init_params(model, key))(
            jax.random.key(0, impl="threefry2x32")
        )
        shapes[name] = {
            "parameters": parameter_counts(model).total,
            "shape": dataclasses.asdict(model),
        }
        weights = {case: served_weights(params, CASES[case]()) for case in plan.cases}
        for cell in plan.cells:
            for kind in plan.lengths:
                rows[kind] += _rows(kind, name, model, weights, cell, plan.repeats)
            note(f"{name}: {cell}: measured")
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "repeats": plan.repeats,
        "models": shapes,
        **rows,
    }


_EXPLANATIONS = {
    "full": "batch: sequences at once; prompt + new tokens; prefill is part of the time.",
    "long_tail": f"{QUEUE} sequences a slot; responses of 1 to `new` tokens, mean a quarter.",
}


def format_table(result: dict) -> str:
    """Returns the result of `bench` as text; ratios above 1 are faster."""
    lines: list[str] = []
    for kind, explanation in _EXPLANATIONS.items():
        cells: dict[tuple[str, Cell], list[dict]] = {}
        for row in result[kind]:
            cell = Cell(row["batch"], row["prompt"], row["new"], row["group"])
            cells.setdefault((row["model"], cell), []).append(row)
        lines += [explanation] if cells else []
        for (model, cell), rows in cells.items():
            count = result["models"][model]["parameters"]
            head: tuple[str, ...] = ("tokens/s", f"over {rows[0].get('way')}")
            if kind == "full":
                head = ("tokens/s", "ms/token", f"over {rows[0]['case']}")
            lines += ["", f"{model} ({count:,} parameters), {cell}"]
            lines += text_table([("", *head), *map(_cells, rows)])
        lines += [""] if cells else []
    lines.append(
        f"{result['platform']} ({result['device']}), {result['cores']} cores; medians of "
        f"{result['repeats']}; ratios of tokens/s, above 1 is faster"
    )
    return "\n".join([*lines, EMULATED] if result["platform"] == "cpu" else lines)


def _cells(row: dict) -> list[str]:
    cells = [
        " ".join(row[key] for key in ("case", "way") if key in row),
        f"{row['tokens_per_s']:.0f}",
    ]
    if "way" in row:
        return [*cells, f"{row['over_first_way']:.2f}"]
    return [*cells, f"{row['step_ms']:.2f}", f"{row['over_first']:.2f}"]
