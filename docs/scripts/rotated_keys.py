"""Measures what an orthogonal rotation of queries and keys before storing would bring.

    python docs/scripts/rotated_keys.py RUN_DIR                       # newest weights
    python docs/scripts/rotated_keys.py configs/smollm2_135m.py 128   # with 128 questions

A Hadamard rotation of a head's features leaves scores as they are and spreads outliers over all
features. Printed is the RMS of log P of each held-out question's demonstration, less that in bf16:
with keys quantised as they are, and after the rotation. The line "bf16" is the rotation alone,
which rounds queries and keys once more. The rotation is not a part of the library (docs/tried.md),
so this script puts it in front of the quantiser.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import hadamard

from fp8rl_jax.config import load_config, saved_config
from fp8rl_jax.models import attention
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.quant.qarray import E4M3, INT8
from studies.scoring import answer_logprobs
from studies.subjects import of_config, of_directory

_FP8, _BF16 = get_recipe("fp8_blockwise"), get_recipe("bf16")
_PARTS = {
    "bf16": _BF16,
    "K in E4M3": dataclasses.replace(_BF16, kv="dynamic", k_dtype=E4M3, v_dtype=None),
    "K in INT8": dataclasses.replace(_BF16, kv="dynamic", k_dtype=INT8, v_dtype=None),
    "FP8 linear layers": get_recipe("fp8_linear"),
    "and K in E4M3": dataclasses.replace(_FP8, k_dtype=E4M3, v_dtype=None),
    "and K in INT8": dataclasses.replace(_FP8, k_dtype=INT8, v_dtype=None),
}


def _rotated(x: jax.Array) -> jax.Array:
    """Rotates the features of heads (..., Dh), in float32."""
    size = x.shape[-1]
    matrix = jnp.asarray(hadamard(size) / np.sqrt(size), jnp.float32)
    return jnp.dot(x.astype(jnp.float32), matrix, precision="highest").astype(x.dtype)


def _rotate_before_storing() -> None:
    store, query = attention._store, attention._query
    attention._store = lambda k, *others: store(_rotated(k), *others)
    attention._query = lambda q, *others: query(_rotated(q), *others)


def _subject(arguments: list[str]):
    path = pathlib.Path(arguments[0])
    if path.is_dir():
        config = saved_config(json.loads((path / "config.json").read_text()), str(path))
        config.run.dir = str(path)
        return of_directory(config, print)
    changes = [f"--config.eval.questions={arguments[1]}"] if len(arguments) > 1 else []
    return of_config(load_config(str(path), changes), pathlib.Path("runs"), print)


def main() -> None:
    subject = _subject(sys.argv[1:])

    def measure() -> dict[str, np.ndarray]:
        found = answer_logprobs(subject.runtime, _PARTS, subject.params)
        return {name: np.asarray(logps, np.float64) for name, logps in found.items()}

    plain = measure()
    _rotate_before_storing()
    jax.clear_caches()
    rotated = measure()
    print("| quantised | RMS of log P less bf16's | rotated | variance, rotated over plain |")
    print("|---|---|---|---|")
    for name in _PARTS:
        one, other = (np.sqrt(np.mean((x[name] - plain["bf16"]) ** 2)) for x in (plain, rotated))
        ratio = f"{(other / one) ** 2:.2f}" if one else "-"
        print(f"| {name} | {one:.4f} | {other:.4f} | {ratio} |")


if __name__ == "__main__":
    main()
