"""Writes tests/golden/tiny_run.json and bits.json anew: `python tests/golden/record.py`. See
CONTRIBUTING.md."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

from fp8rl_jax.config import load_config
from fp8rl_jax.train import train
from fp8rl_jax.training.logs import read_jsonl

HERE = pathlib.Path(__file__).parent
# File of the run -> what is recorded of it.
RECORDED = {"sft": ("loss",), "metrics": ("entropy", "reward_mean", "grad_norm")}


def _run(root: pathlib.Path, **fields) -> pathlib.Path:
    from tiny_run import CONFIG, overrides

    train(load_config(str(CONFIG), overrides(root, **fields)))
    return root / "run"


def main() -> None:
    sys.path.insert(0, str(HERE.parent / "helpers"))  # the configuration's reward is there
    from tiny_run import BITS

    with tempfile.TemporaryDirectory() as directory:
        run = _run(pathlib.Path(directory) / "curve")
        golden = {
            file: {name: [float(f"{r[name]:.5g}") for r in records] for name in names}
            for file, names in RECORDED.items()
            for records in [read_jsonl(run / f"{file}.jsonl")]
        }
        run = _run(pathlib.Path(directory) / "bits", **BITS)
        bits = (run / "digests.jsonl").read_text().splitlines()[-1]
    (HERE / "tiny_run.json").write_text(json.dumps(golden, indent=1) + "\n")
    (HERE / "bits.json").write_text(bits + "\n")


if __name__ == "__main__":
    main()
