"""The feed-forward half of a decoder layer: a gated MLP, or experts with or without shared ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8rl_jax.models.activations import gated_activation
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.layers import linears, tap_activation
from fp8rl_jax.models.moe import Experts, moe_forward
from fp8rl_jax.models.parallel.columns import gather_or_slice, shared_input
from fp8rl_jax.models.parallel.experts import exchange_forward
from fp8rl_jax.models.parallel.mesh import Parallel
from fp8rl_jax.models.router import (
    Router,
    expert_tokens,
    router_logits,
    routing_weights,
    select_experts,
    sum_probability,
)
from fp8rl_jax.models.taps import tap
from fp8rl_jax.quant import Activation, Recipe
from fp8rl_jax.quant.products import plus


def gated_mlp(
    module: nn.Module,
    config: ModelConfig,
    recipe: Recipe,
    parallel: Parallel,
    x: Activation,
    width: int,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Computes ``down(f(gate x) * up x)``, f the model's activation, with three linear layers as
    children of `module`.

    Args:
      module: Flax module whose compact `__call__` calls this.
      config: shapes.
      recipe: numerics of the layer.
      parallel: the devices that share the layer.
      x: (B, T, D) in the compute dtype.
      width: number of hidden features.
      residual: (B, T, D) to which the result is added, or None.

    Returns:
      (B, T, D) in the compute dtype.
    """
    hidden = x.shape[-1]
    features = dict.fromkeys(("gate_proj", "up_proj"), width)
    x = shared_input(x, recipe, features, parallel.tensor)
    gate, up = linears(module, config, recipe, parallel, ["gate_proj", "up_proj"], x)
    up = gather_or_slice(up, gate.shape[-1])
    quantise = gate.shape[-1] == width  # only if this device holds all features
    gated = gated_activation(recipe, config.hidden_act, quantise, gate, up)
    gated = tap_activation(module, "gated", gated)
    (down,) = linears(module, config, recipe, parallel, ["down_proj"], gated, residual)
    return gather_or_slice(down, hidden)


class SharedExperts(nn.Module):
    """Experts that every token uses, as one gated MLP (DeepSeekMoE, arXiv:2401.06066).

    Replicated over the devices of the axis `tensor`.
    """

    config: ModelConfig
    recipe: Recipe
    parallel: Parallel

    @nn.compact
    def __call__(self, x: Activation) -> jax.Array:
        """Maps (B, T, D) to (B, T, D), in the compute dtype."""
        config = self.config
        width = config.n_shared_experts * config.moe_intermediate_size
        whole = dataclasses.replace(self.parallel, tensor=1)  # every device has all columns
        return gated_mlp(self, config, self.recipe, whole, x, width)


def sparse_mlp(
    module: nn.Module,
    config: ModelConfig,
    recipe: Recipe,
    parallel: Parallel,
    x: Activation,
    valid: jax.Array,
    collect: Collection[str],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs each token's routed experts, and adds the shared experts if the model has any.

    Args:
      module, config, recipe, parallel, x: as for `gated_mlp`.
      valid: (B, T) bool, tokens to count; others have no routed experts.
      collect: as for `forward`.

    Returns:
      (y, aux): y (B, T, D) in the compute dtype; aux {'expert_tokens': (E,) int32, tokens of each
      expert} and, if in `collect`, 'expert_probability': (E,) float32, `sum_probability`.
    """
    router = Router(config, parallel, name="router")()
    experts = Experts(config, parallel, name="experts")()
    own_rows = parallel.by_own_rows  # every device sorts and multiplies its own rows
    product = functools.partial(router_logits, implementation=recipe.kernels)
    logits = own_rows(product, x.value, shared=(router.kernel, router.bias))
    logits = tap(module, "router_logits", logits)
    select = functools.partial(select_experts, config)
    chosen = tap(module, "router_experts", own_rows(select, logits, shared=(router.correction,)))
    weights = own_rows(functools.partial(routing_weights, config), logits, chosen)
    weights = tap(module, "router_weights", weights)
    split = parallel.expert_devices(config) > 1
    run = functools.partial(exchange_forward if split else moe_forward, config, recipe)
    spec = parallel.expert_spec(config)
    computed = jnp.where(valid[..., None], chosen, config.num_experts)
    y = own_rows(run, x.value, weights, computed, shared=(experts,), spec=spec)
    y = tap(module, "experts_output", y)
    if config.n_shared_experts:
        shared_experts = SharedExperts(config, recipe, parallel, name="shared_experts")
        y = plus(y, shared_experts(x), recipe)
    aux = {"expert_tokens": expert_tokens(config, chosen, valid)}
    if "expert_probability" in collect:
        aux["expert_probability"] = sum_probability(config, logits, valid)
    return y, aux
