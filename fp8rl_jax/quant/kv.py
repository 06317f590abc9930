"""Quantisation of stored keys and values, and of queries under FP8 attention.

The sampler's cache and the learner's attention both go through `quantize_kv`, so the learner sees
exactly the keys that the rollout read. Under 'dynamic' a scale belongs to one (token, head): no
calibration, nothing that can be stale, and no dependence on the rest of the batch. Under
'calibrated' there is one scale per layer and tensor, measured after each update on that step's own
sequences (rollout/refit.py) and frozen until the next. These scales are an entry of the scaling
state, from where `quantize_params` takes them into the weights: each layer's into its attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import by_platform, fp8_max, gpu_kernels, round_bf16
from fp8rl_jax.quant import scaling
from fp8rl_jax.quant.operands import compute_value
from fp8rl_jax.quant.qarray import E4M3, QArray, block_health, cast_at_scale, quantize_with
from fp8rl_jax.quant.recipe import Recipe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVScales:
    """Calibrated dequantisation scales, stacked over layers.

    Attributes:
      q, k, v: (L,) float32, ``value ~ stored * scale``; NaN before the first calibration, so that
        a missing scale can never pass for 1.0.
      step: () int32, RL steps finished when the weights were calibrated; -1 before the first.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    step: jax.Array


_ENTRY = "kv_scales"  # of a scaling state
# Names of a layer's own scales, () float32, in the parameters of its attention.
LAYER_SCALES = {"q": "q_scale", "k": "k_scale", "v": "v_scale"}


def of_sites(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a scaling state without the scales of keys and values."""
    return {name: value for name, value in scaling.items() if name != _ENTRY}


def scales_in(scaling: Mapping[str, Any]) -> KVScales | None:
    """Returns the scales of keys and values in a scaling state, if it has any."""
    return scaling.get(_ENTRY)


def with_scales(scaling: Mapping[str, Any], scales: KVScales | None) -> dict[str, Any]:
    """Returns a scaling state with these scales of keys and values; None for none."""
    return of_sites(scaling) | ({} if scales is None else {_ENTRY: scales})


def is_fresh(scaling: Mapping[str, Any], step: int) -> bool:
    """Returns whether a scaling state has no `KVScales`, or those of the weights after RL step
    `step`. Sampling with older scales could clip keys and values without any error."""
    scales = scales_in(scaling)
    return scales is None or int(scales.step) == step


def layer_scales(attention: Mapping[str, Any], recipe: Recipe) -> dict[str, jax.Array]:
    """Returns the scales {'q' | 'k' | 'v': ()} in the parameters of a layer's attention; {} for a
    recipe that is not calibrated.

    Raises:
      ValueError: the recipe is calibrated, and the weights have no scales.
    """
    if not recipe.calibrates:
        return {}
    if not {*LAYER_SCALES.values()} <= {*attention}:
        raise ValueError(
            f"recipe {recipe.name!r} stores K and V with calibrated scales, which these weights "
            "lack: refit with a scaling state that has them (make_calibrate)"
        )
    return {name: attention[key] for name, key in LAYER_SCALES.items()}


def missing_scales(layers: int) -> KVScales:
    """Returns the scales before the first calibration: NaN."""
    # Three arrays: a train state is donated, and one buffer cannot be donated twice.
    q, k, v = (jnp.full((layers,), jnp.nan, jnp.float32) for _ in range(3))
    return KVScales(q, k, v, jnp.int32(-1))


def calibrated_scales(amax: dict[str, jax.Array], margin: float, step: jax.Array) -> KVScales:
    """Returns scales from per-layer amaxes (L,) of q, k and v: ``amax * margin / 448``.

    An amax of 0 counts as 1; a NaN or infinite amax gives NaN.
    """

    def scale(a: jax.Array) -> jax.Array:
        a = jnp.where(a == 0, 1.0, a) * jnp.float32(margin)
        return 1.0 / lax.optimization_barrier(scaling.multiplier(a, fp8_max(E4M3)))

    return KVScales(scale(amax["q"]), scale(amax["k"]), scale(amax["v"]), step)


def quantize_kv(
    x: jax.Array, recipe: Recipe, name: str, scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Converts keys, values or queries to the form that attention reads.

    Args:
      x: (..., H, Dh), after QK-norm and RoPE.
      recipe: recipe of the rollout or the learner.
      name: what x is: 'q', 'k' or 'v' (latents: 'k').
      scale: () float32, this layer's calibrated scale, for recipes with kv='calibrated'.

    Returns:
      (stored, scale): in `recipe.stored_dtype(name)`, and float32 scales (..., H) or the given ();
      if that is None, x in the compute dtype, and None.

    Raises:
      ValueError: the recipe is calibrated and no scale is given.
    """
    dtype = recipe.stored_dtype(name)
    if dtype is None:
        return compute_value(x, recipe), None
    if recipe.calibrates and scale is None:
        raise ValueError(
            f"recipe {recipe.name!r} stores K and V with calibrated scales: pass this layer's"
        )

    def plain(x, scale):
        x = round_bf16(x)
        if recipe.kv == "dynamic":
            q = quantize_with(x, (-1,), dtype, recipe.kv_policy)[0]
            return q.qvalue, q.scale[..., 0]
        s = lax.optimization_barrier(1.0 / scale)
        return cast_at_scale(x.astype(jnp.float32), s, dtype), scale

    kind = kept_by_kernel(recipe)
    if kind is None:
        return plain(x, scale)

    def kernel(x, scale):
        rows = x.reshape(1, 1, -1, x.shape[-1])
        given = scale if recipe.calibrates else None
        q, s = gpu_kernels().attention_inputs.quantize(rows, given, kind["power_of_two"], dtype)
        return q.reshape(x.shape), s.reshape(x.shape[:-1]) if given is None else given

    return by_platform(recipe.kernels, kernel, plain, x, scale)


def kept_by_kernel(recipe: Recipe) -> dict | None:
    """Returns how the kernels keep q, k and v under a recipe (`kernels.gpu.attention_inputs.Kept`);
    None where they cannot: a scaling policy of 'dynamic' that is not theirs."""
    if recipe.kv == "dynamic" and not scaling.never_saturates(recipe.kv_policy):
        return None
    by = "given" if recipe.calibrates else "row"
    kept = {name: "none" if recipe.stored_dtype(name) is None else by for name in "qkv"}
    powers = recipe.kv == "dynamic" and recipe.kv_policy != scaling.dynamic()
    return kept | {"power_of_two": powers}


def kv_health(
    x: jax.Array, stored: jax.Array, scale: jax.Array, recipe: Recipe
) -> dict[str, jax.Array]:
    """Returns `block_health` of the results (stored, scale) of `quantize_kv` for `x`."""
    if scale.ndim == 0:
        whole = jnp.broadcast_to(scale, (1,) * x.ndim)
        return block_health(x, QArray(stored, whole, (-1,) * x.ndim))
    q = QArray(stored, scale[..., None], (-1,))
    return block_health(x, q, saturable=not scaling.never_saturates(recipe.kv_policy))
