"""One short run on several numbers of devices, meshes and threads: which digests are those of one
device (docs/zero_drift.md).

    python docs/scripts/same_bits.py [--config FILE] [--steps 4] [--out DIR] [--only "NAME;..."]
        [--config.SECTION.FIELD=VALUE ...]

Devices are those that XLA makes of one CPU, with 8 threads where no other number is named. The run
`resumed` stops after half of its steps on one device, and goes on on four, over `mesh.fsdp`.
Seconds are those of the fastest step, without compiling.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from fp8rl_jax.training.digests import PARTS
from fp8rl_jax.training.logs import read_jsonl

# {name: (devices, fields, environment)}.
SETTINGS: dict[str, tuple[int, dict, dict]] = {
    "1 device": (1, {}, {}),
    "2 devices": (2, {"mesh.data": 2}, {}),
    "4 devices": (4, {"mesh.data": 4}, {}),
    "8 devices": (8, {"mesh.data": 8}, {}),
    "fsdp 2": (2, {"mesh.data": 1, "mesh.fsdp": 2}, {}),
    "fsdp 4": (4, {"mesh.data": 1, "mesh.fsdp": 4}, {}),
    "data 2, fsdp 2": (4, {"mesh.data": 2, "mesh.fsdp": 2}, {}),
    "data 2, fsdp 4": (8, {"mesh.data": 2, "mesh.fsdp": 4}, {}),
    "1 thread": (1, {}, {"PJRT_NPROC": "1"}),
    "8 threads": (1, {}, {"PJRT_NPROC": "8"}),
    "64 threads": (1, {}, {"PJRT_NPROC": "64"}),
    "like AVX2": (1, {}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "resumed": (4, {"mesh.data": 1, "mesh.fsdp": 4}, {}),
}


def train(
    out: pathlib.Path, config: str, devices: int, fields: dict, more: dict, words: list[str]
) -> None:
    """Trains in `out`, or raises CalledProcessError."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    given = {"run.dir": out, "run.cache_dir": out.parent / "cache" / out.name, **fields}
    command = [sys.executable, "-m", "fp8rl_jax", "train", "--auto-resume", "--config", config]
    command += [f"--config.{name}={value}" for name, value in given.items()] + words
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "PJRT_NPROC": "8"}
    env = {**os.environ, **own, **more}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)


def digests(out: pathlib.Path) -> dict[tuple[str, int], dict]:
    """{(phase, step): digests} of a run."""
    found = {(line["phase"], line["step"]): line for line in read_jsonl(out / "digests.jsonl")}
    return {at: {part: line.get(part) for part in PARTS} for at, line in found.items()}


def differing(one: dict, other: dict) -> list[str]:
    """The parts in which two runs differ at any step, with the first step."""
    found = []
    for part in PARTS:
        steps = [at for at in one if one[at][part] != other.get(at, {}).get(part)]
        if steps:
            found.append(f"{part} from {steps[0][0]} step {steps[0][1]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="tiny_arithmetic")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    values, words = parser.parse_known_args()
    root = values.out or pathlib.Path(tempfile.mkdtemp(prefix="same-bits-"))
    names = [name.strip() for name in values.only.split(";") if name] or [*SETTINGS]
    first = None
    print("| setting | digests that are not those of the first | seconds of a step |")
    print("|---|---|---|")
    for name in names:
        devices, fields, more = SETTINGS[name]
        out = root / name.replace(" ", "_").replace(",", "")
        if name == "resumed":
            half = {"run.steps": values.steps // 2}
            train(out, values.config, 1, half, {}, words)
        train(out, values.config, devices, {"run.steps": values.steps, **fields}, more, words)
        found = digests(out)
        first = first or found
        times = [r["time_step"] - r["time_compile"] for r in read_jsonl(out / "metrics.jsonl")]
        print(
            f"| {name} | {', '.join(differing(first, found)) or 'none'} | {min(times):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
