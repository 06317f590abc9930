"""`fp8rl bench kernels`: speed of the GPU kernels compared with XLA's products, and the targets.

Two ceilings are measured in the same run: a copy, for decode attention and products of few rows,
which are bound by the bytes of cache and weights; and a bf16 product of 8192^3, for products of
many rows. The project's targets come last: met, missed and by how much, or not measured. Whether
the kernels are right is for the tests: tests/gpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import operator
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.version import commit, installed
from fp8rl_jax.bench import kernel_shapes as shapes
from fp8rl_jax.bench.kernel_shapes import Attention, Product
from fp8rl_jax.kernels import backend, triton_installed

_VERSIONS = ("jax", "jaxlib", "jax-triton", "triton", "torch", "numpy", "jax-cuda13-plugin")
_COPY_GBPS = 4300.0  # GB/s of a copy on an H200, to which a target refers


def require_gpu(command: str) -> None:
    """Checks that the Triton kernels can run here.

    Raises:
      UserError: JAX finds no GPU, or jax-triton 0.4 or Triton is missing.
    """
    if backend() != "gpu":
        raise UserError(
            f"{command}: JAX finds no GPU here but {backend()!r}: run it on a machine "
            "with an NVIDIA H100 or H200, and unset JAX_PLATFORMS"
        )
    if not triton_installed():
        raise UserError(
            f"{command}: this machine has a GPU, and its kernels need Triton and jax-triton 0.4 "
            "or later, of which one is not installed: pip install 'fp8rl_jax[cuda]' on Python 3.12"
        )


def environment() -> dict[str, Any]:
    """Returns device, driver, versions (None: not installed), date and commit."""
    device = jax.devices()[0]
    driver = None
    if device.platform == "gpu":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            driver = done.stdout.split("\n")[0].strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device.device_kind,
        "platform": device.platform,
        "driver": driver,
        "python": sys.version.split()[0],
        "versions": {name: installed(name) for name in _VERSIONS},
    }


def bench(
    models: Sequence[str], rows: Sequence[int] | None, quick: bool, note: Callable[[str], None]
) -> dict[str, Any]:
    """Times the kernels on a GPU.

    Args:
      models: names of presets.
      rows: numbers of rows of the products; None: those of `kernel_shapes.cases`.
      quick: run only the largest matrix of each model and the shapes of attention's targets.
      note: called with each row of the table.

    Returns:
      The content of `kernels.json`: environment; quick; ceilings; rows (one per case, attention
      first); ok: whether all kernels ran; targets.

    Raises:
      UserError: there is no such model.
    """
    cases: list[Product | Attention] = [
        *shapes.attention_cases(quick),
        *shapes.cases(models, rows, quick),
    ]
    from fp8rl_jax.bench import kernel_times  # imports Triton

    source = kernel_times.Source()
    ceilings = kernel_times.ceilings(source)
    timed: list[dict[str, Any]] = []
    for case in cases:
        timed.append(row(case, kernel_times.time_case(case, source), ceilings))
        note(line(timed[-1]))
    _compare_caches(timed)
    return {
        "environment": environment(),
        "quick": quick,
        "ceilings": ceilings,
        "rows": timed,
        "ok": not any("error" in r["times"]["ours"] for r in timed),
        "targets": targets(timed),
    }


def row(
    case: Product | Attention, times: dict[str, Any], ceilings: dict[str, float]
) -> dict[str, Any]:
    """Returns a row: case, times and derived figures; 'over_X' is X's time divided by ours."""
    calls, programs = shapes.calls(case)
    figures = {
        "case": str(case),
        **dataclasses.asdict(case),
        "times": times,
        "calls": calls,
        "programs": programs,
    }
    if "error" in times["ours"]:
        return figures
    seconds = times["ours"]["us"] / 1e6
    tflops = case.flops / seconds / 1e12
    gbps = case.bytes / seconds / 1e9
    figures |= {
        "tflops": tflops,
        "gbps": gbps,
        # The larger share names what bounds the call; FP8's matrix ceiling is above the bf16 one.
        "of_copy": gbps / ceilings["copy_gbps"],
        "of_bf16": tflops / ceilings["bf16_tflops"],
    }
    if isinstance(case, Product):
        figures["weight_gbps"] = case.weight_bytes / seconds / 1e9
    for version, time in times.items():
        if version != "ours" and "us" in time:
            figures[f"over_{version}"] = time["us"] / times["ours"]["us"]
    return figures


def _compare_caches(rows: list[dict[str, Any]]) -> None:
    """Adds 'over_bf16' to attention over a cache of 8 bits: the bf16 cache's time over its time."""
    times = {row["case"]: row["times"]["ours"].get("us") for row in rows}
    for row in rows:
        if "use" in row and row["kind"] in ("fp8", "int8"):
            ours = times[row["case"]]
            of_bf16 = times.get(row["case"].replace(row["kind"], "bf16"))
            if ours and of_bf16:
                row["over_bf16"] = of_bf16 / ours


