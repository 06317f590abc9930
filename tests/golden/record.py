"""Writes tests/golden/tiny_run.json anew: `python tests/golden/record.py`. See CONTRIBUTING.md."""

from __future__ import annotations

import json
import pathlib
import tempfile

from fp8rl_jax.config import load_config
from fp8rl_jax.metrics import read_jsonl
from fp8rl_jax.train import train


def main() -> None:
    here = pathlib.Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"--config.run.dir={directory}/run", f"--config.run.cache_dir={directory}/c"]
        train(load_config(str(here.parent / "tiny_config.py"), overrides))
        run = pathlib.Path(directory) / "run"
        golden = {
            "warmup_loss": [round(r["loss"], 5) for r in read_jsonl(run / "warmup.jsonl")],
            "rl_entropy": [round(r["entropy"], 5) for r in read_jsonl(run / "metrics.jsonl")],
        }
    (here / "tiny_run.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
