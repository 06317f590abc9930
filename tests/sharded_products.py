"""Run by test_sharding.py in a process of its own: products of rows on eight devices, as JSON."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fp8rl_jax import deviceless
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.kernels import block_matmul


def _operands(rows: int, dtype) -> list[jax.Array]:
    rng = np.random.default_rng(rows)
    shapes = [(rows, 256), (256, 384)]
    operands = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    if dtype == jnp.float8_e4m3fn:
        operands += [
            jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in ((rows, 2), (2, 3))
        ]
    return operands


def main() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    by_row = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    whole = NamedSharding(mesh, PartitionSpec())
    results = {}
    for dtype in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32):
        for each in (1, 2, 3, 9, 18):
            operands = _operands(8 * each, dtype)
            want = exact_jit(lambda *operands: block_matmul(*operands))(*operands)
            placed = jax.device_put(operands, [by_row, whole, by_row, whole][: len(operands)])
            with jax.set_mesh(mesh):
                program = exact_jit(lambda *operands: block_matmul(*operands)).lower(*placed)
                program = program.compile()
            found = program(*placed)
            results[f"{each} rows, {dtype.__name__}"] = {
                "differ": int((np.asarray(found) != np.asarray(want)).sum()),
                "divided": all(part.data.shape[0] == each for part in found.addressable_shards),
                "collectives": deviceless.collectives(program.as_text()),
            }
    print(json.dumps({"devices": mesh.size, "results": results}))


if __name__ == "__main__":
    main()
