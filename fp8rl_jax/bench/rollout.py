"""`fp8rl bench rollout`: tokens per second of the sampler, on random weights and random prompts.

Every cell (model, batch, prompt, response, group) runs all cases and peers, which take turns within
each repetition, so that a machine that slows down slows all of them. Figures are medians; ratios
are medians of the ratios within a repetition. A response has its full length, no token ends it, and
prefill is part of the time; compilation is not. With response lengths from `long_tail`, the ways of
sampling more sequences than slots are timed instead, `QUEUE` sequences a slot.

On a CPU FP8 is emulated: operands are converted to bf16 and multiplied there.

Not done: several devices. A config gives the model's shape alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fp8rl_jax.bench import transformers_peer
from fp8rl_jax.bench.rollout_ways import WAYS, long_tail
from fp8rl_jax.errors import UserError
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.kernels import resolve
from fp8rl_jax.models import (
    ModelConfig,
    init_params,
    kernel_formats,
    quantize_params,
    rope_tables,
)
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.models.presets import PRESETS, preset
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.rollout import HalvedSampler, Rollout, SamplerConfig, make_refit
from fp8rl_jax.version import __version__

QUEUE = 8  # sequences per slot where response lengths differ
LENGTHS = ("full", "long_tail")
PEERS = ("transformers",)
CASES: dict[str, Callable[[], Recipe]] = {
    "bf16": lambda: get_recipe("bf16"),
    "fp8_linears": lambda: dataclasses.replace(get_recipe("fp8"), name="fp8_linears", kv="none"),
    "fp8_kv": lambda: dataclasses.replace(get_recipe("bf16"), name="fp8_kv", kv="dynamic"),
    "fp8": lambda: get_recipe("fp8"),
}
# A tied embedding of standard deviation 1 would make the last token the next one, always.
_QWEN3 = dict(
    head_dim=64, rope_theta=1e6, tie_word_embeddings=True, embedding_init_std=0.02
)  # fmt: skip
# Qwen3's rules in sizes that two CPU cores decode: 4,459,264 and 29,369,856 parameters.
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_4p5m": dict(
        vocab_size=5120, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, **_QWEN3,
    ),
    "qwen3_29m": dict(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, **_QWEN3,
    ),
}  # fmt: skip
# Tokens per second over transformers' that the project wants, on a CPU, in this cell.
TARGETS = {"bf16": 3.0, "fp8": 1.5}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One workload: `batch` sequences at once, `group` of them of a prompt."""

    batch: int
    prompt: int
    new: int
    group: int


