"""A table of a model's arrays, one row each. The fields of a row, and their readers:

::

    Array.shape     `leaf_shapes`, `param_shapes`; params.parameter_counts; layers.kernel_of
    Array.role      params.quantize_params and its neighbours; weight decay (`is_matrix`)
    Array.axes      storage on a mesh: parallel/specs.param_shardings
    Array.columns   columns over the mesh axis `tensor`: parallel/specs.weight_specs
    Array.reads     drift/operations.py
    Array.hf        names in checkpoints: hf/tables.py

A new array is a row here and a line in the module that makes it. Tests check for every family that
the modules make exactly these arrays, in these shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.stacks import RUNS, LayerSpec, Path, layer_spec, layer_stacks
from fp8rl_jax.quant.kv import LAYER_SCALES

Shape = tuple[int, ...]
# Roles. LINEAR: what a recipe may quantise. TABLE: embedding and head, in the compute dtype.
# ROUTER, GAIN (of norms), BIAS (of linear layers and routers; sinks), CORRECTION (of routers):
# float32 in every form of the parameters.
LINEAR, TABLE, ROUTER, GAIN = "linear", "table", "router", "gain"
BIAS, CORRECTION = "bias", "correction"
SCALE = "scale"  # beside the projections of an attention in a sampler's weights (quant/kv.py)
ADAPTER = "adapter"  # one of FACTORS, beside the kernel of a linear layer (masters.py)
FACTORS = ("lora_a", "lora_b")
SMALL = (ROUTER, GAIN, BIAS, CORRECTION)
# Logical axes (`sharding.RULES`) of stacked arrays; the matrix of an expert or a head is not split.
_WIDE, EXPERTS, HEADS = ("layers", "embed", "wide"), ("layers", "experts"), ("layers", "heads")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # Hugging Face's names


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a model, or of each of its layers.

    Attributes:
      path: keys in the parameter tree; for an array of a layer, within its stack.
      sizes: names of its axes, keys of `_sizes`; without the layer axis.
      role: LINEAR, TABLE, ROUTER, GAIN, BIAS or CORRECTION.
      axes: for each leading axis, the logical axis by which storage is sharded over the mesh; the
        other axes are not sharded.
      hf: Hugging Face's name, in a layer what follows "model.layers.N."; {} is an expert's number.
        A model's arrays of one name are parts of one tensor.
      columns: whether its output features may be cut over the mesh axis `tensor`.
      residual: whether its product is added to the residual stream; its initial values are then
        scaled by 1 / sqrt(2 L) in a model of L layers.
      reads: names of the tapped values that it multiplies (models/taps.py); () if none is tapped.
    """

    path: Path
    sizes: str
    role: str
    axes: tuple[str, ...]
    hf: str
    columns: bool = False
    residual: bool = False
    reads: tuple[str, ...] = ()

    def shape(self, config: ModelConfig) -> Shape | None:
        """Returns its shape without the layer axis; None if the model lacks the array."""
        sizes = _sizes(config)
        shape = tuple(sizes[name] for name in self.sizes.split())
        return shape if all(shape) else None

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix or a stack of matrices, not a vector."""
        return self.role not in (GAIN, BIAS, CORRECTION, SCALE)

    @property
    def transposed(self) -> bool:
        """Whether checkpoints hold its matrices as (out, in)."""
        return self.matrix and self.hf != EMBEDDING


def _sizes(c: ModelConfig) -> dict[str, int]:
    """Returns {axis name: size} of a model's arrays; 0 where the model has no such axis."""
    head = c.qk_nope_head_dim + c.qk_rope_head_dim if c.latent else c.head_dim
    queries = c.num_attention_heads * head
    keys = 0 if c.latent else c.num_key_value_heads * c.head_dim
    qk_norm = c.qk_norm and not c.latent
    return {
        "vocab": c.vocab_size,
        "head_vocab": 0 if c.tie_word_embeddings else c.vocab_size,
        "hidden": c.hidden_size,
        "mlp": c.intermediate_size,
        "queries": 0 if c.q_lora_rank else queries,
        "keys": keys,
        "query_bias": queries if c.qkv_bias else 0,
        "key_bias": keys if c.qkv_bias else 0,
        "output_bias": c.hidden_size if c.o_bias else 0,
        "sunk_heads": c.num_attention_heads if c.attention_sinks else 0,
        "normed_queries": (c.head_dim if c.qk_norm_by_head else queries) if qk_norm else 0,
        "normed_keys": (c.head_dim if c.qk_norm_by_head else keys) if qk_norm else 0,
        "pre_norm": c.hidden_size if c.pre_norms else 0,
        "one_norm": 0 if c.sandwich_norms else c.hidden_size,
        "sandwich": c.hidden_size if c.sandwich_norms else 0,
        "pre_sandwich": c.hidden_size if c.sandwich_norms and c.pre_norms else 0,
        "attended": c.num_attention_heads * (c.v_head_dim if c.latent else c.head_dim),
        "q_latent": c.q_lora_rank,
        "latent_queries": queries if c.q_lora_rank else 0,
        "kv_latent": c.kv_lora_rank,
        "kv_latent_and_rope": c.kv_lora_rank + c.qk_rope_head_dim if c.latent else 0,
        "heads": c.num_attention_heads,
        "nope": c.qk_nope_head_dim,
        "value": c.v_head_dim,
        "experts": c.num_experts,
        "corrected_experts": c.num_experts if c.scoring_func == "sigmoid" else 0,
        "biased_experts": c.num_experts if c.moe_bias else 0,
        "expert_mlp": c.moe_intermediate_size,
        "shared_mlp": c.n_shared_experts * c.moe_intermediate_size,
    }


