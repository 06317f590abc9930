"""The one forward function. Learner, prefill and decode call it; there is no other.

Layers are stacked and run under a scan. It is pure: parameters, tokens, positions, cache and
rotary tables are arguments; the new cache is part of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import by_platform, gpu_kernels, kept, prevent_fma, resolve
from fp8rl_jax.models.arrays import BIAS, GAIN, LINEAR, role_of
from fp8rl_jax.models.attention import KEPT
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.decoder_layer import DecoderLayer, PerLayer
from fp8rl_jax.models.kv_cache import KVCache, PagedCache, run_cache
from fp8rl_jax.models.layers import StackedLayer, kernel_init, norm_of
from fp8rl_jax.models.logprobs import head_logits, output_head
from fp8rl_jax.models.packing import Packed
from fp8rl_jax.models.parallel.columns import split_columns
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE, Parallel, check_context
from fp8rl_jax.models.rope import rope_tables
from fp8rl_jax.models.stacks import (
    LayerGroup,
    layer_groups,
    layer_spec,
    layer_stacks,
    layer_windows,
    path_of,
)
from fp8rl_jax.models.taps import (
    NOTHING,
    ROUTING,
    SWAPS,
    TAPS,
    Observe,
    by_module,
    by_name,
    tap,
    watched,
)
from fp8rl_jax.models.tokens import Tokens
from fp8rl_jax.quant import BoundWeight, Recipe, compute_value, get_recipe, is_weight, take_layer
from fp8rl_jax.quant.varying import varying_vjp

# Attention's gradients do not need its result, and what follows is recomputed from it. A latent
# result is not kept: it is many times as large as a layer's input.
_KEEPS_ATTENTION = jax.checkpoint_policies.save_only_these_names(KEPT)


@flax.struct.dataclass
class ForwardOutput:
    """Result of `forward` and `hidden_states`.

    Attributes:
      logits: (B, T, V) float32, or None of `hidden_states`.
      hidden: (B, T, D) after the final norm, in the compute dtype.
      cache: the given KVCache or PagedCache with the new keys and values, or None.
      aux: dict of observations, see below.

    `aux` holds::

        finite: (L,) bool, whether each layer's output holds only finite numbers (always)
        expert_tokens: (S, E) int32, tokens without padding of each expert in the S layers that
          have experts (models with experts)
        taps: {name: (L, B, T, ...), or (B, T, ...) outside the layers} (with taps)
        kv_health: {count name: (L,) float32}, losses in quantising what the cache stores (and
          q under FP8 attention) (if collected and the recipe quantises the cache)
        kv_amax: {'q' | 'k' | 'v' | 'latent': (L, B) float32} (if collected)
        expert_probability: (S, E) float32, `router.sum_probability` of the tokens without
          padding (if collected, models with experts)
    """

    logits: jax.Array | None
    hidden: jax.Array
    cache: Any
    aux: dict


class Transformer(nn.Module):
    """Embedding, a scan over `DecoderLayer`, final norm; the head is applied outside.

    Each run of layers is one scan (models/stacks.py). With `Parallel.uses_shard_map` the module
    runs within `split_columns`, on parameters that exist already.
    """

    config: ModelConfig
    recipe: Recipe
    parallel: Parallel = ONE_DEVICE
    remat: str = "none"
    collect: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, tokens, cache, positions, cos, sin, valid):
        config = self.config
        init = nn.initializers.normal(config.embedding_init_std)
        shape = (config.vocab_size, config.hidden_size)
        table = self.parallel.replicate(self.param("embed_tokens", init, shape))
        rows = _embed(table, tokens, self.recipe.kernels, self.parallel)
        x = compute_value(rows, self.recipe)
        if config.scale_embeddings:
            factor = jnp.asarray(math.sqrt(config.hidden_size), x.dtype).astype(jnp.float32)
            x = compute_value(prevent_fma(x.astype(jnp.float32) * factor), self.recipe)
        x = tap(self, "embed", x)
        stored_runs = []
        auxes = []
        windows = layer_windows(config)
        for index, run in enumerate(layer_groups(layer_stacks(config), self.recipe)):
            settings = (
                config,
                run.recipe,
                self.parallel,
                layer_spec(config, run.stack),
                self.collect,
            )
            layers = run.span.stop - run.span.start
            carried = x, run_cache(cache, index, layers)
            reach = None if windows is None else jnp.asarray(windows[run.layers])
            if cache is not None and not watched(self):  # taps need modules; the bits are the same
                layer = DecoderLayer(*settings, parent=None)
                by_kernel = resolve(run.recipe.kernels) != "reference"
                named = self.variables["params"][run.name]
                carried, aux = _scan_in_place(
                    layer, by_kernel, named, reach, carried, positions, cos, sin, valid
                )
            else:
                number = None if cache is None else jnp.arange(layers, dtype=jnp.int32)
                carried, aux = self._scan(settings, run)(
                    carried, PerLayer(number, reach), positions, cos, sin, valid
                )
            x, written = carried
            stored_runs.append(None if written is None else written.stored)
            auxes.append(aux)
        x = norm_of(config, self.recipe, self.parallel)(name="norm")(x).value
        if not config.tie_word_embeddings and self.is_initializing():
            self.param("lm_head", kernel_init(), shape[::-1])
        if cache is not None:
            cache = dataclasses.replace(cache, runs=tuple(stored_runs))
        return x, cache, _join(auxes)

    def _scan(self, settings: tuple, run: LayerGroup) -> nn.Module:
        """Returns a module that scans a run of layers over stacked parameters."""
        layer = DecoderLayer
        if self.remat == "full":
            layer = nn.remat(layer, prevent_cse=False, policy=_KEEPS_ATTENTION)
        return nn.scan(
            layer,
            variable_axes={"params": 0, TAPS: 0, SWAPS: 0},
            split_rngs={"params": True},
            in_axes=(0,) + (nn.broadcast,) * 4,
            length=run.span.stop - run.span.start,
            # The check traces without shard_map's types of values that vary over devices.
            check_constancy_invariants=not self.parallel.inside,
        )(*settings, name=run.name)


def _scan_in_place(layer: DecoderLayer, by_kernel: bool, stack, windows, carried, *others):
    """Scans layers like `Transformer._scan`, with a cache and without copies of the weights.

    With `by_kernel`, kernels read linear layers and norms in their stack (`StackedLayer`). Other
    arrays are sliced as bits, because XLA:CPU slices bf16 in a scan through float32. `windows` are
    those of all layers, or None; the arguments after it, and the result, are those of the scanned
    module.
    """

    def step(carried, window):
        # Counted here: an index to scan would be one more array to slice in every layer.
        index, carried = carried

        def one(path, leaf):
            role = role_of(path_of(path))
            if role in (GAIN, BIAS) or (role == LINEAR and not isinstance(leaf, BoundWeight)):
                return StackedLayer(leaf, index)
            return take_layer(leaf, index)

        if by_kernel:
            params = jax.tree_util.tree_map_with_path(one, stack, is_leaf=is_weight)
        else:
            params = kept(take_layer(stack, index))
        carried, aux = layer.apply({"params": params}, carried, PerLayer(index, window), *others)
        return (index + 1, carried), aux

    count = jax.tree.leaves(stack)[0].shape[0]
    (_, carried), aux = lax.scan(step, (jnp.int32(0), carried), windows, length=count)
    return carried, aux


def _join(auxes: list[dict]) -> dict:
    """Concatenates observations of runs of layers; a run may lack some of the names."""
    names = {name: None for aux in auxes for name in aux}
    found = {name: [aux[name] for aux in auxes if name in aux] for name in names}
    return {n: jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts) for n, parts in found.items()}


@functools.partial(varying_vjp, static=2)
def _lookup(
    implementation: str, parallel: Parallel, value: jax.Array, master: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Returns rows `tokens` of `value`; the gradient goes to `master`, added up in float32."""
    return value[tokens]


