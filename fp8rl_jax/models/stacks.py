"""Stacks of layers in the parameters, and runs of layers that one scan covers.

Parameters keep layers of one kind (dense, with experts) in one stack: `layers`, and before it
`dense_layers` in a model with experts whose first layers are dense. A forward pass scans over
*runs*: layers of one stack under one recipe (`Recipe.layer_segments` keeps the first or last in
bf16).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.quant import Recipe

DENSE_STACK = "dense_layers"
STACK = "layers"
RUNS = frozenset(s + end for s in (DENSE_STACK, STACK) for end in ("", "_first", "_last"))
Path = tuple[str, ...]


def path_of(keys) -> Path:
    """Returns the names in a leaf's `jax.tree_util` path: keys of dicts, fields of dataclasses."""
    return tuple(key.key if hasattr(key, "key") else key.name for key in keys)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Structure of a decoder layer, the same for all layers of a stack.

    Attributes:
      experts: whether the layer has routed experts instead of a gated MLP.
    """

    experts: bool


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """A run: layers of one stack under one recipe, which one scan covers.

    Attributes:
      name: key of the run in trees that are cut into runs (`split_layers`); one of RUNS.
      stack: key of the stack in the parameters, 'layers' or 'dense_layers'.
      span: the layers, numbered within the stack.
      layers: the layers, numbered within the model.
      recipe: numerics of these layers.
    """

    name: str
    stack: str
    span: slice
    layers: slice
    recipe: Recipe


def layer_stacks(config: ModelConfig) -> dict[str, int]:
    """Returns {stack: number of layers} of a model, in the order of its layers."""
    dense = config.dense_layers
    counts = {DENSE_STACK: dense, STACK: config.num_hidden_layers - dense}
    return {name: count for name, count in counts.items() if count}


def layer_spec(config: ModelConfig, stack: str) -> LayerSpec:
    """Returns the `LayerSpec` of a stack's layers."""
    return LayerSpec(experts=config.num_experts > 0 and stack == STACK)


ALL = 2**30  # a window that hides nothing


def layer_windows(config: ModelConfig) -> np.ndarray | None:
    """Returns how many tokens a query of each layer sees at most, int32 (L,); ALL for all. None for
    a model without windows."""
    if not config.sliding_window:
        return None
    windows = np.full(config.num_hidden_layers, config.sliding_window, np.int32)
    if every := config.sliding_window_pattern:
        windows[every - 1 :: every] = ALL
    return windows


def layer_groups(stacks: dict[str, int], recipe: Recipe) -> list[LayerGroup]:
    """Splits stacks ({name: number of layers}) into runs, in the order of the model's layers.

    Raises:
      UserError: the recipe names more layers than the model has.
    """
    runs: list[LayerGroup] = []
    start = 0
    for stack, count in stacks.items():
        for name, segment, own in recipe.layer_segments(sum(stacks.values())):
            first = max(segment.start, start)
            last = min(segment.stop, start + count)
            if first < last:
                name = stack + name.removeprefix(STACK)
                span = slice(first - start, last - start)
                runs.append(LayerGroup(name, stack, span, slice(first, last), own))
        start += count
    return runs


def is_whole(runs: list[LayerGroup]) -> bool:
    """Returns whether every stack is one run of the same name, so that no stack is cut."""
    return len(runs) == len({run.stack for run in runs}) and all(
        run.name == run.stack for run in runs
    )