def _array(
    place: str, sizes: str, role: str, axes: tuple[str, ...], hf: str, **others: Any
) -> Array:
    """Makes the row of the array at `place`, 'module/name'."""
    return Array(tuple(place.split("/")), sizes, role, axes, hf, **others)


def _linear(place: str, sizes: str, *reads: str, **others: Any) -> Array:
    """Makes the row of the kernel of an attention's linear layer at `place`."""
    hf = f"self_attn.{place.rpartition('/')[2]}.weight"
    return _array(f"{place}/kernel", sizes, LINEAR, _WIDE, hf, reads=reads, **others)


def _gain(place: str, size: str) -> Array:
    """Makes the row of the gain of an RMSNorm at `place`."""
    path = f"{place}/weight"
    return _array(path, size, GAIN, (), path.replace("/", "."))


def _bias(place: str, size: str) -> Array:
    """Makes the row of the bias of an attention's linear layer at `place`."""
    return _array(f"{place}/bias", size, BIAS, (), f"self_attn.{place.rpartition('/')[2]}.bias")


def _gated_mlp(
    outer: str, hf: str, width: str, axes: tuple[str, ...], front: str = "", **others: Any
) -> tuple[Array, ...]:
    """Makes the rows gate, up and down of a gated MLP; `front`: name of a leading axis, if any."""
    normed = "pre_feedforward_layernorm/output", "post_attention_layernorm/output"
    gated = (f"{outer}gated",)
    return tuple(
        _array(
            f"{outer}{name}_proj/kernel",
            f"{front} {width} hidden" if name == "down" else f"{front} hidden {width}",
            LINEAR,
            axes,
            f"mlp.{hf}{name}_proj.weight",
            reads=() if front else gated if name == "down" else normed,
            residual=name == "down",
            **others,
        )
        for name in ("gate", "up", "down")
    )


_NORMED, _BY_HEAD = "input_layernorm/output", "self_attn.kv_b_proj.weight"
_VOCAB, _EMBED = ("vocab", "embed"), ("layers", "embed")
MODEL = (
    _array("embed_tokens", "vocab hidden", TABLE, _VOCAB, EMBEDDING),
    _array("norm/weight", "hidden", GAIN, (), "model.norm.weight"),
    _array("lm_head", "hidden head_vocab", TABLE, _VOCAB[::-1], HEAD),
)
ATTENTION = (
    _gain("input_layernorm", "pre_norm"),
    _gain("post_attention_layernorm", "one_norm"),
    _array("attention_norm/weight", "sandwich", GAIN, (), "post_attention_layernorm.weight"),
    _gain("pre_feedforward_layernorm", "pre_sandwich"),
    _gain("post_feedforward_layernorm", "sandwich"),
    _linear("self_attn/q_proj", "hidden queries", _NORMED, columns=True),
    _linear("self_attn/k_proj", "hidden keys", _NORMED, columns=True),
    _linear("self_attn/v_proj", "hidden keys", _NORMED, columns=True),
    _bias("self_attn/q_proj", "query_bias"),
    _bias("self_attn/k_proj", "key_bias"),
    _bias("self_attn/v_proj", "key_bias"),
    _bias("o_proj", "output_bias"),
    _array("self_attn/sinks", "sunk_heads", BIAS, (), "self_attn.sinks"),
    _gain("self_attn/q_norm", "normed_queries"),
    _gain("self_attn/k_norm", "normed_keys"),
    _linear(
        "o_proj",
        "attended hidden",
        "self_attn/attention",
        "self_attn/values",
        columns=True,
        residual=True,
    ),
)
MLP = _gated_mlp("", "", "mlp", _WIDE, columns=True)
LATENT = (  # arXiv:2405.04434, 2.1
    _linear("self_attn/q_a_proj", "hidden q_latent", _NORMED),
    _gain("self_attn/q_a_layernorm", "q_latent"),
    _linear("self_attn/q_b_proj", "q_latent latent_queries", "self_attn/q_a_layernorm/output"),
    _linear("self_attn/kv_a_proj_with_mqa", "hidden kv_latent_and_rope", _NORMED),
    _gain("self_attn/kv_a_layernorm", "kv_latent"),
    # Parts of one tensor: for each head keys, then values.
    _array("self_attn/k_b_proj/kernel", "heads nope kv_latent", LINEAR, HEADS, _BY_HEAD),
    _array("self_attn/v_b_proj/kernel", "heads kv_latent value", LINEAR, HEADS, _BY_HEAD),
)
_CORRECTION = "e_score_correction_bias"
SPARSE = (
    _array("router/kernel", "hidden experts", ROUTER, _EMBED, "mlp.gate.weight"),
    _array(
        f"router/{_CORRECTION}", "corrected_experts", CORRECTION, _EMBED, f"mlp.gate.{_CORRECTION}"
    ),
    _array("router/bias", "biased_experts", BIAS, _EMBED, "mlp.gate.bias"),
    *_gated_mlp("experts/", "experts.{}.", "expert_mlp", EXPERTS, front="experts"),
    *(
        _array(
            f"experts/{name}_bias",
            f"biased_experts {width}",
            BIAS,
            EXPERTS,
            f"mlp.experts.{{}}.{name}_proj.bias",
        )
        for name, width in (("gate", "expert_mlp"), ("up", "expert_mlp"), ("down", "hidden"))
    ),
    *_gated_mlp("shared_experts/", "shared_experts.", "shared_mlp", _WIDE),
)
LAYER = (*ATTENTION, *MLP, *LATENT, *SPARSE)
_BY_PATH = {array.path: array for array in (*MODEL, *LAYER)}
_ROOTS = RUNS | {array.path[0] for array in MODEL}
# Names of linear layers, as `bf16_modules` of a recipe matches them.
LINEAR_LAYERS = tuple(dict.fromkeys(a.path[-2] for a in LAYER if a.role == LINEAR))


