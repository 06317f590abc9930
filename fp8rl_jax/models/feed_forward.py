"""The feed-forward half of a decoder layer: a gated MLP, or experts with or without shared ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8rl_jax.models.activations import gated_activation
from fp8rl_jax.models.layers import Part, linears, tap_activation
from fp8rl_jax.models.moe import Experts, moe_forward
from fp8rl_jax.models.parallel.columns import gather_or_slice, shared_input
from fp8rl_jax.models.parallel.experts import exchange_forward
from fp8rl_jax.models.router import (
    Router,
    expert_tokens,
    router_logits,
    routing_weights,
    select_experts,
    sum_probability,
)
from fp8rl_jax.models.taps import tap
from fp8rl_jax.quant import Activation
from fp8rl_jax.quant.products import plus


def gated_mlp(
    part: Part, x: Activation, width: int, residual: jax.Array | None = None
) -> jax.Array:
    """Computes ``down(f(gate x) * up x)``, f the model's activation, with three linear layers as
    children of `part`.

    Args:
      part: module whose compact `__call__` calls this.
      x: (B, T, D) in the compute dtype.
      width: number of hidden features.
      residual: (B, T, D) to which the result is added, or None.

    Returns:
      (B, T, D) in the compute dtype.
    """
    hidden = x.shape[-1]
    features = dict.fromkeys(("gate_proj", "up_proj"), width)
    x = shared_input(x, part.recipe, features, part.parallel.tensor)
    gate, up = linears(part, ["gate_proj", "up_proj"], x)
    up = gather_or_slice(up, gate.shape[-1])
    quantise = gate.shape[-1] == width  # only if this device holds all features
    gated = gated_activation(part.recipe, part.config.hidden_act, quantise, gate, up)
    gated = tap_activation(part, "gated", gated)
    (down,) = linears(part, ["down_proj"], gated, residual)
    return gather_or_slice(down, hidden)


class SharedExperts(Part):
    """Experts that every token uses, as one gated MLP (DeepSeekMoE, arXiv:2401.06066)."""

    @nn.compact
    def __call__(self, x: Activation) -> jax.Array:
        """Maps (B, T, D) to (B, T, D), in the compute dtype."""
        return gated_mlp(self, x, self.config.n_shared_experts * self.config.moe_intermediate_size)


def sparse_mlp(
    part: Part, x: Activation, valid: jax.Array, collect: Collection[str]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs each token's routed experts, and adds the shared experts if the model has any.

    Args:
      part, x: as for `gated_mlp`.
      valid: (B, T) bool, tokens to count; others have no routed experts.
      collect: as for `Observe`.

    Returns:
      (y, aux): y (B, T, D) in the compute dtype; aux {'expert_tokens': (E,) int32, tokens of each
      expert} and, if in `collect`, 'expert_probability': (E,) float32, `sum_probability`.
    """
    config = part.config
    router = Router(config, part.parallel, name="router")()
    experts = Experts(config, part.parallel, name="experts")()
    own_rows = part.parallel.by_own_rows  # every device sorts and multiplies its own rows
    product = functools.partial(router_logits, implementation=part.recipe.kernels)
    logits = own_rows(product, x.value, shared=(router.kernel, router.bias))
    logits = tap(part, "router_logits", logits)
    select = functools.partial(select_experts, config)
    chosen = tap(part, "router_experts", own_rows(select, logits, shared=(router.correction,)))
    weights = own_rows(functools.partial(routing_weights, config), logits, chosen)
    weights = tap(part, "router_weights", weights)
    split = part.parallel.expert_devices(config) > 1
    run = functools.partial(exchange_forward if split else moe_forward, config, part.recipe)
    spec = part.parallel.expert_spec(config)
    computed = jnp.where(valid[..., None], chosen, config.num_experts)
    y = own_rows(run, x.value, weights, computed, shared=(experts,), spec=spec)
    y = tap(part, "experts_output", y)
    if config.n_shared_experts:
        whole = dataclasses.replace(part.parallel, tensor=1)  # every device has all columns
        shared_experts = SharedExperts(config, part.recipe, whole, name="shared_experts")
        y = plus(y, shared_experts(x), part.recipe)
    aux = {"expert_tokens": expert_tokens(config, chosen, valid)}
    if "expert_probability" in collect:
        aux["expert_probability"] = sum_probability(config, logits, valid)
    return y, aux
