"""What loading a checkpoint takes beyond its result: `python docs/scripts/load_memory.py 2 bf16`.

Writes a synthetic checkpoint of Qwen3's type of so many gigabytes, in several files, to a temporary
directory, loads it in a process of its own, and compares that process's peak of resident memory
(VmHWM of /proc/self/status, so Linux only) with what it held before and with the result. The
second argument is the type of the files' linear layers, bf16 or fp8; the third, of the result,
float32 (the default), bfloat16 or fp8.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

_PEAK, _NOW = "VmHWM", "VmRSS"


def main() -> None:
    gigabytes, stored, *rest = sys.argv[1:]
    if gigabytes == "load":
        print(json.dumps(measure(stored, *rest)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model"
        made = [sys.executable, __file__, "load"]
        largest = write_synthetic(path, float(gigabytes), stored)
        done = subprocess.run([*made, str(path), *rest], check=True, stdout=subprocess.PIPE)
        files = sum(file.stat().st_size for file in path.iterdir())
    sizes = {"files": files, "largest_tensor": largest, **json.loads(done.stdout)}
    print(json.dumps({name: round(size / 1e6, 1) for name, size in sizes.items()}), "MB")


def write_synthetic(path: pathlib.Path, gigabytes: float, stored: str) -> int:
    """A checkpoint of random bits; returns the bytes of its largest tensor."""
    import numpy as np

    from fp8rl_jax.models.arrays import LINEAR
    from fp8rl_jax.models.config import ModelConfig
    from fp8rl_jax.models.hf.blockwise import SCALE_SUFFIX, quantization_config, scale_shape
    from fp8rl_jax.models.hf.config_json import config_json
    from fp8rl_jax.models.hf.safetensors_file import DTYPES, Output
    from fp8rl_jax.models.hf.tables import model_tensors
    from fp8rl_jax.models.hf.writer import _write_shards

    width = 512 if gigabytes < 1 else 2048
    layer_bytes = 16 * width**2 * (1 if stored == "fp8" else 2)
    config = ModelConfig(
        vocab_size=16 * width,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        num_hidden_layers=max(int(gigabytes * 1e9 / layer_bytes) - 3, 1),
    )
    rng = np.random.default_rng(0)

    def noise(shape, dtype):
        if dtype.itemsize == 1:
            return rng.integers(0, 0x60, shape, np.uint8).view(dtype)
        if dtype == np.float32:  # scales
            return rng.random(shape, np.float32) + np.float32(0.5)
        return rng.standard_normal(shape, np.float32).astype(dtype)

    outputs, fields = [], config_json(config, "bfloat16")
    tensors = model_tensors(config)
    for tensor in tensors:
        parts = {tensor.name: (tensor.shape, "BF16")}
        if stored == "fp8" and tensor.role == LINEAR:
            parts = {
                tensor.name: (tensor.shape, "F8_E4M3"),
                tensor.module + SCALE_SUFFIX: (scale_shape(tensor.shape), "F32"),
            }
            fields["quantization_config"] = quantization_config(tensors)
        for name, (shape, kind) in parts.items():
            dtype = DTYPES[kind]
            part = {name: (shape, dtype)}
            outputs.append(Output(part, lambda s=shape, d=dtype: (noise(s, d),)))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    _write_shards(path, outputs, int(gigabytes * 1e9 / 3))
    return max(output.nbytes for output in outputs)


def _memory(name: str) -> int:
    """Bytes that a line of /proc/self/status tells."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def measure(path: str, dtype: str = "float32") -> dict[str, int]:
    """Loads a checkpoint; bytes of the result, and of the peak beyond it and what was there."""
    import jax

    from fp8rl_jax.models import hf

    jax.block_until_ready(jax.jit(lambda x: x + 1)(0))  # the compiler is loaded
    before = _memory(_NOW)
    _, params = hf.load(path, dtype=dtype)
    jax.block_until_ready(params)
    result = sum(x.nbytes for x in jax.tree.leaves(params))
    return {"result": result, "peak_beyond_result": _memory(_PEAK) - before - result}


if __name__ == "__main__":
    main()
