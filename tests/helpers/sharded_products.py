"""Run by test_sharding.py in a process of its own: products of rows on eight devices, as JSON."""

from __future__ import annotations

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8rl_jax.kernels.reference import probe
from fp8rl_jax.kernels.reference.matmul import WAYS, Way, block_matmul
from fp8rl_jax.plan import h200


def _operands(rows: int, dtype) -> list[jax.Array]:
    rng = np.random.default_rng(rows)
    shapes = [(rows, 256), (256, 384)]
    operands = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    if dtype == jnp.float8_e4m3fn:
        operands += [
            jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in ((rows, 2), (2, 3))
        ]
    return operands


def _on(mesh: Mesh, each: int, axes: tuple[str, ...], dtype, way: Way) -> dict:
    """A product of so many rows on each device of some axes, beside that of one device."""
    by_row, whole = (NamedSharding(mesh, PartitionSpec(part)) for part in (axes, None))
    operands = _operands(each * math.prod(mesh.shape[axis] for axis in axes), dtype)
    multiply = functools.partial(block_matmul, way=way)
    want = jax.jit(multiply, compiler_options=dict(way.options))(*operands)
    placed = jax.device_put(operands, [by_row, whole, by_row, whole][: len(operands)])
    program = jax.jit(
        lambda *operands: multiply(*operands, devices=mesh.size), compiler_options=dict(way.options)
    )
    program = program.lower(*placed).compile()
    found = program(*placed)
    return {
        "differ": int((np.asarray(found) != np.asarray(want)).sum()),
        "divided": all(part.data.shape[0] == each for part in found.addressable_shards),
        "collectives": h200.collectives(program.as_text()),
    }


def _wide_by_device(mesh: Mesh, way: Way) -> dict:
    """Float32 of more columns than are unrolled, each device with its own rows by shard_map."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((16, 96), (96, 6001)))
    multiply, options = functools.partial(block_matmul, way=way), dict(way.options)
    want = jax.jit(multiply, compiler_options=options)(x, w)
    rows, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    by_device = jax.shard_map(multiply, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    program = jax.jit(by_device, compiler_options=options).lower(x, w).compile()
    return {
        "differ": int((np.asarray(program(x, w)) != np.asarray(want)).sum()),
        "divided": True,
        "collectives": h200.collectives(program.as_text()),
    }


def main() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    ways = [way for way in map(probe.tried, WAYS) if way]
    dtypes = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
    # Rows of each device, over all devices or, by half of them, twice.
    layouts = [(1, ("data", "fsdp")), (2, ("data", "fsdp")), (18, ("data", "fsdp")), (1, ("fsdp",))]
    results = {}
    for way, dtype, (each, axes) in itertools.product(ways, dtypes, layouts):
        results[f"{way.name}, {each} rows, {axes}, {dtype.__name__}"] = _on(
            mesh, each, axes, dtype, way
        )
    for way in ways:
        results[f"{way.name}, wide"] = _wide_by_device(mesh, way)
    print(json.dumps({"devices": mesh.size, "ways": len(ways), "results": results}))


if __name__ == "__main__":
    main()
