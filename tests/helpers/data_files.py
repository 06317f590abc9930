"""Files of the tests: the same rows in every form that is read."""

from __future__ import annotations

import gzip
import json
import pathlib

import pyarrow
import pyarrow.parquet

from fp8rl_jax.config import default_config

ROWS = [
    {"question": f"What is {i} + {i}?", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>\n#### {2 * i}"}
    for i in range(1, 41)
]


def env(task: object, **fields):
    """The section `env` of a configuration."""
    section = default_config().env
    section.update(task=str(task), **fields)
    return section


def verl(row: dict) -> dict:
    """A row as verl's preprocessing writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": row["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": "train", "index": 3},
    }


def trl(row: dict) -> dict:
    """A conversational row as TRL's GRPOTrainer takes it."""
    return {"prompt": [{"role": "user", "content": row["question"]}], "solution": row["answer"]}


def jsonl(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def parquet(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def arrow(directory: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    """A directory as `Dataset.save_to_disk` leaves it."""
    directory.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    name = "data-00000-of-00001.arrow"
    with pyarrow.ipc.new_stream(str(directory / name), table.schema) as stream:
        stream.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def arrow_dict(directory: pathlib.Path, parts: dict[str, list[dict]]) -> pathlib.Path:
    """A directory as `DatasetDict.save_to_disk` leaves it."""
    for split, rows in parts.items():
        arrow(directory / split, rows)
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))
    return directory
