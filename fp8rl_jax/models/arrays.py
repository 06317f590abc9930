"""The arrays of a model, one row each; whoever needs a name, a shape or a place folds over them.

    Array.shape     `leaf_shapes`, `param_shapes`; params.parameter_counts; layers.kernel_of
    Array.role      params.quantize_params and its neighbours; weight decay (`is_matrix`)
    Array.axes      storage on a mesh: parallel/specs.param_shardings
    Array.columns   columns over the mesh axis `tensor`: parallel/specs.weight_specs
    Array.reads     drift/operations.py
    Array.hf, gguf  names in checkpoints: hf/tables.py, hf/gguf_file.py

A new array is a row here and a line in the module that makes it. That the modules make these arrays
and no others, in these shapes, is tested for every family.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.stacks import RUNS, LayerSpec, Path, layer_spec, layer_stacks

Shape = tuple[int, ...]
Size = Callable[[ModelConfig], Shape | None]
# Roles. LINEAR: what a recipe may quantise. TABLE: embedding and head, in the compute dtype. ROUTER
# and VECTOR (gains of norms, corrections of routers): float32 in every form of the parameters.
LINEAR, TABLE, ROUTER, VECTOR = "linear", "table", "router", "vector"
SMALL = (ROUTER, VECTOR)
# Logical axes (`sharding.RULES`) of a stack of layers; experts and heads are stored whole.
_WIDE, EXPERTS, HEADS = ("layers", "embed", "wide"), ("layers", "experts"), ("layers", "heads")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names of Hugging Face


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a model, or of each of its layers.

    Attributes:
      path: in the tree of parameters; of a layer's array within its stack.
      shape: of a ModelConfig, without the axis of layers; None where a model lacks the array.
      role: LINEAR, TABLE, ROUTER or VECTOR.
      axes: the logical axes by which it is stored; those that are not named are not sharded.
      hf: Hugging Face's name, in a layer what follows "model.layers.N."; {} is an expert's number.
        Arrays of one name are parts of one tensor.
      gguf: llama.cpp's name, in a layer what follows "blk.N."; '' where its files have none.
      columns: whether its output features may be cut over the mesh axis `tensor`.
      residual: whether its product is added to the residual stream, which scales its initial values
        by 1 / sqrt(2 L) of L layers.
      reads: the tapped values that it multiplies (models/taps.py); () where these have no tap.
    """

    path: Path
    shape: Size
    role: str
    axes: tuple[str, ...]
    hf: str
    gguf: str = ""
    columns: bool = False
    residual: bool = False
    reads: tuple[str, ...] = ()

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix, or a stack of them; else a vector."""
        return self.role != VECTOR

    @property
    def transposed(self) -> bool:
        """Whether checkpoints hold its matrices as (out, in)."""
        return self.matrix and self.hf != EMBEDDING


def _linear(place: str, shape: Size, *reads: str, **others: Any) -> Array:
    """The kernel of a linear layer of attention, at 'module/submodule'."""
    *outer, name = place.split("/")
    hf, path = f"self_attn.{name}.weight", (*outer, name, "kernel")
    return Array(path, shape, LINEAR, _WIDE, hf, reads=reads, **others)


def _gain(place: str, shape: Size, gguf: str = "") -> Array:
    """The gain of an RMSNorm."""
    path = (*place.split("/"), "weight")
    return Array(path, shape, VECTOR, (), ".".join(path), gguf)


def _gated_mlp(
    outer: str, hf: str, sizes: Callable[[ModelConfig], Shape], axes: tuple[str, ...], **others: Any
) -> tuple[Array, ...]:
    """gate, up and down of a gated MLP; `sizes`: what is in front, if anything, and the width,
    which is 0 where there is none."""

    def shape(name: str, config: ModelConfig) -> Shape | None:
        *front, width = sizes(config)
        matrix = (config.hidden_size, width)
        return (*front, *(matrix[::-1] if name == "down" else matrix)) if width else None

    path = (outer,) if outer else ()
    normed, gated = ("post_attention_layernorm/output",), ("/".join((*path, "gated")),)
    return tuple(
        Array(
            (*path, f"{name}_proj", "kernel"),
            functools.partial(shape, name),
            LINEAR,
            axes,
            f"mlp.{hf}{name}_proj.weight",
            gguf=f"ffn_{name}.weight" if not outer else "",
            reads=() if axes == EXPERTS else gated if name == "down" else normed,
            residual=name == "down",
            **others,
        )
        for name in ("gate", "up", "down")
    )


def _hidden(c: ModelConfig) -> Shape:
    return (c.hidden_size,)


def _queries(c: ModelConfig) -> int:
    """Features of the queries of all heads."""
    head = c.qk_nope_head_dim + c.qk_rope_head_dim if c.latent else c.head_dim
    return c.num_attention_heads * head


def _keys(c: ModelConfig) -> Shape | None:
    return None if c.latent else (c.hidden_size, c.num_key_value_heads * c.head_dim)


def _head(c: ModelConfig) -> Shape | None:
    return (c.head_dim,) if c.qk_norm and not c.latent else None


def _latent(size: Callable[[ModelConfig], Shape]) -> Size:
    """Of models with latent attention."""
    return lambda c: size(c) if c.latent else None


def _query_latent(size: Callable[[ModelConfig], Shape]) -> Size:
    """Of models with a latent of the queries."""
    return lambda c: size(c) if c.q_lora_rank else None


_NORMED = "input_layernorm/output"
MODEL = (
    Array(
        ("embed_tokens",),
        lambda c: (c.vocab_size, c.hidden_size),
        TABLE,
        ("vocab", "embed"),
        EMBEDDING,
        "token_embd.weight",
    ),
    Array(("norm", "weight"), _hidden, VECTOR, (), "model.norm.weight", "output_norm.weight"),
    Array(
        ("lm_head",),
        lambda c: None if c.tie_word_embeddings else (c.hidden_size, c.vocab_size),
        TABLE,
        ("embed", "vocab"),
        HEAD,
        "output.weight",
    ),
)
ATTENTION = (
    _gain("input_layernorm", _hidden, gguf="attn_norm.weight"),
    _gain("post_attention_layernorm", _hidden, gguf="ffn_norm.weight"),
    _linear(
        "self_attn/q_proj",
        lambda c: None if c.q_lora_rank else (c.hidden_size, _queries(c)),
        _NORMED,
        gguf="attn_q.weight",
        columns=True,
    ),
    _linear("self_attn/k_proj", _keys, _NORMED, gguf="attn_k.weight", columns=True),
    _linear("self_attn/v_proj", _keys, _NORMED, gguf="attn_v.weight", columns=True),
    _gain("self_attn/q_norm", _head),
    _gain("self_attn/k_norm", _head),
    _linear(
        "o_proj",
        lambda c: (
            c.num_attention_heads * (c.v_head_dim if c.latent else c.head_dim),
            c.hidden_size,
        ),
        "self_attn/attention",
        "self_attn/values",
        gguf="attn_output.weight",
        columns=True,
        residual=True,
    ),
)
MLP = _gated_mlp("", "", lambda c: (c.intermediate_size,), _WIDE, columns=True)
LATENT = (  # arXiv:2405.04434, 2.1
    _linear("self_attn/q_a_proj", _query_latent(lambda c: (c.hidden_size, c.q_lora_rank)), _NORMED),
    _gain("self_attn/q_a_layernorm", _query_latent(lambda c: (c.q_lora_rank,))),
    _linear(
        "self_attn/q_b_proj",
        _query_latent(lambda c: (c.q_lora_rank, _queries(c))),
        "self_attn/q_a_layernorm/output",
    ),
    _linear(
        "self_attn/kv_a_proj_with_mqa",
        _latent(lambda c: (c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)),
        _NORMED,
    ),
    _gain("self_attn/kv_a_layernorm", _latent(lambda c: (c.kv_lora_rank,))),
    # Of each head, keys and then values.
    Array(
        ("self_attn", "k_b_proj", "kernel"),
        _latent(lambda c: (c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank)),
        LINEAR,
        HEADS,
        "self_attn.kv_b_proj.weight",
    ),
    Array(
        ("self_attn", "v_b_proj", "kernel"),
        _latent(lambda c: (c.num_attention_heads, c.kv_lora_rank, c.v_head_dim)),
        LINEAR,
        HEADS,
        "self_attn.kv_b_proj.weight",
    ),
)
SPARSE = (
    Array(
        ("router", "kernel"),
        lambda c: (c.hidden_size, c.num_experts),
        ROUTER,
        ("layers", "embed"),
        "mlp.gate.weight",
    ),
    Array(
        ("router", "e_score_correction_bias"),
        lambda c: (c.num_experts,) if c.scoring_func == "sigmoid" else None,
        VECTOR,
        ("layers", "embed"),
        "mlp.gate.e_score_correction_bias",
    ),
    *_gated_mlp(
        "experts", "experts.{}.", lambda c: (c.num_experts, c.moe_intermediate_size), EXPERTS
    ),
    *_gated_mlp(
        "shared_experts",
        "shared_experts.",
        lambda c: (c.n_shared_experts * c.moe_intermediate_size,),
        _WIDE,
    ),
)
LAYER = (*ATTENTION, *MLP, *LATENT, *SPARSE)
_BY_PATH = {array.path: array for array in (*MODEL, *LAYER)}
_ROOTS = RUNS | {array.path[0] for array in MODEL}
# Names of linear layers, as `bf16_modules` of a recipe matches them.
LINEAR_LAYERS = tuple(dict.fromkeys(a.path[-2] for a in LAYER if a.role == LINEAR))


def layer_arrays(layer: LayerSpec) -> tuple[Array, ...]:
    """Rows of what a layer may have; their shapes tell which it has."""
    return (*ATTENTION, *LATENT, *(SPARSE if layer.experts else MLP))


def array_of(path: Path) -> Array:
    """The row of a parameter.

    Args:
      path: of the leaf, in the whole tree or within a stack of layers.

    Raises:
      KeyError: no model has such an array.
    """
    return _BY_PATH[path[1:] if path[0] in RUNS else path]


def array_in(keys) -> Array | None:
    """The row of a leaf of a tree that holds parameters and other things: a training state, say.

    Args:
      keys: of the leaf as `jax.tree_util` gives them. What belongs to a parameter (its moments, its
        bytes and scales) has the parameter's row.

    Returns:
      The row, or None outside of parameters.

    Raises:
      KeyError: inside of parameters is one that no model has.
    """
    names = [getattr(key, "key", "") for key in keys]  # of dictionaries; '' of a dataclass
    start = next((place for place, name in enumerate(names) if name in _ROOTS), None)
    if start is None:
        return None
    return array_of(tuple(itertools.takewhile(bool, names[start:])))


def role_of(path: Path) -> str:
    """LINEAR, TABLE, ROUTER or VECTOR, by a path as for `array_of`."""
    return array_of(path).role


def is_matrix(path: Path) -> bool:
    """Whether a parameter is a matrix, or a stack of them, by a path as for `array_of`."""
    return array_of(path).matrix


@functools.cache
def leaf_shapes(config: ModelConfig) -> Mapping[Path, Shape]:
    """{path: shape} of a model's parameters."""
    found = {array.path: array.shape(config) for array in MODEL}
    for stack, count in layer_stacks(config).items():
        for array in layer_arrays(layer_spec(config, stack)):
            shape = array.shape(config)
            found[(stack, *array.path)] = None if shape is None else (count, *shape)
    return types.MappingProxyType({path: s for path, s in sorted(found.items()) if s is not None})


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """ShapeDtypeStructs of a model's parameters, as `init_params` makes them; runs nothing."""
    structs = {p: jax.ShapeDtypeStruct(s, jnp.float32) for p, s in leaf_shapes(config).items()}
    return traverse_util.unflatten_dict(structs)