def targets(rows: Sequence[dict]) -> list[dict[str, Any]]:
    """Judges the project's targets by the rows of `bench`.

    Returns:
      One entry per target: target; wanted; found, the figure of the worst case (None without a
      case); verdict: 'met', 'missed by 12% at CASE' or 'not measured', and which cases failed.
    """
    square = [r for r in rows if r["case"].startswith("square") and r["kind"] == "fp8"]
    experts = [r for r in rows if r["case"].startswith("128 experts")]
    fp8, bf16 = (
        [r for r in rows if r.get("experts") == 0 and r["kind"] == kind] for kind in ("fp8", "bf16")
    )
    decode = [
        r for r in rows if r.get("use") == "decode" and r["batch"] >= 32 and r["length"] == 8192
    ]
    many = [r for r in fp8 if r["rows"] >= 64]
    few = [r for r in fp8 if r["rows"] <= 64]
    eight_bits = [r for r in decode if r["kind"] != "bf16"]
    judged = []
    for target, wanted, key, mine in (
        ("FP8 at 4096^3 and 8192^3 over bf16", 1.4, "over_bf16", square),
        ("FP8 at 4096^3 and 8192^3, TFLOPS", 1100, "tflops", square),
        ("FP8 over bf16 at 64 rows and more", 1.0, "over_bf16", many),
        ("FP8 at up to 64 rows, GB/s of weights", 0.8 * _COPY_GBPS, "weight_gbps", few),
        ("128 experts, top 8, 8k tokens, over dense FP8", 0.8, "over_dense", experts),
        ("bf16 over XLA's bf16", 0.75, "over_bf16", bf16),
        ("decode of 32 and more, 8k keys, over a copy", 0.75, "of_copy", decode),
        ("the same, 8-bit KV over bf16 KV", 1.8, "over_bf16", eight_bits),
    ):
        worst = min((r for r in mine if key in r), key=operator.itemgetter(key), default=None)
        if worst is None:
            verdict = "not measured"
        elif worst[key] >= wanted:
            verdict = "met"
        else:
            verdict = f"missed by {1 - worst[key] / wanted:.0%} at {worst['case']}"
        if failed := [r["case"] for r in mine if key not in r]:
            verdict += f"; failed at {', '.join(failed)}"
        judged.append(
            {
                "target": target,
                "wanted": wanted,
                "found": None if worst is None else worst[key],
                "verdict": verdict,
            }
        )
    return judged


_WIDTH = 72
_HEAD = ("us", "spread", "TFLOPS", "GB/s", "of bf16", "of copy", "launches")
_LEGEND = """\
us: of a call of ours, launch gaps included; spread: of two medians. of bf16, of copy: share of the
two ceilings of this run. launches: programs in flight x calls in each. Then times of others over
ours, above 1 we are faster: bf16, fp8, XLA's product of the same shape (of experts: of a dense one
of as many rows), of attention bf16 keys and values; dense, our dense FP8 kernel; other, the form of
decode that is not taken. Operands are K-major and come from beyond the L2; TFLOPS of attention are
causal, half of the square."""


def line(found: dict[str, Any]) -> str:
    """Returns a row of the table."""
    name = found["case"]
    ours = found["times"]["ours"]
    text = f"{name if len(name) <= _WIDTH else name[: _WIDTH - 3] + '...':<{_WIDTH}}"
    if "error" in ours:
        return f"{text} {ours['error']}"
    cells = [
        f"{ours['us']:.1f}",
        f"{ours['spread']:.1%}",
        f"{found['tflops']:.0f}",
        f"{found['gbps']:.0f}",
        f"{found['of_bf16']:.0%}",
        f"{found['of_copy']:.0%}",
        f"{found['programs']} x {found['calls']}",
    ]
    over = [f"{key[5:]} {found[key]:.2f}" for key in found if key.startswith("over_")]
    over += [f"{v}: {t['error']}" for v, t in found["times"].items() if "error" in t]
    return text + "".join(f"{cell:>9}" for cell in cells) + "  " + ", ".join(over)


def format_table(result: dict) -> str:
    """Returns the result of `bench` as text."""
    env = result["environment"]
    ceilings = result["ceilings"]
    versions = [f"{name} {version}" for name, version in env["versions"].items() if version]
    lines = [
        f"{env['device']}, {env['date']}, {', '.join(versions)}",
        f"ceilings: copy {ceilings['copy_gbps']:.0f} GB/s, bf16 8192^3 "
        f"{ceilings['bf16_tflops']:.0f} TFLOPS",
        f"{'call':<{_WIDTH}}" + "".join(f"{h:>9}" for h in _HEAD) + "  others over ours",
        *map(line, result["rows"]),
        _LEGEND,
        "targets (the worst case counts):",
    ]
    for target in result["targets"]:
        found = "-" if target["found"] is None else f"{target['found']:.4g}"
        lines.append(
            f"  {target['target']:<46} wanted {target['wanted']:>6g}, found {found:>6}: "
            f"{target['verdict']}"
        )
    return "\n".join(lines)