def _in_layer(path: Path) -> Path:
    """Returns a path without the name of its stack of layers, if it has one."""
    return path[1:] if path[0] in RUNS else path


def layer_arrays(layer: LayerSpec) -> tuple[Array, ...]:
    """Returns the rows that a layer may have; `shape` is None for those that the model lacks."""
    return (*ATTENTION, *LATENT, *(SPARSE if layer.experts else MLP))


def array_of(path: Path) -> Array:
    """Returns the row of a parameter.

    Args:
      path: keys of the leaf, in the full tree or within a stack of layers.

    Raises:
      KeyError: no model has such an array.
    """
    path = _in_layer(path)
    if path[-1] in FACTORS:
        kernel = _BY_PATH[(*path[:-1], "kernel")]
        return Array(path, "", ADAPTER, kernel.axes if kernel.axes == EXPERTS else (), "")
    if path[-1] in LAYER_SCALES.values():
        return Array(path, "", SCALE, (), "")
    return _BY_PATH[path]


def shape_of(path: Path, config: ModelConfig) -> Shape | None:
    """Returns the shape of the array at a path (`array_of`), without the layer axis; None if the
    model has none there."""
    array = _BY_PATH.get(_in_layer(path))
    return array.shape(config) if array else None


def array_in(keys) -> Array | None:
    """Returns the row of a leaf in a tree of parameters and other values, say a training state.

    Args:
      keys: path of the leaf from `jax.tree_util`. Arrays that belong to a parameter (moments, FP8
        bytes, scales) have the parameter's row.

    Returns:
      The row, or None for a leaf outside parameters.

    Raises:
      KeyError: the path names a parameter that no model has.
    """
    names = [getattr(key, "key", "") for key in keys]  # keys of dicts; '' for dataclasses
    start = next((place for place, name in enumerate(names) if name in _ROOTS), None)
    return None if start is None else array_of(tuple(itertools.takewhile(bool, names[start:])))


def role_of(path: Path) -> str:
    """Returns the role of the array at a path as in `array_of`."""
    return array_of(path).role


def is_matrix(path: Path) -> bool:
    """Returns whether the parameter at a path (`array_of`) is a matrix or a stack of matrices."""
    return array_of(path).matrix


@functools.cache
def leaf_shapes(config: ModelConfig) -> Mapping[Path, Shape]:
    """Returns {path: shape} of a model's parameters."""
    found = {array.path: array.shape(config) for array in MODEL}
    for stack, count in layer_stacks(config).items():
        for array in layer_arrays(layer_spec(config, stack)):
            shape = array.shape(config)
            found[(stack, *array.path)] = None if shape is None else (count, *shape)
    return types.MappingProxyType({path: s for path, s in sorted(found.items()) if s is not None})


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """Returns the tree of `init_params` with ShapeDtypeStructs as leaves; runs nothing."""
    structs = {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, s in leaf_shapes(config).items()}
    return traverse_util.unflatten_dict(structs)
