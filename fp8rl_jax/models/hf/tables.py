"""Names: one table per family, from a tensor in a checkpoint to its place in our parameter tree.

A checkpoint holds a matrix per layer and expert, as torch's (out, in); our leaves are (in, out),
stacked over layers and experts. So a tensor of the checkpoint is one `Piece` of a leaf: an index
into its stacks, and a transposition. The one exception is latent attention's ``kv_b_proj``, whose
rows belong to heads, and within a head to keys and then to values: two pieces a head.

The tree itself, `jax.eval_shape` of `init_params`, decides which rows of a table a layer has (a
dense one or one with experts, a latent of queries or none), and gives the shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Iterator, Mapping

import jax

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.hf.config_json import family_of
from fp8rl_jax.models.params import init_params
from fp8rl_jax.models.stacks import layer_stacks

Path = tuple[str, ...]
LINEAR, TABLE, SMALL = "linear", "table", "small"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_KV_B = "self_attn.kv_b_proj.weight"


def _linears(*names: str, prefix: str, within: Path = ()) -> dict[str, Path]:
    return {f"{prefix}{name}.weight": (*within, name, "kernel") for name in names}


def _norms(*names: str, prefix: str = "", within: Path = ()) -> dict[str, Path]:
    return {f"{prefix}{name}.weight": (*within, name, "weight") for name in names}


_ATTENTION, _MLP, _OF_ATTENTION = "self_attn.", "mlp.", ("self_attn",)
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_LAYER = {
    **_norms("input_layernorm", "post_attention_layernorm"),
    **_linears("o_proj", prefix=_ATTENTION),
}
_GROUPED_QUERIES = _linears("q_proj", "k_proj", "v_proj", prefix=_ATTENTION, within=_OF_ATTENTION)
_QK_NORM = _norms("q_norm", "k_norm", prefix=_ATTENTION, within=_OF_ATTENTION)
_DENSE = _linears(*_MATRICES, prefix=_MLP)
_EXPERTS = {
    "mlp.gate.weight": ("router", "kernel"),
    **_linears(*_MATRICES, prefix="mlp.experts.{}.", within=("experts",)),
}
_LATENTS = {
    **_linears(
        "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
        prefix=_ATTENTION, within=_OF_ATTENTION,
    ),
    **_norms("q_a_layernorm", "kv_a_layernorm", prefix=_ATTENTION, within=_OF_ATTENTION),
    _KV_B: ("self_attn", "k_b_proj", "kernel"),  # and v_b_proj
}  # fmt: skip
_DEEPSEEK_EXPERTS = {
    **_EXPERTS,
    "mlp.gate.e_score_correction_bias": ("router", "e_score_correction_bias"),
    **_linears(*_MATRICES, prefix="mlp.shared_experts.", within=("shared_experts",)),
}
# Family -> name after "model.layers.N." -> path within a stack; {} stands for an expert's number.
LAYER_TABLES: dict[str, dict[str, Path]] = {
    "llama": {**_LAYER, **_GROUPED_QUERIES, **_DENSE},
    "qwen3": {**_LAYER, **_GROUPED_QUERIES, **_QK_NORM, **_DENSE},
    "qwen3_moe": {**_LAYER, **_GROUPED_QUERIES, **_QK_NORM, **_DENSE, **_EXPERTS},
    "deepseek_v3": {**_LAYER, **_LATENTS, **_DENSE, **_DEEPSEEK_EXPERTS},
}
# The same in every family.
MODEL_TABLE: dict[str, Path] = {
    EMBEDDING: ("embed_tokens",),
    "model.norm.weight": ("norm", "weight"),
    HEAD: ("lm_head",),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where rows of a checkpoint's tensor lie in our tree.

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
      role: LINEAR may be FP8; TABLE is an embedding or a head, SMALL a norm or of a router.
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
    tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return types.MappingProxyType({path_of(keys): leaf.shape for keys, leaf in leaves})


def path_of(keys) -> Path:
    """Names of a leaf's path as `jax.tree_util` gives it."""
    return tuple(key.key for key in keys)


def role_of(path: Path) -> str:
    """LINEAR, TABLE or SMALL, by the path of a leaf."""
    if path in (("embed_tokens",), ("lm_head",)):
        return TABLE
    return LINEAR if path[-1] == "kernel" and path[-2] != "router" else SMALL


def model_tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of a model's checkpoint, in the order of its layers.

    Raises:
      UserError: no family has the rules of this configuration.
    """
    shapes = leaf_shapes(config)
    found = [_plain(n, p, (), shapes[p]) for n, p in MODEL_TABLE.items() if p in shapes]
    table, layer = LAYER_TABLES[family_of(config)], 0
    for stack, count in layer_stacks(config).items():
        rows = {name: (stack, *path) for name, path in table.items() if (stack, *path) in shapes}
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


def ignored(config: ModelConfig, further_layers: int = 1):
    """A function that tells which names of a checkpoint are passed over.

    Rotary frequencies, which some checkpoints hold, follow from config.json. DeepSeek's files may
    hold modules that predict further tokens, as layers after the last. A tied head is the
    embedding: the loader compares the two.

    Args:
      config: of the model.
      further_layers: how many such modules there may be.
    """
    after = range(config.num_hidden_layers, config.num_hidden_layers + further_layers)

    def test(name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name == HEAD:
            return config.tie_word_embeddings
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(config.latent and layer and int(layer[1]) in after)

    return test
