"""Layers and their stacks: which are stacked together, what they are, and which are one scan.

Parameters keep layers of one kind (dense, with experts) in one stack: `layers`, and before it
`dense_layers` in a model whose first layers are dense although the others have experts. A forward
pass scans over *runs*: layers of one stack under one recipe (`Recipe.layer_segments` keeps the
first or last in bf16).
"""

from __future__ import annotations

import dataclasses

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.quant import Recipe

DENSE_STACK, STACK = "dense_layers", "layers"
RUNS = frozenset(s + end for s in (DENSE_STACK, STACK) for end in ("", "_first", "_last"))
Path = tuple[str, ...]


def path_of(keys) -> Path:
    """Names of a leaf's path as `jax.tree_util` gives it: keys of dicts, fields of dataclasses."""
    return tuple(key.key if hasattr(key, "key") else key.name for key in keys)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a decoder layer consists of; layers of a stack have the same.

    Attributes:
      experts: routed experts in the place of the gated MLP.
    """

    experts: bool


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that one scan runs over.

    Attributes:
      name: of the group, in trees that are cut into groups (`split_layers`); one of RUNS.
      stack: of the parameters, 'layers' or 'dense_layers'.
      span: the layers within the stack.
      layers: the layers within the model.
      recipe: of these layers.
    """

    name: str
    stack: str
    span: slice
    layers: slice
    recipe: Recipe


def layer_stacks(config: ModelConfig) -> dict[str, int]:
    """{stack: layers} of a model, in their order."""
    dense = config.dense_layers
    counts = {DENSE_STACK: dense, STACK: config.num_hidden_layers - dense}
    return {name: count for name, count in counts.items() if count}


def layer_spec(config: ModelConfig, stack: str) -> LayerSpec:
    """What the layers of a stack consist of."""
    return LayerSpec(experts=config.num_experts > 0 and stack == STACK)


def layer_groups(stacks: dict[str, int], recipe: Recipe) -> list[LayerGroup]:
    """The runs of a model whose stacks are `stacks`, in the order of its layers.

    Raises:
      UserError: the recipe names more layers than there are.
    """
    runs: list[LayerGroup] = []
    start = 0
    for stack, count in stacks.items():
        for name, segment, own in recipe.layer_segments(sum(stacks.values())):
            first, last = max(segment.start, start), min(segment.stop, start + count)
            if first < last:
                name = stack + name.removeprefix(STACK)
                span = slice(first - start, last - start)
                runs.append(LayerGroup(name, stack, span, slice(first, last), own))
        start += count
    return runs


def is_whole(runs: list[LayerGroup]) -> bool:
    """Whether every stack is one run of its own name, so that nothing needs cutting."""
    return len(runs) == len({run.stack for run in runs}) and all(
        run.name == run.stack for run in runs
    )
