"""`fp8rl bench kernels`: the GPU kernels' correctness, then their speed beside XLA's and PyTorch's.

Correctness comes first and alone decides the exit status (`kernel_checks`). Times follow on a GPU
(`attention_times`, `kernel_times`), with the two ceilings measured in the same run: a copy for
decode attention and products of few rows, whose time is the cache's and the weight's bytes, and a
bf16 product of 8192^3 for many. Last, the project's targets: met, missed and by how much, or not
measured.

Without a GPU the reference is checked and everything else is named as not measured: the Triton
kernels run on a CPU only in Triton's interpreter, which is for the tests.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fp8rl_jax.bench import (
    attention_checks,
    attention_times,
    gradient_checks,
    kernel_times,
    torch_products,
)
from fp8rl_jax.bench import kernel_checks as checks
from fp8rl_jax.bench import kernel_shapes as shapes
from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.bench.kernel_shapes import Case
from fp8rl_jax.errors import UserError
from fp8rl_jax.kernels import triton_installed

SECONDS = 300.0  # no further product is begun after so long
_OF_ATTENTION = 0.4  # share of the seconds after which no further attention is begun
_COLUMNS_ON_CPU = 1024  # the reference's check there takes no wider matrix
_CHECKED_ROWS = 200
_TORCH_SECONDS = 120

Note = Callable[[str], None]


def on_gpu() -> bool:
    """Whether the Triton kernels run here.

    Raises:
      UserError: there is a GPU, and jax-triton or Triton is missing.
    """
    if jax.default_backend() != "gpu":
        return False
    if not triton_installed():
        raise UserError(
            "this machine has a GPU, and its kernels need jax-triton and Triton, of which one is "
            "not installed: pip install 'fp8rl_jax[cuda]'"
        )
    return True


def environment() -> dict[str, Any]:
    """Device, versions and date: what a figure is worth nothing without."""
    device = jax.devices()[0]
    versions = {}
    for name in ("jax", "jaxlib", "jax-triton", "triton", "torch", "numpy", "jax-cuda13-plugin"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "platform": device.platform,
        "driver": _driver() if device.platform == "gpu" else None,
        "python": sys.version.split()[0],
        "versions": versions,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return text.stdout.split("\n")[0].strip()


def correctness(cases: Sequence[Case], seed: int = 0) -> Iterator[checks.Outcome]:
    """Checks of every kind and shape of the cases, with few rows; see `kernel_checks`.

    Attention over pages, fast attention and gradients too. On a GPU the Triton kernels; elsewhere
    the reference, of dense products and narrower matrices.
    """
    implementation = "triton" if on_gpu() else "reference"
    dense = dense_checks(cases, implementation == "reference")
    grouped = {(c.depth, c.columns, c.experts, c.top_k): c for c in cases if c.experts}
    largest = max(
        [max(1, c.rows) * c.depth for c in dense]
        + [c.depth * c.columns for c in dense]
        + [4096 * 1024]
        + ([c.experts * c.depth * c.columns for c in grouped.values()] if on_gpu() else [])
    )
    source = Source(largest, seed)
    for case in dense:
        yield checks.check_dense(case, source, implementation, seed)
    for attention in attention_checks.CASES:
        yield attention_checks.check_attention(attention, source, implementation)
    for fast in gradient_checks.CASES:
        yield from gradient_checks.check(fast, source, implementation)
    for kind in ("fp8", "bf16", "float32"):
        wide = checks.Dense(kind, 0, 512, 1152)
        yield from checks.check_rows(wide, checks.ROWS, source, implementation, seed)
    if implementation == "reference":
        return
    for kind in checks.TILES:
        yield from checks.check_tiles(checks.Dense(kind, 200, 1024, 520), source)
    for case in grouped.values():
        yield from checks.check_grouped(with_rows(case, 16), source, seed)
        rows = 64 * case.experts // case.top_k + 1  # tiles of 128 rows, as wgrad needs them
        yield checks.check_grouped_wgrad(with_rows(case, rows), source, seed)


def with_rows(case: Case, rows: int) -> Case:
    return Case(case.name, "fprop", case.kind, rows, case.depth, case.columns, case.experts,
                case.top_k)  # fmt: skip


def dense_checks(cases: Sequence[Case], narrow: bool) -> list[checks.Dense]:
    """One check for every kind and matrix; wgrad with its scales, results as they are stored."""
    found: dict[checks.Dense, None] = {}
    for case in cases:
        if case.experts:
            continue
        columns = min(case.columns, _COLUMNS_ON_CPU) if narrow else case.columns
        dtype = "float32" if case.kind == "float32" or case.gemm == "wgrad" else "bfloat16"
        # wgrad contracts over the tokens, a multiple of 128: one that ends inside a block is worse.
        depth = 968 if case.gemm == "wgrad" else case.depth
        by_column = case.gemm == "wgrad"
        found[checks.Dense(case.kind, _CHECKED_ROWS, depth, columns, dtype, by_column)] = None
    found[checks.Dense("fp8", _CHECKED_ROWS, 1000, 520, left="float8_e5m2")] = None
    found[checks.Dense("fp8", _CHECKED_ROWS, 1000, 520, by_column=True)] = None
    found[checks.Dense("bf16", _CHECKED_ROWS, 1000, 520)] = None
    return list(found)


def bench(
    models: Sequence[str] = shapes.MODELS,
    rows: Sequence[int] = shapes.ROWS,
    quick: bool = False,
    note: Note = lambda text: None,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """Checks the kernels, then times them where there is a GPU.

    Args:
      models: names of presets.
      rows: of the products.
      quick: the largest matrix of each model and the shapes of attention's targets alone.
      note: called with a line of progress.
      seconds: after so long no further product is begun; what is left out is listed.

    Returns:
      What `kernels.json` holds: environment; outcomes of the checks; ok; and after a run on a GPU
      ceilings, attention and rows (one per case), torch, left_out; targets.

    Raises:
      UserError: no such model, or a GPU without jax-triton.
    """
    start = time.monotonic()
    cases = shapes.cases(models, rows, quick)
    result: dict[str, Any] = {"environment": environment(), "quick": quick}
    attention = attention_times.cases(quick)
    note(f"{len(cases)} products, {len(attention)} of attention; checking first")
    outcomes = list(correctness(cases))
    result["checks"] = [vars(outcome) for outcome in outcomes]
    result["ok"] = all(outcome.ok for outcome in outcomes)
    note(checks.format_outcomes(outcomes))
    if on_gpu():
        result |= times(cases, attention, seconds - (time.monotonic() - start), note)
    else:
        left_out = [str(case) for case in (*attention, *cases)]
        result |= {"ceilings": None, "attention": [], "rows": [], "torch": None}
        result["left_out"] = left_out
    result["targets"] = targets(result["rows"], result["attention"])
    return result


def times(
    cases: Sequence[Case],
    attention: Sequence[attention_times.Case],
    seconds: float,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """The part of `bench` that needs a GPU: ceilings, attention, rows, torch, left_out."""
    start = time.monotonic()
    largest = kernel_times.largest_operand(list(cases)), attention_times.largest_operand()
    source = Source(max(largest))
    ceilings = kernel_times.ceilings(source)
    note(f"copy {ceilings['copy_gbps']:.0f} GB/s, bf16 {ceilings['bf16_tflops']:.0f} TFLOPS")
    result: dict[str, Any] = {"ceilings": ceilings, "rows": [], "left_out": [], "torch": None}
    result["attention"] = []
    for row in attention_times.time_all(attention, source, ceilings, _OF_ATTENTION * seconds):
        result["attention"].append(row)
        note(attention_times.line(row))
    attention_times.compare(result["attention"])
    result["torch"] = _torch([c for c in cases if c.name.startswith("square") and c.kind == "fp8"])
    for case in cases:
        if time.monotonic() - start > seconds:
            result["left_out"].append(str(case))
            continue
        row = _row(case, kernel_times.time_case(case, source), ceilings)
        result["rows"].append(row)
        note(_line(row))
    return result


def _torch(cases: Sequence[Case]) -> dict[str, Any]:
    """What `torch_products` prints for the shapes of the cases; {'error'} where it cannot run."""
    wanted = json.dumps([[c.rows, c.depth, c.columns] for c in cases])
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(pathlib.Path(torch_products.__file__)), wanted],
            capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False,
        )  # fmt: skip
        return json.loads(done.stdout.strip().split("\n")[-1])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def _row(case: Case, measured: dict[str, Any], ceilings: dict[str, float]) -> dict[str, Any]:
    """A case with its times and what follows from them."""
    row: dict[str, Any] = {
        "case": str(case), "name": case.name, "gemm": case.gemm, "kind": case.kind,
        "rows": case.rows, "depth": case.depth, "columns": case.columns,
        "experts": case.experts, "top_k": case.top_k, "times": measured,
    }  # fmt: skip
    if "us" not in measured["ours"]:
        return row
    seconds = measured["ours"]["us"] / 1e6
    row["tflops"], row["gbps"] = case.flops / seconds / 1e12, case.bytes / seconds / 1e9
    row["weight_gbps"] = case.weight_bytes / seconds / 1e9
    # The larger share names what bounds the product; FP8's matrix ceiling is above the bf16 one.
    row["of_copy"] = row["gbps"] / ceilings["copy_gbps"]
    row["of_bf16"] = row["tflops"] / ceilings["bf16_tflops"]
    for version in ("bf16", "fp8", "dense"):
        if "us" in measured.get(version, {}):
            row[f"over_{version}"] = measured[version]["us"] / measured["ours"]["us"]
    return row


# Rates of an H200 that the targets name.
_BANDWIDTH_GBPS = 4300.0


def targets(rows: Sequence[dict], attention: Sequence[dict] = ()) -> list[dict[str, Any]]:
    """The project's targets, of the rows of products and of attention.

    Returns:
      {'target', 'wanted', 'found' (of the worst case, None without any), 'case', 'missing' (cases
      that belong to the target and have no figure, because something failed)} of each.
    """

    def worst(
        target: str, wanted: float, key: str, belongs: Callable[[dict], bool], rows=rows
    ) -> dict:
        mine = [row for row in rows if belongs(row)]
        measured = [row for row in mine if key in row]
        least = min(measured, key=lambda row: row[key], default=None)
        found, case = (None, "") if least is None else (float(least[key]), least["case"])
        missing = [row["case"] for row in mine if key not in row]
        return {
            "target": target, "wanted": wanted, "found": found, "case": case, "missing": missing
        }  # fmt: skip

    def square(row: dict, kind: str) -> bool:
        return row["name"].startswith("square") and row["kind"] == kind

    def dense(row: dict, kind: str) -> bool:
        return row["kind"] == kind and not row["experts"]

    def decode(row: dict) -> bool:
        shape = row["batch"], row["length"]
        return row["use"] == "decode" and attention_times.decides(*shape) and "skipped" not in row

    found = [
        worst("FP8 at 4096^3 and 8192^3 over bf16", 1.4, "over_bf16", lambda r: square(r, "fp8")),
        worst("FP8 at 4096^3 and 8192^3, TFLOPS", 1100, "tflops", lambda r: square(r, "fp8")),
        worst(
            "FP8 over bf16 at 64 rows and more", 1.0, "over_bf16",
            lambda r: dense(r, "fp8") and r["rows"] >= 64,
        ),
        worst(
            "FP8 at up to 64 rows, GB/s of weights", 0.8 * _BANDWIDTH_GBPS, "weight_gbps",
            lambda r: dense(r, "fp8") and r["rows"] <= 64,
        ),
        worst(
            "128 experts, top 8, 8k tokens, over dense FP8", 0.8, "over_dense",
            lambda r: r["name"].startswith("128 experts"),
        ),
        worst("bf16 over XLA's bf16", 0.75, "over_bf16", lambda r: dense(r, "bf16")),
        worst(
            "decode of 32 and more, 8k keys, over a copy", 0.75, "of_copy", decode, attention
        ),
        worst(
            "the same, FP8 KV over bf16 KV", 1.8, "over_bf16",
            lambda r: decode(r) and r["kind"] == "fp8", attention,
        ),
    ]  # fmt: skip
    return found


def verdict(target: dict) -> str:
    """'met', 'missed by 12% at CASE' or 'not measured', and which cases have failed."""
    if target["found"] is None:
        text = "not measured"
    elif target["found"] >= target["wanted"]:
        text = "met"
    else:
        text = f"missed by {1 - target['found'] / target['wanted']:.0%} at {target['case']}"
    if target["missing"]:
        text += f"; failed at {', '.join(target['missing'])}"
    return text


_WIDTH = 72


def _line(row: dict) -> str:
    ours = row["times"]["ours"]
    text = row["case"] if len(row["case"]) <= _WIDTH else row["case"][: _WIDTH - 3] + "..."
    if "us" not in ours:
        return f"{text:<{_WIDTH}} {ours['error']}"

    def ratio(version: str) -> str:
        return f"{row[key]:.2f}" if (key := f"over_{version}") in row else "-"

    cells = [
        f"{ours['us']:.1f}", f"{ours['spread']:.1%}", f"{row['tflops']:.0f}", f"{row['gbps']:.0f}",
        f"{row['of_bf16']:.0%}", f"{row['of_copy']:.0%}", ratio("bf16"), ratio("fp8"),
        ratio("dense"), f"{ours['programs']} x {ours['calls']}",
    ]  # fmt: skip
    return f"{text:<{_WIDTH}}" + "".join(f"{cell:>9}" for cell in cells)


_HEAD = (
    "us", "spread", "TFLOPS", "GB/s", "of bf16", "of copy", "/ bf16", "/ fp8", "/ dense", "launches"
)  # fmt: skip
_LEGEND = """\
us: of a call of ours, launch gaps included; spread: of two medians. of bf16, of copy: share of the
two ceilings of this run. / bf16, / fp8: time of XLA's product of the same shape (of experts: of a
dense one of as many rows) over ours, above 1 we are faster; / dense: our dense FP8 kernel's over
the grouped one's. launches: programs in flight x calls in each. Operands are K-major and come from
beyond the L2."""


def format_table(result: dict) -> str:
    """The result of `bench` as text, without the checks."""
    env = result["environment"]
    lines = [f"{env['device']}, {env['date']}, " + ", ".join(
        f"{name} {version}" for name, version in env["versions"].items() if version
    )]  # fmt: skip
    if result["ceilings"] is None:
        lines.append(
            f"no GPU: the kernels are not checked and the times of {len(result['left_out'])} "
            "kernel calls are not measured; what was checked is the reference in jnp"
        )
    else:
        ceilings = result["ceilings"]
        lines.append(
            f"ceilings: copy {ceilings['copy_gbps']:.0f} GB/s, bf16 {_cube()} "
            f"{ceilings['bf16_tflops']:.0f} TFLOPS"
        )
        lines.append(f"{'product':<{_WIDTH}}" + "".join(f"{h:>9}" for h in _HEAD))
        lines += [_line(row) for row in result["rows"]]
        lines += [_LEGEND, *_torch_lines(result["torch"])]
        lines += attention_times.format_table(result["attention"])
        if result["left_out"]:
            lines.append(f"left out, the time was up: {'; '.join(result['left_out'])}")
    lines.append("targets (the worst case counts):")
    for target in result["targets"]:
        found = "-" if target["found"] is None else f"{target['found']:.4g}"
        lines.append(
            f"  {target['target']:<46} wanted {target['wanted']:>6g}, found {found:>6}: "
            + verdict(target)
        )
    return "\n".join(lines)


def _cube() -> str:
    return f"{kernel_times.MATRIX}^3"


def _torch_lines(found: dict | None) -> list[str]:
    if not found or "error" in found:
        why = found["error"] if found else "not run"
        return [f"PyTorch's blockwise scaled_mm: not measured ({why})"]
    lines = []
    for row in found["rows"]:
        rows, depth, columns = row["shape"]
        name = f"PyTorch {found['torch']} blockwise scaled_mm {rows} x {depth} x {columns}"
        if "error" in row:
            lines.append(f"{name}: refused ({row['error']})")
        else:
            rate = 2.0 * rows * depth * columns / row["us"] / 1e6
            lines.append(f"{name}: {row['us']:.1f} us, {rate:.0f} TFLOPS ({row['form']})")
    return lines


def write(result: dict, directory: pathlib.Path) -> pathlib.Path:
    """Writes kernels.json, whole or not at all; returns its path.

    Raises:
      OSError: the directory cannot be written.
    """
    path = directory / "kernels.json"
    replace(path, json.dumps(result, indent=1, default=np.generic.item) + "\n")
    return path


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file beside its place and moves it there, so that no half of one is ever read."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)
