"""provenance.json: the run, the step and the form of an exported directory, for `fp8rl verify`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.training.logs import read_jsonl

NAME = "provenance.json"


@dataclasses.dataclass(frozen=True)
class Form:
    """What of a run is exported, and how.

    Attributes:
      dtype: number format of the weights, as for `hf.convert`; of an adapter empty.
      max_shard_gb: largest size of a weight file in 10^9 bytes.
      average_last: number of checkpoints whose mean weights are exported; None for the run's
        `eval.average_last`.
      adapter: whether to export the run's adapter alone.
      checkpoint: number of the newest of these checkpoints; None for the run's newest.
    """

    dtype: str = ""
    max_shard_gb: float = 5.0
    average_last: int | None = None
    adapter: bool = False
    checkpoint: int | None = None


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The content of provenance.json.

    Attributes:
      chain: `chain_at` that step of the run; '' of a run of an older version.
      phase, step: training phase and step of the newest exported checkpoint.
      form: how it was exported, with the numbers that were taken for None.
      files: SHA-256 of each other file by its name.
    """

    chain: str
    phase: str
    step: int
    form: Form
    files: dict[str, str]

    def write(self, exported: pathlib.Path) -> None:
        """Writes the file, with the digests of the files that are there."""
        whole = dataclasses.replace(self, files=file_digests(exported))
        (exported / NAME).write_text(json.dumps(dataclasses.asdict(whole), indent=2) + "\n")


def read_provenance(exported: pathlib.Path) -> Provenance:
    """Returns the content of a directory's provenance.json.

    Raises:
      UserError: there is none, or it is damaged.
    """
    path = exported / NAME
    try:
        content = read_json(path)
        found = Provenance(**content | {"form": Form(**content["form"])})
        values = (found.step, found.files, *dataclasses.astuple(found.form))
        if [type(value) for value in values] != [int, dict, str, float, int, bool, int]:
            raise ValueError("a value has another type")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}, which `fp8rl convert` of a run writes, cannot be read ({error}): export the "
            "run again"
        ) from None


def chain_at(run: pathlib.Path, phase: str, step: int) -> str:
    """Returns the chain of the newest line of digests.jsonl up to a step; '' without one."""
    chain = ""
    for line in read_jsonl(run / "digests.jsonl"):
        if (line.get("phase") == "rl", line.get("step", 0)) <= (phase == "rl", step):
            chain = line.get("chain", "")
    return chain


def file_digests(directory: pathlib.Path) -> dict[str, str]:
    """Returns {name: SHA-256} of the files of a directory but provenance.json."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_file() and name != NAME:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
