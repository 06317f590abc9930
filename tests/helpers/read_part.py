"""One of several processes that load a checkpoint, each its own part. Prints, as JSON in process 0,
the bytes that every process read and whether each leaf's shards are those of one process's load.

    python read_part.py CHECKPOINT FSDP EXPERT
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.models import hf, param_shardings
from fp8rl_jax.models.hf import reader, safetensors_file
from fp8rl_jax.sharding import make_mesh


def main(path: str, fsdp: int, expert: int) -> None:
    processes.join()
    assert processes.count() == jax.process_count()
    assert processes.number() == jax.process_index()
    read = []

    def counted(*arguments):
        rows = safetensors_file.read_rows(*arguments)
        read.append(rows.nbytes)
        return rows

    reader.read_rows = counted
    mesh = make_mesh({"data": 1, "fsdp": fsdp, "tensor": 1, "expert": expert})
    _, params = hf.load(path, shardings=lambda shapes: param_shardings(mesh, shapes))
    own = sum(read)
    _, whole = hf.load(path)
    same = all(
        np.array_equal(shard.data, np.asarray(expected)[shard.index])
        for leaf, expected in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True)
        for shard in leaf.addressable_shards
    )
    found = processes.exchange((own, same))
    if processes.first():
        print(json.dumps({"read": [n for n, _ in found], "same": all(ok for _, ok in found)}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
