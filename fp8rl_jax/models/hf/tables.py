"""Names: from a tensor in a checkpoint to its place in our parameter tree.

A checkpoint holds a matrix per layer and expert, as torch's (out, in); our leaves are (in, out),
stacked over layers and experts. So a tensor of the checkpoint is one `Piece` of a leaf: an index
into its stacks, and a transposition. The one exception is latent attention's ``kv_b_proj``, whose
rows belong to heads, and within a head to keys and then to values: two pieces a head.

The families share their names. The tree itself, `jax.eval_shape` of `init_params`, decides which
rows of the table a layer has (a dense one or one with experts, a latent of queries or none), and
gives the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping

import jax

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.params import init_params
from fp8rl_jax.models.stacks import LINEAR, Path, layer_stacks, path_of, role_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_KV_B = "self_attn.kv_b_proj.weight"
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
_NORMS = ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")
_MODEL: dict[str, Path] = {
    EMBEDDING: ("embed_tokens",),
    "model.norm.weight": ("norm", "weight"),
    HEAD: ("lm_head",),
}
# Name after "model.layers.N." -> path within a stack; {} stands for an expert's number.
_LAYER: dict[str, Path] = {
    "input_layernorm.weight": ("input_layernorm", "weight"),
    "post_attention_layernorm.weight": ("post_attention_layernorm", "weight"),
    "self_attn.o_proj.weight": ("o_proj", "kernel"),
    **{f"self_attn.{name}.weight": ("self_attn", name, "kernel") for name in _PROJECTIONS},
    **{f"self_attn.{name}.weight": ("self_attn", name, "weight") for name in _NORMS},
    _KV_B: ("self_attn", "k_b_proj", "kernel"),  # and v_b_proj
    **{f"mlp.{name}.weight": (name, "kernel") for name in _MATRICES},
    "mlp.gate.weight": ("router", "kernel"),
    **{f"mlp.experts.{{}}.{name}.weight": ("experts", name, "kernel") for name in _MATRICES},
    "mlp.gate.e_score_correction_bias": ("router", "e_score_correction_bias"),
    **{
        f"mlp.shared_experts.{name}.weight": ("shared_experts", name, "kernel")
        for name in _MATRICES
    },
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where rows of a checkpoint's tensor are stored in our tree.

    Attributes:
      path: of the leaf.
      index: into the leaf's axes in front: layer, expert or head.
      start, stop: the rows, of the tensor in the checkpoint.
      transposed: the leaf holds them as columns.
    """

    path: Path
    index: tuple[int, ...]
    start: int
    stop: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that a checkpoint of a model holds.

    Attributes:
      name: in the checkpoint.
      shape: in the checkpoint.
      role: of `role_of`; LINEAR may be FP8.
      pieces: what it consists of, by ascending rows, without gaps.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    pieces: tuple[Piece, ...]

    @property
    def module(self) -> str:
        """Its module's name: that of the tensor without its last part."""
        return self.name.rpartition(".")[0]


@functools.cache
def leaf_shapes(config: ModelConfig) -> Mapping[Path, tuple[int, ...]]:
    """{path: shape} of every leaf of a model's parameters."""
    tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0, impl="threefry2x32")))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return types.MappingProxyType({path_of(keys): leaf.shape for keys, leaf in leaves})


def model_tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of a model's checkpoint, in the order of its layers."""
    shapes, layer = leaf_shapes(config), 0
    found = [_plain(n, p, (), shapes[p]) for n, p in _MODEL.items() if p in shapes]
    for stack, count in layer_stacks(config).items():
        rows = {name: (stack, *path) for name, path in _LAYER.items() if (stack, *path) in shapes}
        for index in range(count):
            for name, path in rows.items():
                found += _layer_tensors(config, f"model.layers.{layer}.{name}", path, index, shapes)
            layer += 1
    covered = {piece.path for tensor in found for piece in tensor.pieces}
    assert covered == set(shapes), covered ^ set(shapes)
    return found


def _layer_tensors(config, name: str, path: Path, index: int, shapes) -> Iterator[Tensor]:
    if name.endswith(_KV_B):
        yield _keys_and_values(config, name, path, index)
    elif "{}" in name:
        for expert in range(config.num_experts):
            yield _plain(name.format(expert), path, (index, expert), shapes[path])
    else:
        yield _plain(name, path, (index,), shapes[path])


def _plain(name: str, path: Path, index: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A tensor that is one piece of a leaf."""
    transposed = path[-1] == "kernel" or path == ("lm_head",)
    own = shape[len(index) :]
    own = own[::-1] if transposed else own
    return Tensor(name, own, role_of(path), (Piece(path, index, 0, own[0], transposed),))


def _keys_and_values(config: ModelConfig, name: str, path: Path, index: int) -> Tensor:
    """Latent attention's kv_b_proj, (H * (nope + v), R): for each head keys, then values."""
    nope, v = config.qk_nope_head_dim, config.v_head_dim
    values = (*path[:-2], "v_b_proj", "kernel")
    pieces = []
    for head in range(config.num_attention_heads):
        start = head * (nope + v)
        middle, stop = start + nope, start + nope + v
        pieces.append(Piece(path, (index, head), start, middle, transposed=False))
        pieces.append(Piece(values, (index, head), middle, stop, transposed=True))
    return Tensor(name, (pieces[-1].stop, config.kv_lora_rank), LINEAR, tuple(pieces))
