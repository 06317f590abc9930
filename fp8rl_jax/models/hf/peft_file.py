"""Reads the files of an adapter in PEFT's format, and checks that each tensor has a place.

Only plain LoRA is read: no biases, no DoRA, no further modules; ranks differ only where experts are
packed, as PEFT writes them. What else a file asks for is refused by name.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families import nearest
from fp8rl_jax.models.families.fields import Fields
from fp8rl_jax.models.families.gemma import IMAGES
from fp8rl_jax.models.hf.finite import count_not_finite
from fp8rl_jax.models.hf.peft_tensors import (
    BESIDE_IMAGES,
    BESIDE_IMAGES_BEFORE,
    GATE_UP,
    PACKED,
    TEXT,
    Pair,
    linear_layers,
    pairs,
)
from fp8rl_jax.models.hf.safetensors_file import DTYPES, read_header, read_rows
from fp8rl_jax.models.stacks import Path

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Fields that may be absent or have these values; others change what an adapter computes.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "layers_to_transform": ([],),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    # Others are of a base that they changed.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
# Fields that are read, that the names of tensors say too, or that do not change what an adapter
# computes: settings of a beginning that changes a base are among these, as `init_lora_weights`
# refuses such a beginning.
_FREE = frozenset(
    (
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern"),
        *("target_modules", "target_parameters", "exclude_modules"),
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "ensure_weight_tying", "runtime_config"),
        *("megatron_core", "qalora_group_size", "unsloth_fixed"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    )
)
# Part of a tensor's name -> what it belongs to.
_NOT_READ = {
    "vision_tower.": "the vision tower",
    "multi_modal_projector.": "the projector of images",
    "embed_tokens.": "the embedding",
    "lm_head.": "the output head",
    ".mlp.gate.": "the router",
    ".mlp.router.": "the router",
    ".kv_b_proj.": "latent attention's matrices by head",
    ".default.": "a model's state, before save_pretrained, which leaves '.default' out,",
}


class AdapterFile:
    """The two files of an adapter, read for a model.

    Args:
      directory: the directory (`lora.checkpoint`).
      config: shapes of the model.

    Raises:
      UserError: a file is missing or damaged.
    """

    def __init__(self, directory: pathlib.Path, config: ModelConfig):
        self._where = f"lora.checkpoint: {directory}"
        for name in (CONFIG, WEIGHTS):
            if not os.path.isfile(directory / name):
                raise UserError(
                    f"{self._where} has no {name}: name the directory of an adapter in PEFT's "
                    "format (`fp8rl convert RUN DST --adapter` writes one)"
                )
        about = f"{self._where}/{CONFIG}"
        try:
            values = read_json(directory / CONFIG)
        except (OSError, ValueError) as error:
            raise UserError(f"{about} is not JSON ({error}): download it again") from None
        self._fields = Fields(values if isinstance(values, dict) else {}, about)
        self._entries = read_header(directory / WEIGHTS)
        self._config = config
        starts = [TEXT]
        if IMAGES in nearest(config).aliases:
            starts += [BESIDE_IMAGES, BESIDE_IMAGES_BEFORE]
        self._start = next((start for start in starts if self._has(re.escape(start))), TEXT)
        self._packed: list[str] | None = None
        if self._has(r".*\.mlp\.experts\.(base_layer|lora_)"):
            targets = self._fields.values.get("target_parameters")
            targets = targets if isinstance(targets, list) else []
            ends = {str(target).rpartition(".")[2] for target in targets}
            self._packed = [parameter for parameter in PACKED if parameter in ends]

    def _has(self, pattern: str) -> bool:
        """Returns whether a tensor's name begins with a pattern."""
        return any(re.match(pattern, name) for name in self._entries)

    def pairs(self, adapted: Collection[Path]) -> list[Pair]:
        """Returns the pairs of adapters of these linear layers under the file's names."""
        return list(pairs(self._config, adapted, self._start, self._packed))

    def holds(self, pair: Pair) -> bool:
        """Returns whether the file has a tensor of a pair."""
        return any(name in self._entries for name in pair.tensors)

    def read(self, name: str) -> np.ndarray:
        """Returns a matrix in float32."""
        entry = self._entries[name]
        return read_rows(entry, 0, entry.shape[0]).astype(np.float32)

    def check(self, adapted: Collection[Path], rank: int, alpha: float) -> None:
        """Checks that the file holds finite adapters of a configuration, and nothing else.

        Weights whose product is zero need no place.

        Args:
          adapted: paths of the linear layers with adapters.
          rank, alpha: `lora.rank`, `lora.alpha`.

        Raises:
          UserError: the file is of another adapter; the message names the field to change, or the
            first tensor that has no place.
        """
        self._fields.require_finite()
        for name, supported in _PLAIN.items():
            self._fields.require(name, supported, "only plain LoRA is read: take another adapter")
        for name, value in self._fields.values.items():
            if name not in _PLAIN.keys() | _FREE and value not in (None, False, "", [], {}):
                raise self._fields.error(
                    name,
                    "only plain LoRA is read: take another adapter, or remove the field if it "
                    "changes nothing",
                )
        self._check_numbers(rank, alpha)
        wanted = self.pairs(adapted)
        placed = {name for pair in wanted for name in pair.tensors}
        for name in self._entries:
            if name not in placed and not self._is_zero(name):
                raise UserError(f"{self._where}: {name} has no place: {self._reason(name)}")
        for pair in wanted:
            if self.holds(pair):
                self._check_pair(pair, rank)
        self._check_complete(adapted, wanted)
        for name in (name for name in self._entries if name in placed):
            entry = self._entries[name]
            values = read_rows(entry, 0, entry.shape[0])
            if bad := count_not_finite(values):
                raise UserError(
                    f"lora.checkpoint: {entry.file}: {bad:,} of the {values.size:,} elements of "
                    f"tensor {name} are NaN or infinite: take an adapter without"
                )

    def _ranks(self, pair: Pair) -> int:
        """Returns the rank that adapter_config.json gives a pair."""
        wide = len(pair.layers) > 1 and self._fields.values.get("rank_pattern")
        return self._fields.get("r", int) * (2 if wide else 1)

    def _check_numbers(self, rank: int, alpha: float) -> None:
        stated = self._fields.get("r", int)
        scale = self._fields.get("lora_alpha", float)
        patterns: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}}
        widest = stated
        if self._fields.values.get("rank_pattern"):
            widest = 2 * stated
            patterns = {"rank_pattern": {GATE_UP: widest}, "alpha_pattern": {GATE_UP: 2 * scale}}
        for name, pattern in patterns.items():
            if (self._fields.values.get(name) or {}) != pattern:
                raise self._fields.error(
                    name, "ranks may differ only where PEFT packs gate and up: take another adapter"
                )
        if rank not in (stated, widest):
            together = f", {widest} for gate and up together," if widest > stated else ""
            raise UserError(
                f"{self._where} has r = {stated}{together} and lora.rank is {rank}: write "
                f"lora.rank={widest}"
            )
        wanted = 2 * scale if rank > stated else scale
        if alpha != wanted:
            raise UserError(
                f"{self._where} has lora_alpha = {scale:g} for r = {stated} and lora.alpha is "
                f"{alpha:g} for lora.rank={rank}: write lora.alpha={wanted:g}"
            )

    def _check_pair(self, pair: Pair, rank: int) -> None:
        """Checks that the file has both tensors of a pair, and that all of them has a place."""
        ranks = self._ranks(pair)
        for name, shape in zip(pair.tensors, pair.shapes(ranks), strict=True):
            entry = self._entries.get(name)
            if entry is None:
                raise UserError(f"{self._where} has no {name}: download the adapter again")
            if entry.dtype not in DTYPES:
                raise UserError(
                    f"{self._where}: {name} is {entry.dtype}: take an adapter in F32 or BF16"
                )
            if entry.shape != shape:
                raise UserError(
                    f"{self._where}: {name} has the shape {entry.shape}, and this model's is "
                    f"{shape}: take an adapter of this model"
                )
        name = pair.tensors[1]
        if pair.is_whole(ranks, rank) or not pair.loses(self.read(name), rank):
            return
        if len(pair.parts) < len(pair.layers):
            raise UserError(f"{self._where}: {name} has no place: {self._reason(name)}")
        raise UserError(
            f"{self._where}: {name} mixes {' and '.join(pair.layers)} in a rank of {ranks}: write "
            f"lora.rank={ranks} and lora.alpha={2 * self._fields.get('lora_alpha', float):g}"
        )

    def _is_zero(self, name: str) -> bool:
        """Returns whether a tensor is of a pair whose B is zero."""
        stem = name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        entry = self._entries.get(f"{stem}.lora_B.weight")
        if stem == name or entry is None or not entry.shape or entry.dtype not in DTYPES:
            return False
        return not read_rows(entry, 0, entry.shape[0]).any()

    def _check_complete(self, adapted: Collection[Path], wanted: list[Pair]) -> None:
        """Checks that no tensor is missing.

        Layers that `lora.modules` cannot name apart, such as the dense ones in a mixture, may be
        missing as a whole: on transformers 5 PEFT gives them no adapters.
        """
        layers = {part.layer for pair in wanted if self.holds(pair) for part in pair.parts}
        absent = sorted({path[-1] for path in adapted} - {path[-1] for path in layers})
        if absent:
            raise UserError(
                f"{self._where} has no matrices of {', '.join(absent)}: {self._advice()}"
            )
        for pair in wanted:
            if not self.holds(pair) and any(part.layer in layers for part in pair.parts):
                raise UserError(
                    f"{self._where} has no {pair.tensors[0]}, and has it in other layers: download "
                    "it again, or take an adapter of all layers of this model"
                )

    def _reason(self, name: str) -> str:
        """Returns why a tensor has no place, and what to do."""
        for pair in self.pairs(linear_layers(self._config)):
            if name in pair.tensors:
                return f"lora.modules leaves {' or '.join(pair.layers)} out; {self._advice()}"
        for part, owner in _NOT_READ.items():
            if part in name:
                return f"adapters of {owner} are not read; take an adapter without them"
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= self._config.num_hidden_layers:
            return (
                f"this model has {self._config.num_hidden_layers} layers; take an adapter of this "
                "model"
            )
        return "no linear layer of this model has this name; take an adapter of this model"

    def _advice(self) -> str:
        """Returns the value of `lora.modules` that the file goes with."""
        known = self.pairs(linear_layers(self._config))
        modules = sorted({name for pair in known if self.holds(pair) for name in pair.layers})
        if not modules:
            return "take an adapter of this model"
        return f"write lora.modules={','.join(modules)!r}, or take an adapter of this model"