_TARGET_CELL = Cell(32, 64, 128, 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to time; every combination of the first four lists is a cell.

    Attributes:
      batches: sequences decoded at once, prompt and response together.
      prompts, news: tokens of a prompt and of a response.
      groups: samples per prompt.
      cases: names of CASES; the first is the one that ratios refer to.
      lengths: names of LENGTHS.
      peers: names of PEERS.
      repeats: timed repetitions after the one that compiles.

    Raises:
      UserError: something that cannot be run.
    """

    batches: Sequence[int]
    prompts: Sequence[int]
    news: Sequence[int]
    groups: Sequence[int]
    cases: Sequence[str] = tuple(CASES)
    lengths: Sequence[str] = ("full",)
    peers: Sequence[str] = PEERS
    repeats: int = 3

    def __post_init__(self):
        if self.repeats < 1:
            raise UserError(f"--repeats is {self.repeats}; write at least 1")
        for option, known in (("cases", CASES), ("lengths", LENGTHS), ("peers", PEERS)):
            names = getattr(self, option)
            for name in names:
                if name not in known:
                    raise UserError(f"--{option} holds {name!r}; write names of {', '.join(known)}")
            if not names and option != "peers":
                raise UserError(f"--{option} is empty; write names of {', '.join(known)}")
        for batch, group in itertools.product(self.batches, self.groups):
            if batch % group:
                raise UserError(
                    f"--batch={batch} counts sequences, of which a prompt has --group={group}: "
                    "write a batch that every group divides"
                )

    @property
    def cells(self) -> list[Cell]:
        sizes = (self.batches, self.prompts, self.news, self.groups)
        return [Cell(*numbers) for numbers in itertools.product(*sizes)]


def model_of(name: str) -> ModelConfig:
    """The shapes of SMALL or of a preset.

    Raises:
      UserError: no such name.
    """
    if name in SMALL:
        return ModelConfig(**SMALL[name])
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}; write one of {', '.join([*SMALL, *PRESETS])}")
    return preset(name)


def served_weights(params: Any, recipe: Recipe):
    """Rollout weights of float32 masters, on a GPU laid out as its kernels read them."""
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
    """What a sampler is called with: `count` sequences of random prompts, temperature 1."""
    prompts = random_prompts(model, cell, count)
    return (
        weights, prompts, np.full(len(prompts), cell.prompt, np.int32), jax.random.key(0),
        np.arange(count, dtype=np.int32), np.ones(count, np.float32), limits,
        tuple(jnp.asarray(t) for t in rope_tables(model, cell.prompt + cell.new)),
    )  # fmt: skip


def random_prompts(model: ModelConfig, cell: Cell, count: int) -> np.ndarray:
    """Tokens (count / group, prompt) int32 of every prompt that `count` sequences have."""
    shape = (count // cell.group, cell.prompt)
    return np.random.default_rng(0).integers(0, model.vocab_size, shape).astype(np.int32)


def settings_of(cell: Cell) -> SamplerConfig:
    """Of a cell's sampler; no token ends a response."""
    return SamplerConfig(cell.new, cell.group, eos_ids=(), pad_id=0)


def _sampled(sample: Callable[..., Rollout], call: tuple) -> Callable[[], int]:
    """A call that returns how many tokens it sampled."""
    return lambda: int(np.asarray(sample(*call).mask).sum())


def _timed(subjects: dict[str, Callable[[], int]], repeats: int) -> dict[str, dict[str, Any]]:
    """{name: tokens of a call, seconds of each repetition and of the first call}."""
    found: dict[str, dict[str, Any]] = {}
    for name, call in subjects.items():
        start = time.perf_counter()
        tokens = call()
        found[name] = {"tokens": tokens, "seconds": [], "first_s": time.perf_counter() - start}
    for _ in range(repeats):
        for name, call in subjects.items():
            start = time.perf_counter()
            call()
            found[name]["seconds"].append(time.perf_counter() - start)
    return found


def _faster(one: dict, other: dict) -> float:
    """Tokens per second of one over the other's."""
    seconds = np.array(other["seconds"]) / np.array(one["seconds"])
    return float(np.median(seconds) * one["tokens"] / other["tokens"])


def _row(name: str, cell: Cell, case: str, measured: dict[str, Any]) -> dict[str, Any]:
    median = float(np.median(measured["seconds"]))
    return {
        "model": name, **dataclasses.asdict(cell), "case": case, **measured,
        "tokens_per_s": measured["tokens"] / median,
    }  # fmt: skip


def _full_rows(name, model, weights, peer, cell: Cell, repeats: int) -> list[dict[str, Any]]:
    """Every case, and the peer, with responses of full length."""
    limits = np.full(cell.batch, cell.new, np.int32)
    subjects: dict[str, Callable[[], int]] = {}
    for case, served in weights.items():
        sample = HalvedSampler(model, CASES[case](), settings_of(cell))
        subjects[case] = _sampled(sample, arguments(model, served, cell, cell.batch, limits))
    tried: dict[str, float] = {}
    if peer is not None:
        prompts = random_prompts(model, cell, cell.batch)
        tried = peer.faster(prompts, cell.new, cell.group)
        dtype = next(iter(tried))
        subjects["transformers"] = lambda: peer.generate(dtype, prompts, cell.new, cell.group).size
    measured = _timed(subjects, repeats)
    first = next(iter(measured.values()))
    rows = []
    for case, found in measured.items():
        row = _row(name, cell, case, found)
        row["step_ms"] = 1e3 * float(np.median(found["seconds"])) / cell.new
        row["over_first"] = _faster(found, first)
        if case == "transformers":
            row["dtype"], row["tried_s"] = dtype, tried
        elif peer is not None:
            row["over_transformers"] = _faster(found, measured["transformers"])
            wanted = name in SMALL and cell == _TARGET_CELL and jax.default_backend() == "cpu"
            row["target"] = TARGETS.get(case) if wanted else None
        rows.append(row)
    return rows


def _queue_rows(name, model, weights, cell: Cell, repeats: int) -> list[dict[str, Any]]:
    """Every way of sampling `QUEUE` sequences a slot, with responses of different lengths."""
    count = QUEUE * cell.batch
    limits = long_tail(count, cell.new)
    subjects = {}
    for (case, served), (way, make) in itertools.product(weights.items(), WAYS.items()):
        sample = make(model, CASES[case](), settings_of(cell), cell.batch)
        subjects[case, way] = _sampled(sample, arguments(model, served, cell, count, limits))
    measured = _timed(subjects, repeats)
    rows = []
    for (case, way), found in measured.items():
        row = _row(name, cell, case, found) | {"way": way, "samples": count}
        row["over_first_way"] = _faster(found, measured[case, next(iter(WAYS))])
        rows.append(row)
    return rows


def bench(models: Mapping[str, ModelConfig], plan: Plan, note: Callable[[str], None]) -> dict:
    """Times every cell of every model.

    Args:
      models: shapes by the name that the table shows.
      plan: what to time.
      note: told how far it is, and what is left out.

    Returns:
      What `rollout.json` holds. `models`: shapes and parameters of each. `full`: a row of each
      case and peer of each cell: model, batch, prompt, new, group, case; tokens of one call,
      seconds of each repetition, first_s (the first call, compilation included); tokens_per_s;
      step_ms, milliseconds per token of a sequence; over_first and over_transformers, tokens per
      second over the first case's and the peer's; target, of the latter. `long_tail`: a row of
      each case and way of each cell: samples, the number of sequences; over_first_way, tokens per
      second over the first way's. Further fields say where it ran.
    """
    has_peer = "transformers" in plan.peers and "full" in plan.lengths
    versions = {
        "fp8rl_jax": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    if has_peer:
        try:
            versions |= transformers_peer.versions()
        except ImportError as error:
            note(f"transformers is left out: {error}")
            has_peer = False
    full, long = [], []
    shapes = {}
    for name, model in models.items():
        params = exact_jit(lambda key, model=model: init_params(model, key))(jax.random.key(0))
        shapes[name] = {
            "parameters": parameter_counts(model).total, "shape": dataclasses.asdict(model)
        }  # fmt: skip
        weights = {case: served_weights(params, CASES[case]()) for case in plan.cases}
        peer = transformers_peer.Peer(model, params) if has_peer else None
        for cell in plan.cells:
            if "full" in plan.lengths:
                full += _full_rows(name, model, weights, peer, cell, plan.repeats)
            if "long_tail" in plan.lengths:
                long += _queue_rows(name, model, weights, cell, plan.repeats)
            note(f"{name}: {_text(dataclasses.asdict(cell))}: measured")
    device = jax.devices()[0]
    return {
        "platform": device.platform, "device": device.device_kind,
        "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "versions": versions, "repeats": plan.repeats, "models": shapes,
        "full": full, "long_tail": long,
    }  # fmt: skip


def _text(cell: Mapping[str, Any]) -> str:
    return f"batch {cell['batch']}, {cell['prompt']}+{cell['new']}, group {cell['group']}"


def _line(cells: Sequence[str], width: int) -> str:
    first, *others = cells
    return (f"{first:<{width}}" + "".join(f"{cell:>{_WIDTH}}" for cell in others)).rstrip()


_WIDTH = 22
_EXPLANATIONS = {
    "full": "batch: sequences at once; prompt + new tokens; prefill is part of the time.",
    "long_tail": f"{QUEUE} sequences a slot; responses of 1 to `new` tokens, mean a quarter.",
}


def format_table(result: dict) -> str:
    """The result of `bench` as text; ratios above 1 are faster."""
    lines: list[str] = []
    for kind in LENGTHS:
        rows = result[kind]
        if not rows:
            continue
        width = 2 + max(len(_case(row)) for row in rows)
        lines.append(_EXPLANATIONS[kind])
        for (model, *_), same in itertools.groupby(
            rows, key=lambda row: (row["model"], _text(row))
        ):
            found = list(same)
            count = result["models"][model]["parameters"]
            lines += ["", f"{model} ({count:,} parameters), {_text(found[0])}"]
            heads = _HEADS[kind](found[0])
            lines.append(_line(("", *heads), width))
            lines += [_line((_case(row), *_cells(kind, row)), width) for row in found]
        lines.append("")
    lines.append(
        f"{result['platform']} ({result['device']}), {result['cores']} cores; medians of "
        f"{result['repeats']}; ratios of tokens/s, above 1 is faster"
    )
    if result["platform"] == "cpu":
        lines.append("FP8 is emulated on a CPU: its speed here says nothing about a GPU")
    return "\n".join(lines)


_HEADS = {
    "full": lambda row: ("tokens/s", "ms/token", f"over {row['case']}", "over transformers"),
    "long_tail": lambda row: ("tokens/s", f"over {row['way']}"),
}


def _case(row: dict) -> str:
    return " ".join(row[key] for key in ("case", "dtype", "way") if key in row)


def _cells(kind: str, row: dict) -> list[str]:
    cells = [f"{row['tokens_per_s']:.0f}"]
    if kind == "long_tail":
        return [*cells, f"{row['over_first_way']:.2f}"]
    peer = f"{row['over_transformers']:.2f}" if "over_transformers" in row else ""
    if row.get("target"):
        peer += f" (target {row['target']})"
    return [*cells, f"{row['step_ms']:.2f}", f"{row['over_first']:.2f}", peer]


def write(result: dict, directory: pathlib.Path) -> pathlib.Path:
    """Writes rollout.json; returns its path.

    Raises:
      OSError: the directory cannot be written.
    """
    path = directory / "rollout.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
