"""Run by test_zero_drift.py in a process of its own: one case, its figures as JSON.

The number of threads that XLA uses on a CPU follows the environment variable NPROC.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import jax
from drift_harness import Case, run


def main() -> None:
    """Prints hashes of both sides' log-probabilities and logits, and how many differ."""
    case = Case(
        sys.argv[1],
        hidden=256,
        heads=8,
        kv_heads=2,
        head_dim=64,
        prompts=(1, 13, 40),
        new_tokens=60,
    )
    jax.block_until_ready(jax.numpy.ones(3))
    result = run(case)
    sides = {
        "rollout": (result.rollout_logp, result.rollout_logits),
        "learner": (result.learner_logp, result.learner_logits),
    }
    hashes = {
        side: hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()
        for side, arrays in sides.items()
    }
    threads = len(os.listdir("/proc/self/task"))
    print(json.dumps({**hashes, "differing": result.differing(), "threads": threads}))


if __name__ == "__main__":
    main()
