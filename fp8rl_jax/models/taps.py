"""Named intermediate values of the forward pass, which `fp8rl drift` reads or replaces.

A module names a value by passing it through `tap`. In an ordinary forward pass `tap` returns its
argument and does not change the program. With `Observe.taps` it returns the values, stacked over
layers; `Observe.swaps` replaces values by given ones before the rest of the pass reads them.

A full name is the module's path inside its layer plus the value's name: ``self_attn/q_rope``. The
values outside the layers are ``embed`` and ``norm/output``. drift/operations.py lists all names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax import traverse_util

from fp8rl_jax.models.stacks import LayerGroup

TAPS = "taps"  # names of the Flax collections
SWAPS = "swaps"
COLLECTED = ("kv_health", "kv_amax", "expert_probability")  # values of `collect`
REMAT = ("none", "full")  # values of `remat`


@flax.struct.dataclass
class Swap:
    """A value that replaces a tapped one. The gradient still goes to the tapped value.

    The given value gets the same gradient, even where `chosen` is False: a swap that replaces
    nothing returns the gradient that arrives at the tap.

    Attributes:
      chosen: () bool, or (L,) for a value of the layers: where to swap.
      value: (L, B, T, ...) or (B, T, ...), of the shape that the tap returns.
    """

    chosen: jax.Array
    value: jax.Array


@dataclasses.dataclass(frozen=True)
class Observe:
    """What a forward pass returns and keeps besides its result, and what it replaces.

    Attributes:
      taps: names of intermediate values to return.
      swaps: replacements of intermediate values, by name.
      collect: further observations, names from `COLLECTED`.
      remat: 'none' keeps every activation for the backward pass, 'full' recomputes each layer, but
        not attention within it (except latent attention).

    Raises:
      ValueError: `collect` or `remat` is none of these.
    """

    taps: tuple[str, ...] = ()
    swaps: Mapping[str, Swap] = dataclasses.field(default_factory=dict)
    collect: tuple[str, ...] = ()
    remat: str = "none"

    def __post_init__(self):
        if not {*self.collect} <= {*COLLECTED}:
            raise ValueError(f"collect is {self.collect!r}; write some of {', '.join(COLLECTED)}")
        if self.remat not in REMAT:
            raise ValueError(f"remat is {self.remat!r}; write one of {', '.join(REMAT)}")


NOTHING = Observe()


def tap(
    module: nn.Module,
    name: str,
    value: jax.Array,
    view: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Returns `value`, or its replacement by a swap; records `value` if this pass records taps.

    Args:
      module: Flax module whose `__call__` calls this.
      name: name of the value within the module.
      value: (B, T, ...).
      view: function of the value whose result is recorded instead, in the same shape (the value
        after quantisation, for example).
    """
    if module.is_mutable_collection(TAPS):
        module.sow(TAPS, name, view(value) if view else value, _last, lambda: None)
    if module.has_variable(SWAPS, name):
        swap: Swap = module.get_variable(SWAPS, name)
        value = _swapped(swap.chosen, swap.value.astype(value.dtype), value)
    return value


def watched(module: nn.Module) -> bool:
    """Returns whether this pass records taps or has swaps."""
    return module.is_mutable_collection(TAPS) or SWAPS in module.variables


@jax.custom_vjp
def _swapped(chosen: jax.Array, given: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.where(chosen, given, value)


def _swapped_forward(chosen, given, value):
    return _swapped(chosen, given, value), None


def _swapped_backward(residual, cotangent):
    return None, cotangent, cotangent


_swapped.defvjp(_swapped_forward, _swapped_backward)


def _last(_, new):
    return new


def by_name(collected: dict, runs: Iterable[LayerGroup]) -> dict[str, jax.Array]:
    """Returns {name: value} of a Flax collection, with runs of layers joined along the first axis.

    Layers without a value (dense ones among layers with experts) get zeros.
    """
    flat = {"/".join(path): value for path, value in traverse_util.flatten_dict(collected).items()}
    runs = list(runs)
    found: dict[str, dict[str, jax.Array]] = {}
    for run in runs:
        for path, value in flat.items():
            if path.startswith(run.name + "/"):
                found.setdefault(path.removeprefix(run.name + "/"), {})[run.name] = value

    def join(parts: dict[str, jax.Array]) -> jax.Array:
        like = next(iter(parts.values()))

        def part(run: LayerGroup) -> jax.Array:
            layers = run.span.stop - run.span.start
            return parts.get(run.name, jnp.zeros((layers, *like.shape[1:]), like.dtype))

        return jnp.concatenate([part(run) for run in runs])

    names = tuple(run.name + "/" for run in runs)
    outside = {path: value for path, value in flat.items() if not path.startswith(names)}
    return {name: join(parts) for name, parts in found.items()} | outside


def by_module(swaps: Mapping[str, Swap], runs: Iterable[LayerGroup]) -> dict:
    """Returns the Flax collection that holds `swaps`: the inverse of `by_name`."""
    flat = {}
    for name, swap in swaps.items():
        if name in MODEL_TAPS:
            flat[tuple(name.split("/"))] = swap
            continue
        for run in runs:
            part = jax.tree.map(lambda x, run=run: x[run.layers], swap)
            flat[(run.name, *name.split("/"))] = part
    return traverse_util.unflatten_dict(flat)


MODEL_TAPS = ("embed", "norm/output")
# Values that a replay of the rollout's routing swaps: experts in the order of slots, and weights.
ROUTING = ("router_experts", "router_weights")
# Not a tap: sampler and learner compute it from the forward pass, (B, R, V) float32 at the
# response's slots.
LOGITS = "logits"


def batch_axis(name: str) -> int:
    """Returns the batch axis of a recorded value; values of the layers have a leading L axis."""
    return 0 if name in (*MODEL_TAPS, LOGITS) else 1
