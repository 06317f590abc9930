"""Counts, without a GPU, what decides the speed of a decode and of a train step on a Hopper GPU.

    JAX_PLATFORMS=cpu python docs/scripts/gpu_counts.py qwen3_8b

Compiles programs of a model for an H200 with few layers, as aot_h200.py does, and prints: machine
instructions of attention's inner loop; what a GPU starts in each decode layer; loops at which the
host waits in continuous batching; sorts. The last line is JSON:

    decode_fp8_instructions   of attention's loop for 64 E4M3 keys, in units of four warps: a warp's
                              instructions x warps / 4, what each of the four schedulers of a
                              multiprocessor issues
    decode_launches_per_layer, with_deterministic_ops   the latter with
                              --xla_gpu_deterministic_ops, which launch/environment.sh sets
    decode_foreign_kernels_per_layer   of those, XLA's
    decode_host_launches_per_layer     what the host starts: CUDA graphs, and kernels outside them
    continuous_unknown_loops  loops of unknown length, and conditionals
    sorts                     in decode with that flag, in continuous decode and in the train step
    strict_attention_in_backward   of a layer's backward pass with remat
    wgmma_kernels_without_fence        products, head and fast attention in which a product of the
                              tensor cores may read a copy that has not arrived; all are compiled
    predicted_decode_default_ms   of an H200 by today's kernels, 64 sequences by recipe and keys: as
                              the plan predicts it, but FP8 products from instructions and bytes
                              (tests/helpers/h200_times.py), which no GPU has run yet
    predicted_decode_ms       the same of FP8 with `precision.kernels=mosaic`
    predicted_layer_ms        of a layer's train step of 4,096 tokens, as the plan predicts it
    predicted_of_measured     {figure: [predicted, measured]} of Qwen3-8B with the kernels of the
                              day on which an H200 was measured
    kernels                   each of a decode layer by name
    stack                     versions of Python, jax, jax-triton and Triton
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import sys
import tempfile
from importlib.metadata import version

_DUMP = tempfile.TemporaryDirectory()
_FLAGS = f"--xla_dump_to={_DUMP.name} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_step"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"  # before XLA reads it
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FOLDERS = ("docs/scripts", "tests/kernels/gpu", "tests/helpers")
sys.path[:0] = [str(_ROOT / folder) for folder in _FOLDERS]

import aot_h200  # noqa: E402
import h200_times  # noqa: E402
from kernel_variants import AttentionVariant, fast_variants, head_variants, variants  # noqa: E402

from fp8rl_jax.bench.kernel_times import DTYPES  # noqa: E402
from fp8rl_jax.kernels.gpu import attention_operands  # noqa: E402
from fp8rl_jax.plan import h200  # noqa: E402

LAYERS = 6  # as no other loop of these programs takes so many turns
_FLAG = {"xla_gpu_deterministic_ops": True}


def kernel_of(launch: tuple[str, str]) -> str:
    """Ours by the kernel's name and the layer's part, XLA's by the instruction's."""
    name, operation = launch
    ours = re.search(r"(\w+)/(?:triton_kernel_call|mpmd_map|\w*pallas\w*)$", operation)
    if not ours:
        return f"XLA {re.sub(r'[.0-9]+$', '', name)}"
    part = operation.split("DecoderLayer/")[-1].rpartition(ours.group(0))[0]
    return f"{ours.group(1)} {part.rstrip('/')}".rstrip()


def instructions() -> dict[str, float]:
    """Of the loop of FP8 attention in decoding: a warp's, warps, and in units of four warps."""
    variant = AttentionVariant("decode", "fp8", 128, paged=True)
    warps, _ = attention_operands.warps_and_stages(128, DTYPES["fp8"])
    machine = variant.compile()
    return {
        "of_a_warp": machine.loop,
        "warps": warps,
        "of_four_warps": machine.loop * warps / 4,
        "registers": machine.registers,
    }


def without_fence() -> int:
    """Counts the kernels that have a product by wgmma without a fence before it."""
    compiled = (v.compile() for v in [*variants(), *head_variants(), *fast_variants()])
    return sum(machine.unfenced > 0 for machine in compiled)


def host_launches() -> int:
    """Counts what the host starts in the layers' loop of the program that was compiled last."""
    files = pathlib.Path(_DUMP.name).glob("*.thunk_sequence_after_thunk_passes.txt")
    text = max(files, key=os.path.getmtime).read_text()
    body = re.search(r"^  body:\n((?: {4}.*\n)+)", text, re.M)
    assert body, "the program has no loop"
    return len(re.findall(r"^ {4}\d+: ", body.group(1), re.M))


def main() -> None:
    name = sys.argv[1]
    loop = instructions()  # before jax-triton leaves Triton's compiler without a cache
    unfenced = without_fence()
    mesh = h200.h200_mesh({})
    programs = aot_h200.Programs(name, mesh, layers=LAYERS)
    decode = programs.decode()
    text = decode.compile().as_text()
    by_host = host_launches()
    flagged = decode.compile(compiler_options=_FLAG).as_text()
    continuous = programs.continuous().compile().as_text()
    train = programs.train(aot_h200.SEQUENCES["train"])
    trained = train.compile(compiler_options=_FLAG).as_text()
    kernels = [kernel_of(launch) for launch in h200.launches(text, LAYERS)]
    learner = [kernel_of(launch) for launch in h200.launches(trained, LAYERS)]
    strict = sum(kernel.startswith("attention_kernel") for kernel in learner)
    found = {
        "model": name,
        "decode_fp8_instructions": loop["of_four_warps"],
        "attention_loop": loop,
        "decode_launches_per_layer": len(kernels),
        "with_deterministic_ops": len(h200.launches(flagged, LAYERS)),
        "decode_foreign_kernels_per_layer": sum(kernel.startswith("XLA") for kernel in kernels),
        "decode_host_launches_per_layer": by_host,
        "continuous_unknown_loops": h200.unknown_loops(continuous),
        "sorts": sum(map(h200.sorts, (flagged, continuous, trained))),
        "strict_attention_in_backward": strict - 1,
        "wgmma_kernels_without_fence": unfenced,
        "predicted_decode_default_ms": {
            f"{recipe}_{keys}": round(h200_times.decode_ms(name, recipe, keys, "triton"), 2)
            for recipe, keys in h200_times.DECODE
        },
        "predicted_decode_ms": {
            f"fp8_{keys}": round(h200_times.decode_ms(name, "fp8", keys, "mosaic"), 2)
            for recipe, keys in h200_times.DECODE
            if recipe == "fp8"
        },
        "predicted_layer_ms": {
            recipe: round(h200_times.layer_ms(name, recipe), 2) for recipe in h200_times.LAYER
        },
        "predicted_of_measured": h200_times.predicted_of_measured(),
        "kernels": kernels,
        "stack": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("jax", "jax-triton", "triton")},
        },
    }
    print(f"Compiled for an H200: {name}, {found['stack']}")
    for key, value in found.items():
        if key not in ("model", "kernels", "stack"):
            print(f"{key}: {value}")
    print("kernels of a decode layer:", *kernels, sep="\n  ")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
