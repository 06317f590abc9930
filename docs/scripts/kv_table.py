"""Prints the table of docs/recipes.md: formats of keys and values, for Qwen3-8B on an H100.

    JAX_PLATFORMS=cpu python docs/scripts/kv_table.py

Bytes of a token are counted from the shapes of a cache; instructions of attention's inner loop in
the machine code that Triton compiles here; the decode step is `fp8rl plan`'s prediction.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from importlib.metadata import version

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "tests" / "kernels" / "gpu"), str(_ROOT / "tests" / "helpers")]

from kernel_variants import AttentionVariant  # noqa: E402
from planned import mesh_of  # noqa: E402

from fp8rl_jax.bench.kernel_times import DTYPES  # noqa: E402
from fp8rl_jax.kernels.gpu import attention_operands  # noqa: E402
from fp8rl_jax.models import PAGE  # noqa: E402
from fp8rl_jax.models.presets import preset  # noqa: E402
from fp8rl_jax.plan.bytes import page_bytes  # noqa: E402
from fp8rl_jax.plan.gpus import GPUS  # noqa: E402
from fp8rl_jax.plan.times import decode_seconds  # noqa: E402
from fp8rl_jax.quant import get_recipe  # noqa: E402

SEQUENCES, KEYS = 64, 2304
FORMATS = [
    ("bf16", "bf16"),
    ("fp8", "fp8"),
    ("int8", "int8"),
    ("int8", "fp8"),
    ("bf16", "fp8"),
    ("fp8", "bf16"),
    ("int8", "bf16"),
]


def main() -> None:
    model, stored = preset("qwen3_8b"), {**DTYPES, "bf16": None}
    print(f"Triton {version('triton')}, Qwen3-8B, H100, {SEQUENCES} sequences of {KEYS} keys")
    columns = (
        "K | V | KiB a token | instructions | registers | decode step, ms | tokens/s, relative"
    )
    print(f"| {columns} |")
    print("|---|---|---|---|---|---|---|")
    first = None
    for keys, values in FORMATS:
        recipe = dataclasses.replace(
            get_recipe("fp8"), kernels="gpu", k_dtype=stored[keys], v_dtype=stored[values]
        )
        machine = AttentionVariant("decode", keys, values=values, paged=True).compile()
        both = [DTYPES[kind] for kind in (keys, values)]
        wider = max(both, key=lambda dtype: 1 if dtype in (DTYPES["fp8"], DTYPES["int8"]) else 2)
        warps, _ = attention_operands.warps_and_stages(128, wider)
        seconds = sum(
            decode_seconds(model, recipe, mesh_of(), SEQUENCES, KEYS, GPUS["h100"]).values()
        )
        first = first or seconds
        print(
            f"| {keys} | {values} | {page_bytes(model, recipe) / PAGE / 2**10:.1f} | "
            f"{machine.loop * warps / 4:.0f} | {machine.registers} | {1e3 * seconds:.2f} | "
            f"{first / seconds:.2f} |"
        )


if __name__ == "__main__":
    main()
