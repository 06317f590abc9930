"""Writes tests/golden/tiny_run.json anew: `python tests/golden/record.py`. See CONTRIBUTING.md."""

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


def main() -> None:
    helpers = HERE.parent / "helpers"
    sys.path.insert(0, str(helpers))  # the configuration's reward is there
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"--config.run.dir={directory}/run", f"--config.run.cache_dir={directory}/c"]
        train(load_config(str(helpers / "tiny_config.py"), overrides))
        golden = {
            file: {name: [float(f"{r[name]:.5g}") for r in records] for name in names}
            for file, names in RECORDED.items()
            for records in [read_jsonl(pathlib.Path(directory) / "run" / f"{file}.jsonl")]
        }
    (HERE / "tiny_run.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
