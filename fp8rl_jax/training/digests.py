"""digests.jsonl: a line for each RL step by which two runs are compared, and bound to those before.

A run writes a line at the start of each phase, after each RL step, and where what it computes with
has changed since it was last started::

    made_with   what decides its bits, or has changed: configuration, data, code, versions, machine
    state       of all arrays that a checkpoint holds
    prompts     of the prompts' tokens
    tokens      of the drawn tokens and their log-probabilities
    rewards     of the step's line in rewards.jsonl
    record      of the step's line in metrics.jsonl, without what depends on speed and memory
    chain       SHA-256 of the line and of the chain before it

A digest is of bits, so NaN equals NaN and 0 differs from -0. No line has a time, a path or a host's
name. Rollouts on their way have no digest: they follow from the state, and are in `tokens` of the
step that learns from them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from fp8rl_jax.base.json_file import strict_json
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.report.metrics import reproducible
from fp8rl_jax.training.environment import environment
from fp8rl_jax.training.run_directory import as_saved, lasting
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.sample_step import Samples

Line = dict[str, Any]
PARTS = ("prompts", "tokens", "rewards", "record", "state")  # in the order in which they arise
_LENGTH = 16  # hexadecimal digits of a digest: 64 bits


def state_digest(sums: Mapping[str, int]) -> str:
    """Returns the digest of a state whose arrays have these checksums by name
    (`checkpoint.named_checksums`; a checkpoint's metadata has them)."""
    return _digest(dict(sums))


def record_digest(record: Mapping[str, Any]) -> str:
    """Returns the digest of a line of metrics.jsonl, as `reproducible` leaves it."""
    return _digest(reproducible(record))


def rewards_digest(line: Mapping[str, Any]) -> str:
    """Returns the digest of a line of rewards.jsonl."""
    return _digest(dict(line))


def samples_digests(samples: Samples) -> dict[str, str]:
    """Returns the digests of the prompts, and of the tokens with their log-probabilities."""
    mask = samples.rollout.mask
    drawn = (
        mask,
        np.where(mask, samples.rollout.tokens, 0),
        np.where(mask, samples.rollout.logprobs, 0),
    )
    return {
        "prompts": _of_arrays(samples.prompts.tokens, samples.prompts.lengths),
        "tokens": _of_arrays(*drawn),
    }


def rewards_line(step: int, samples: Samples) -> Line:
    """Returns the line of rewards.jsonl of a step's samples: {'step': step, 'rewards': (P, G)}, of
    several rewards 'by_name', of conversations 'turns' (B, K); null for a response without one."""
    line: Line = {"step": step, "rewards": samples.rewards.tolist()}
    if len(samples.by_name) > 1:
        line["by_name"] = {name: values.tolist() for name, values in samples.by_name.items()}
    if samples.turns is not None:
        line["turns"] = samples.turns.tolist()
    return line


def made_with(runtime: Runtime) -> dict[str, Any]:
    """Returns what decides a run's bits: {name: value}, equal for equal runs on equal machines."""
    now = environment(runtime.config)
    device = now["devices"]
    saved = as_saved(runtime.config)
    fields = lasting(saved) | {f"mesh.{name}": size for name, size in saved["mesh"].items()}
    found = {f"config.{name}": _without_path(value) for name, value in fields.items()}
    found |= {f"versions.{name}": value for name, value in now["versions"].items()}
    found |= {f"machine.{name}": device[name] for name in ("platform", "kind", "machine")}
    found["machine.devices"] = jax.device_count()
    if device["platform"] == "cpu":
        found["machine.products"] = cpu_way().name
    for part in ("tokenizer", "functions"):
        digests = now[part].items()
        found |= {f"{part}.{os.path.basename(path)}": digest for path, digest in digests}
    if runtime.data_digest:
        found["data"] = runtime.data_digest[:_LENGTH]
    return found


class Chain:
    """The chain of a run's lines.

    Args:
      lines: lines that the run has written.
    """

    def __init__(self, lines: Iterable[Line] = ()):
        self._last = ""
        self._made_with: dict[str, Any] = {}
        for line in lines:
            self._last = line.get("chain", "")
            self._made_with |= line.get("made_with", {})

    def linked(self, line: Line) -> Line:
        """Returns the next line with its chain."""
        self._last = link(self._last, line)
        return line | {"chain": self._last}

    def changed(self, now: dict[str, Any]) -> dict[str, Any]:
        """Returns what of `made_with` the lines do not have: all of it, if there is none."""
        return {name: value for name, value in now.items() if self._made_with.get(name) != value}


def link(previous: str, line: Line) -> str:
    """Returns the chain of a line behind one with the chain `previous`, which is '' at first."""
    content = {name: value for name, value in line.items() if name != "chain"}
    return hashlib.sha256(f"{previous}\n{_canonical(content)}".encode()).hexdigest()


def _canonical(value: Any) -> str:
    """Returns a value as its line of JSON has it, with sorted keys."""
    return json.dumps(json.loads(strict_json(value)), sort_keys=True)


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:_LENGTH]


def _of_arrays(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:_LENGTH]


def _without_path(value: Any) -> Any:
    """Returns a field's value; of a path its last part."""
    return value.rpartition("/")[2] if isinstance(value, str) else value
