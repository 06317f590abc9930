"""Run by test_k_loops.py in a process of its own: hashes of the matmul in several forms, as JSON.

Forms: the product with its loop over K unrolled, and as a `fori_loop`. The number of threads
follows the environment variable NPROC.
"""

from __future__ import annotations

import hashlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels.reference import matmul
from fp8rl_jax.kernels.reference.probe import cpu_way

ROWS = (8, 16, 33, 128, 512)
SHAPES = ((1024, 128), (2048, 256), (1024, 1408))


def unrolled(x, w):
    """The product, every block written out."""
    matmul._UNROLL_K = 1000
    return matmul.block_matmul(x, w, way=cpu_way())


def looped(x, w):
    """The product with a `fori_loop` over blocks."""
    matmul._UNROLL_K = 1
    return matmul.block_matmul(x, w, way=cpu_way())


def main() -> None:
    """Prints {form: hash over all shapes}, whether rows agree at every count, and the threads."""
    jax.block_until_ready(jnp.ones(3))
    found: dict[str, object] = {"threads": len(os.listdir("/proc/self/task"))}
    for form in (unrolled, looped):
        digest, independent = hashlib.sha256(), True
        for depth, columns in SHAPES:
            rng = np.random.default_rng(depth + columns)
            x = rng.standard_normal((max(ROWS), depth)).astype(np.float32)
            w = rng.standard_normal((depth, columns)).astype(np.float32)
            results = {n: np.asarray(exact_jit(form)(x[:n], w)) for n in ROWS}
            whole = results[max(ROWS)]
            independent &= all(r.tobytes() == whole[:n].tobytes() for n, r in results.items())
            digest.update(whole.tobytes())
        found[form.__name__] = [digest.hexdigest(), bool(independent)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
