"""What a train step of a large model needs of each H200, without one: compiled for 2 and for 4 of
its layers (dense first layers apart), and extrapolated, as further layers are the same loop.

    JAX_PLATFORMS=cpu python docs/scripts/learner_h200.py qwen3_235b_a22b fsdp=8 expert=8

Gradients and Adam, full rematerialisation, two sequences of 4,096 tokens a device in two
micro-batches; hosts of 8 devices. About two minutes a model. Needs the extra `gpu_proofs`.
"""

from __future__ import annotations

import math
import sys

from aot_h200 import GIB, SEQUENCES, Programs

from fp8rl_jax import deviceless
from fp8rl_jax.models.presets import preset

_USABLE = {"141 GB": 141e9 * 0.92, "80 GB": 80e9 * 0.92}


def main() -> None:
    name, *sizes = sys.argv[1:]
    axes = {axis: int(size) for axis, size in (text.split("=") for text in sizes)}
    count = math.prod(axes.values())
    mesh = deviceless.h200_mesh(axes, hosts=max(count // 8, 1))
    model = preset(name)
    SEQUENCES["train"] = 2 * count
    found = []
    for layers in (2, 4):
        program = Programs(name, mesh, model.first_k_dense_replace + layers).train(2)
        memory = program.compile().memory_analysis()
        found.append((memory.argument_size_in_bytes, memory.temp_size_in_bytes))
    left = model.num_hidden_layers - model.first_k_dense_replace - 4
    arguments, temporary = (b + left * (b - a) / 2 for a, b in zip(*found, strict=True))
    usable = ", ".join(f"{size / GIB:.1f} of {title}" for title, size in _USABLE.items())
    print(
        f"{name}, {count} devices ({', '.join(sizes)}), GiB of each: state and batch "
        f"{arguments / GIB:.1f}, temporary {temporary / GIB:.1f}, together "
        f"{(arguments + temporary) / GIB:.1f}; usable (92%): {usable}"
    )


if __name__ == "__main__":
    main()
