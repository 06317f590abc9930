"""Zero drift on CPUs that are not at hand, each in a process of its own; `launch/cpu_zoo.sh`.

    python tests/helpers/cpu_zoo.py                    all, and prints a table
    python tests/helpers/cpu_zoo.py AVX2 '64 threads'  some, by name
    python tests/helpers/cpu_zoo.py --here [--short]   this CPU as it is, as JSON

A row has the way of multiplying that the probe found, the least numbers and steps of rows and
columns, the seconds of CPU that it took, the bits that differ between sampler and train step in
float32 (the canary, of vocabularies of 259, 14, 49 and 97), and of a short run the largest drift,
as it is by default and with exact products. The last column says whether the record of the exact
run is that of the first row.

oneDNN's cap and the number of threads make this CPU multiply as another one, at full speed; QEMU's
user mode gives other instructions, a hundred times slower, so there the runs are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

_HERE = pathlib.Path(__file__).resolve()
_CAP = "ONEDNN_MAX_CPU_ISA"
_FLAGS = "XLA_FLAGS"
# Name -> (variables of the environment, the CPU that QEMU imitates or '').
CPUS: dict[str, tuple[dict[str, str], str]] = {
    "this one": ({}, ""),
    "AVX2": ({_CAP: "AVX2", _FLAGS: "--xla_cpu_max_isa=AVX2"}, ""),
    "SSE4.1": ({_CAP: "SSE41"}, ""),
    "AVX2, 1 thread": ({_CAP: "AVX2", "NPROC": "1"}, ""),
    "AVX2, 3 threads": ({_CAP: "AVX2", "NPROC": "3"}, ""),
    "AVX2, 16 threads": ({_CAP: "AVX2", "NPROC": "16"}, ""),
    "AVX2, 64 threads": ({_CAP: "AVX2", "NPROC": "64"}, ""),
    "1 thread": ({"NPROC": "1"}, ""),
    "2 threads": ({"NPROC": "2"}, ""),
    "3 threads": ({"NPROC": "3"}, ""),
    "16 threads": ({"NPROC": "16"}, ""),
    "64 threads": ({"NPROC": "64"}, ""),
    "one core, 8 threads": ({"NPROC": "8", "ZOO_CORES": "0"}, ""),
    # The cap says that there is no bf16 instruction: /proc/cpuinfo is that of the machine below.
    "QEMU Haswell": ({_CAP: "AVX2"}, "Haswell"),
    "QEMU EPYC-Milan": ({_CAP: "AVX2"}, "EPYC-Milan"),
    "QEMU Nehalem": ({}, "Nehalem"),
}
_COLUMNS = (
    "CPU",
    "way",
    "rows",
    "columns",
    "probe s",
    "kept s",
    "canary: bits that differ",
    "run: largest drift",
    "exact run: drift",
    "exact record",
)


def _probed() -> dict:
    from fp8rl_jax.kernels.reference import probe

    started = time.process_time()
    way = probe.cpu_way()
    cold = time.process_time() - started
    started = time.process_time()
    probe.cpu_way.__wrapped__()
    steps = (way.bf16_steps, way.float32_steps, way.small_steps)
    return {
        "way": way.name,
        "rows": "/".join(f"{s.few_rows}:{s.row_step}" for s in steps),
        "columns": "/".join(f"{s.few_columns}:{s.column_step}" for s in steps),
        "cold": cold,
        "kept": time.process_time() - started,
    }


def _canary(vocabularies: tuple[int, ...], **changes) -> int:
    """Numbers of sampler and train step that differ, in float32, as tests/test_zero_drift.py."""
    from drift_harness import Case, run

    cases = (Case("f32", vocabulary=v, tap_logits=True, **changes) for v in vocabularies)
    return sum(sum(run(case).differing()) for case in cases)


def _short_run(products: str) -> dict:
    """The largest drift of a run of tiny_config.py, and a digest of its record but for times."""
    from tiny_run import CONFIG, overrides, reproducible

    from fp8rl_jax import train
    from fp8rl_jax.config import load_config

    fields = {
        "algo.old_logprobs": "learner",
        "sft.steps": 0,
        "run.steps": 3,
        "precision.cpu_products": products,
    }
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        train.train(load_config(str(CONFIG), overrides(pathlib.Path(directory), **fields)))
        record = reproducible(pathlib.Path(directory))
    drifts = [row["train_rollout_logprob_abs_diff_max"] for row in record["metrics"]]
    text = json.dumps(record, sort_keys=True).encode()
    return {"drift": max(drifts), "record": hashlib.sha256(text).hexdigest()[:8]}


def here(short: bool) -> dict:
    """What this process finds; `short`: one vocabulary, few tokens, and no run."""
    found = _probed()
    if short:
        return found | {"canary": _canary((14,), prompts=(1, 3), new_tokens=6, layers=1)}
    found["canary"] = _canary((259, 14, 49, 97))
    return found | {name: _short_run(name) for name in ("auto", "exact")}


def try_one(name: str, short: bool = False) -> dict | str:
    """What a process on that CPU finds, or its last line where it ends with an error."""
    variables, emulated = CPUS[name]
    command = [sys.executable, str(_HERE), "--here"] + ["--short"] * (short or bool(emulated))
    if emulated:
        if not (qemu := shutil.which("qemu-x86_64")):
            return "not tried: install qemu-user"
        command = [qemu, "-cpu", emulated, *command]
    if "ZOO_CORES" in variables:
        command = ["taskset", "-c", variables["ZOO_CORES"], *command]
    with tempfile.TemporaryDirectory() as cache:  # cold
        surroundings = {**os.environ, **variables, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0:
        return json.loads(lines[-1])
    return next((line for line in lines if "AVX" in line), lines[-1] if lines else "no output")


def _cells(name: str, found: dict | str, first: dict) -> list[str]:
    if isinstance(found, str):
        return [name, found, *[""] * (len(_COLUMNS) - 2)]
    cells = [name, *(str(found[key]) for key in ("way", "rows", "columns"))]
    cells += [f"{found['cold']:.1f}", f"{found['kept']:.3f}", str(found["canary"])]
    if "auto" not in found:
        return [*cells, "", "", ""]
    same = "equal" if found["exact"]["record"] == first["exact"]["record"] else "ANOTHER"
    return [*cells, f"{found['auto']['drift']:g}", f"{found['exact']['drift']:g}", same]


def main() -> None:
    if "--here" in sys.argv:
        print(json.dumps(here("--short" in sys.argv)))
        return
    names = sys.argv[1:] or list(CPUS)
    first: dict = {}
    for cells in (_COLUMNS, ["---"] * len(_COLUMNS)):
        print("| " + " | ".join(cells) + " |")
    for name in names:
        found = try_one(name)
        if isinstance(found, dict):
            first = first or found
        print("| " + " | ".join(_cells(name, found, first)) + " |", flush=True)


if __name__ == "__main__":
    main()
