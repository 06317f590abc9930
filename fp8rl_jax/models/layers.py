"""Norm, rotary embedding, gated activation and the linear layer, with fixed rounding points.

Every operation computes in float32 and rounds once, to bf16, at its end (`compute_value`). The
forms are chosen so that a forward-only program and a train step give the same bits on XLA:CPU:
`lax.rsqrt` and never ``1 / sqrt`` (rewritten in one of the two), `guard` on every product that
feeds an addition. (Attention and log-probabilities also keep `exp` to a last axis that is a
multiple of 16, because its vector and scalar code differ; model widths usually are.)
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from fp8rl_jax.kernels import guard
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.quant import Recipe, TrainableWeight, compute_value, keep_dtypes, make_dot_general


def replicate(tree):
    """Gathers sharded weights before use, where a mesh is set (FSDP); else returns `tree`.

    Left alone, XLA's partitioner splits the contraction over devices and adds the parts in
    another order; with the weight gathered first the matmul is the one of a single device.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree

    def gather(leaf):
        if isinstance(leaf, TrainableWeight):  # the master is not read: it stays in parts
            return TrainableWeight(gather(leaf.value), leaf.master)
        whole = PartitionSpec()
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, whole), leaf)

    return jax.tree.map(gather, tree, is_leaf=lambda x: isinstance(x, TrainableWeight))


def gather_kernel(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """For Flax's `promote_dtype=`: keeps every dtype and gathers the kernel over the mesh."""
    inputs, kernel, bias = keep_dtypes(*args, dtype=dtype, inexact=inexact)
    return [inputs, replicate(kernel), bias]


def linear(recipe: Recipe, features: int, name: str, init_scale: float = 1.0) -> nn.Dense:
    """A bias-free `nn.Dense` under the recipe; kernel (in, features), std init_scale/sqrt(in)."""
    return nn.Dense(
        features,
        use_bias=False,
        kernel_init=nn.initializers.variance_scaling(init_scale**2, "fan_in", "normal"),
        dot_general=make_dot_general(recipe),
        promote_dtype=gather_kernel,
        name=name,
    )


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang & Sennrich, 1910.07467)."""

    eps: float
    recipe: Recipe

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = replicate(self.param("weight", nn.initializers.ones_init(), (x.shape[-1],)))
        x = x.astype(jnp.float32)
        mean_square = guard(x * x).sum(-1, keepdims=True) * np.float32(1 / x.shape[-1])
        inverse = lax.rsqrt(guard(mean_square) + np.float32(self.eps))
        return compute_value(x * inverse * weight, self.recipe)


def rope_tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the rotary angles, float32 (length, head_dim / 2), made once by numpy.

    Tables are arguments of every program: computed inside, XLA may fold them with another
    implementation of cos than the one it runs.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-np.arange(half) / half)
    angle = np.arange(length)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, recipe: Recipe) -> jax.Array:
    """Rotates (B, T, H, Dh) by tables (B, T, Dh/2), halves paired (Su et al., 2104.09864)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = jnp.concatenate(
        [guard(first * cos) - guard(second * sin), guard(second * cos) + guard(first * sin)], -1
    )
    return compute_value(rotated, recipe)


@jax.custom_jvp
def silu(x: jax.Array) -> jax.Array:
    """``x / (1 + exp(-x))`` in float32; the derivative is written so that it never overflows."""
    return x / (1.0 + jnp.exp(-x))


@silu.defjvp
def _silu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    sigmoid = 1.0 / (1.0 + jnp.exp(-x))
    return silu(x), dx * (sigmoid + x * sigmoid * (1.0 - sigmoid))
