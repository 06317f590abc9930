"""Adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

A pair of matrices of one linear layer is two tensors, of torch's (out, in)::

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight    (r, K), our A transposed
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight    (N, r), our B transposed

Experts are layers of their own, as in checkpoints. Only plain LoRA is read: one rank, no biases, no
DoRA, no further modules; what else a file asks for is refused by name.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flax import traverse_util

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.models.arrays import LORA, array_of
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.fields import Fields
from fp8rl_jax.models.hf.safetensors_file import DTYPES, Output, read_header, read_rows, write_file
from fp8rl_jax.models.hf.writer import check_target, make_directory
from fp8rl_jax.models.stacks import layer_stacks

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model.model.layers"
# Fields that may be absent or have these values; others change what an adapter computes.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": ([],),
    "target_parameters": ([],),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    # Others are of a base that they changed.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
Place = tuple[tuple[str, ...], tuple[int, ...]]  # path of a leaf of the adapters, index into it


def _places(config: ModelConfig, adapters: Any) -> Iterator[tuple[str, Place]]:
    """Yields (name of a tensor, its place) for the adapters of a model."""
    first = 0
    flat = traverse_util.flatten_dict(adapters)
    for stack, count in layer_stacks(config).items():
        for path in sorted(path for path in flat if path[0] == stack):
            module = array_of((*path[:-1], "kernel")).hf.removesuffix(".weight")
            if "{}" in module and config.moe_bias:
                raise UserError(
                    f"adapters of {'.'.join(path[1:-1])} have no form in PEFT's format: this model "
                    "type holds all experts in one tensor: export merged weights, or train with "
                    "lora.modules='[qkvo]_proj'"
                )
            matrix = {LORA[0]: "lora_A", LORA[1]: "lora_B"}[path[-1]]
            for layer in range(count):
                for expert in range(config.num_experts) if "{}" in module else [None]:
                    own = () if expert is None else (expert,)
                    name = f"{_PREFIX}.{first + layer}.{module.format(expert)}.{matrix}.weight"
                    yield name, (path, (layer, *own))
        first += count


def _modules(names: Iterable[str]) -> list[str]:
    """Returns the names of the linear layers that tensors belong to."""
    return sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in names})


def save_adapter(
    path: str | pathlib.Path, config: ModelConfig, adapters: Any, *, alpha: float, base: str = ""
) -> pathlib.Path:
    """Writes adapters (`Adapted.adapters`) in float32.

    Args:
      path: the directory to make; it must not exist.
      config: shapes of the model.
      adapters: {'layers': {module: {'lora_a': (L, K, r), 'lora_b': (L, r, N)}}}.
      alpha: `lora.alpha`, the factor of the product times the rank.
      base: name or directory of the model that the adapters belong to.

    Returns:
      The directory.

    Raises:
      UserError: the directory exists or cannot be made, or the format has no such adapters.
    """
    target = pathlib.Path(path)
    check_target(target)
    flat = traverse_util.flatten_dict(adapters)
    places = list(_places(config, adapters))
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": next(x.shape[-1] for p, x in flat.items() if p[-1] == LORA[0]),
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": _modules(name for name, _ in places),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }

    def output(name: str, leaf: tuple[str, ...], index: tuple[int, ...]) -> Output:
        dtype = np.dtype(np.float32)
        parts = {name: (flat[leaf].shape[-2:][::-1], dtype)}
        return Output(parts, lambda: (np.asarray(flat[leaf][index], dtype).T,))

    def fill(directory: pathlib.Path) -> None:
        (directory / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        write_file(directory / WEIGHTS, [output(name, *place) for name, place in places])

    return make_directory(target, fill)


def check_adapter(path: str, config: ModelConfig, adapters: Any, rank: int, alpha: float) -> None:
    """Checks that the adapter in a directory is that of a configuration; reads no weights.

    Args:
      path: the directory (`lora.checkpoint`).
      config: shapes of the model.
      adapters: shapes of the configuration's adapters.
      rank, alpha: `lora.rank`, `lora.alpha`.

    Raises:
      UserError: the files are missing or damaged, or are of another adapter; the message names the
        field to change.
    """
    directory = pathlib.Path(path)
    where = f"lora.checkpoint: {directory}"
    for name in (CONFIG, WEIGHTS):
        if not os.path.isfile(directory / name):
            raise UserError(
                f"{where} has no {name}: name the directory of an adapter in PEFT's format "
                "(`fp8rl convert RUN DST --adapter` writes one)"
            )
    try:
        values = read_json(directory / CONFIG)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}/{CONFIG} is not JSON ({error}): download it again") from None
    fields = Fields(values if isinstance(values, dict) else {}, f"{where}/{CONFIG}")
    for name, supported in _PLAIN.items():
        fields.require(name, supported, "only plain LoRA is read: take another adapter")
    for name, ours, field in (("r", rank, "rank"), ("lora_alpha", alpha, "alpha")):
        found = fields.get(name, float)
        if found != ours:
            raise UserError(
                f"{where} has {name} = {found:g} and lora.{field} is {ours:g}: write "
                f"lora.{field}={found:g}"
            )
    entries, flat = read_header(directory / WEIGHTS), traverse_util.flatten_dict(adapters)
    wanted = {name: flat[leaf].shape[-2:][::-1] for name, (leaf, _) in _places(config, adapters)}
    if entries.keys() != wanted.keys():
        have, want = map(_modules, (entries, wanted))
        raise UserError(
            f"{where} has matrices of {', '.join(have)}, {len(entries)} in all, and this model's "
            f"are of {', '.join(want)}, {len(wanted)}: write lora.modules={','.join(have)!r}, or "
            "take an adapter of this model"
        )
    for name, shape in wanted.items():
        if entries[name].dtype not in DTYPES:
            raise UserError(
                f"{where}: {name} is {entries[name].dtype}: take an adapter in F32 or BF16"
            )
        if entries[name].shape != shape:
            raise UserError(
                f"{where}: {name} has the shape {entries[name].shape}, and this model's is "
                f"{shape}: take an adapter of this model"
            )


def load_adapter(path: str, config: ModelConfig, adapters: Any) -> Any:
    """Returns adapters of a directory that `check_adapter` accepts, in the form of `adapters`,
    numpy float32."""
    entries = read_header(pathlib.Path(path) / WEIGHTS)
    shapes = traverse_util.flatten_dict(adapters)
    found = {leaf: np.empty(x.shape, np.float32) for leaf, x in shapes.items()}
    for name, (leaf, index) in _places(config, adapters):
        entry = entries[name]
        found[leaf][index] = read_rows(entry, 0, entry.shape[0]).astype(np.float32).T
    return traverse_util.unflatten_dict(found)