def _lookup_forward(implementation, parallel, value, master, tokens):
    return value[tokens], (jnp.zeros((0,), master.dtype), master.shape, tokens)


def _lookup_backward(implementation, parallel, residual, cotangent):
    like, shape, tokens = residual

    def kernel(tokens, cotangent):
        rows = cotangent.reshape(-1, shape[1])
        return gpu_kernels().embedding.embedding_gradient(tokens.reshape(-1), rows, shape[0])

    def plain(tokens, cotangent):  # of all rows on every device, in one order on any mesh
        tokens, cotangent = parallel.replicate((tokens, cotangent))
        return jnp.zeros(shape, jnp.float32).at[tokens].add(cotangent.astype(jnp.float32))

    grad = by_platform(implementation, kernel, plain, tokens, cotangent)
    return None, grad.astype(like.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def _embed(
    table: jax.Array | BoundWeight, tokens: jax.Array, implementation: str, parallel: Parallel
) -> jax.Array:
    if isinstance(table, BoundWeight):
        return _lookup(implementation, parallel, table.value, table.master, tokens)
    return table[tokens]


def hidden_states(
    params,
    tokens: Tokens,
    config: ModelConfig,
    recipe: Recipe | str,
    *,
    cache: KVCache | PagedCache | None = None,
    parallel: Parallel = ONE_DEVICE,
    observe: Observe = NOTHING,
) -> ForwardOutput:
    """Runs the decoder up to the output head; arguments and errors are those of `forward`."""
    check_context(parallel)
    assert cache is None or not isinstance(tokens.places, Packed)
    recipe = get_recipe(recipe)
    tables = tokens.rope or rope_tables(
        config, tokens.ids.shape[1] if cache is None else cache.slots
    )
    cos, sin = (jnp.asarray(table)[tokens.positions] for table in tables)
    by_shard_map = parallel.uses_shard_map(recipe)
    if by_shard_map and not {*observe.taps, *observe.swaps} <= {*ROUTING}:
        raise ValueError(
            "intermediate values but the routers' are sharded where mesh.tensor is above 1, and "
            "where GPU kernels run on several devices: set mesh.tensor to 1, or use one device"
        )
    inner = parallel.within() if by_shard_map else parallel
    module = Transformer(config, recipe, inner, observe.remat, observe.collect)
    runs = layer_groups(layer_stacks(config), recipe)

    variables = {"params": params}
    if observe.swaps:
        variables[SWAPS] = by_module(observe.swaps, runs)

    def apply(variables, ids, cache, places, cos, sin, valid) -> tuple:
        run = functools.partial(module.apply, variables, ids, cache, places, cos, sin, valid)
        if not observe.taps:
            return *run(), {}
        (hidden, cache, aux), collected = run(mutable=[TAPS])
        values = by_name(collected[TAPS], runs)
        return hidden, cache, aux, {name: values[name] for name in observe.taps if name in values}

    if by_shard_map:
        apply = split_columns(apply, config, recipe, parallel)
    hidden, cache, aux, tapped = apply(
        variables, tokens.ids, cache, tokens.places, cos, sin, tokens.valid
    )
    if observe.taps:
        aux = aux | {"taps": tapped}
    return ForwardOutput(None, hidden, cache, aux)


def forward(
    params,
    tokens: Tokens,
    config: ModelConfig,
    recipe: Recipe | str,
    *,
    cache: KVCache | PagedCache | None = None,
    parallel: Parallel = ONE_DEVICE,
    observe: Observe = NOTHING,
) -> ForwardOutput:
    """Runs the decoder and its output head on tokens (B, T); `hidden_states` leaves the head out.

    Args:
      params: parameter tree: float32 masters (under recipes without stateful policies or segments
        of layers), the result of `quantize_params`, or of `trainable_params`. All three give the
        same bits.
      tokens: with their positions and rotary tables.
      config: shapes.
      recipe: numerics of this side, a Recipe or its name.
      cache: keys and values so far; None attends within `tokens` alone (the learner).
      parallel: the devices that share the computation; the bits are the same on any.
      observe: further results, in `ForwardOutput.aux`, and replacements; see models/taps.py.

    Raises:
      ValueError: `params` lack scales that the recipe needs, taps or swaps name sharded values, or
        `jax.set_mesh` set a mesh that `parallel` lacks.
    """
    recipe = get_recipe(recipe)
    out = hidden_states(
        params, tokens, config, recipe, cache=cache, parallel=parallel, observe=observe
    )
    rows = out.hidden.reshape(-1, out.hidden.shape[-1])
    logits = head_logits(rows, output_head(params, config, parallel), recipe, parallel)
    return dataclasses.replace(out, logits=logits.reshape(*tokens.ids.shape, -1))
