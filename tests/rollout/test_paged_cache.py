"""Keys and values in pages give the bits of a row of slots, in decode, prefill and learner.

The table of zero drift: a query behind so many keys has the same bits whether it runs alone over
pages (decode), among a chunk over pages (prefill) or among its whole sequence (learner).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_model import initial_params, quantized
from small_models import DENSE, LATENT

from fp8rl_jax import models
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import attention
from fp8rl_jax.models import PAGE, Tokens, hidden_states, init_cache, init_paged_cache
from fp8rl_jax.models.kv_cache import LayerCache, StoredKV, run_cache
from fp8rl_jax.quant import get_recipe, quantize_kv

LENGTHS = (1, 63, 64, 65, 96, 97, 127, 128, 129, 511, 512, 513)
_HEADS, _KV, _DIM = 4, 2, 32
_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def _pages(x: jax.Array, table: np.ndarray, pages: int, fill) -> jax.Array:
    """(B, S, ...) as pages, everything else `fill`."""
    batch, count = table.shape
    shape = (batch, count * PAGE - x.shape[1], *x.shape[2:])
    x = jnp.concatenate([x.astype(jnp.float32), jnp.full(shape, fill)], axis=1)
    pool = jnp.full((pages, PAGE, *x.shape[2:]), fill, jnp.float32)
    return pool.at[table].set(x.reshape(batch, count, PAGE, *x.shape[2:]))


@functools.cache
def _table(recipe_name: str, most: int) -> tuple:
    """(learner's bits, cache in pages, queries) of one sequence of `most` tokens."""
    recipe = get_recipe(recipe_name)
    rng = np.random.default_rng(0)

    def normal(heads: int) -> jax.Array:
        x = rng.standard_normal((1, most, heads, _DIM))
        return jnp.asarray(x, recipe.compute_dtype)

    q, k, v = normal(_HEADS), normal(_KV), normal(_KV)
    positions = jnp.arange(most, dtype=jnp.int32)[None]

    @exact_jit
    def learner(q, k, v):  # as `self_attention`, before it rounds
        (k, k_scale), (v, v_scale) = quantize_kv(k, recipe, "k"), quantize_kv(v, recipe, "v")
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return attention(q, k, v, positions, scale=_DIM**-0.5, **scales)

    out = np.asarray(learner(q, k, v))
    count = -(-most // PAGE)
    table = np.random.default_rng(1).permutation(count + 3)[None, :count].astype(np.int32)
    cache = {"table": jnp.asarray(table)}
    for name, x in (("k", k), ("v", v)):
        stored, scale = quantize_kv(x, recipe, "k")
        # What a former owner left, or what a padded chunk wrote: never a number that counts.
        cache[name] = _pages(stored, table, count + 3, np.nan).astype(stored.dtype)
        if scale is not None:
            cache[f"{name}_scale"] = _pages(scale, table, count + 3, np.nan)
    return out, cache, q


@functools.cache
def _over_pages():
    def run(q, positions, cache):
        cache = dict(cache)
        k, v = cache.pop("k"), cache.pop("v")
        return attention(q, k, v, positions, scale=_DIM**-0.5, **cache)

    return exact_jit(run)


def _check(recipe: str, length: int, most: int) -> None:
    learner, cache, q = _table(recipe, most)
    last = length - 1
    narrow = -(-length // PAGE)
    cache = cache | {"table": cache["table"].at[:, narrow:].set(10**8)}
    decode = _over_pages()(q[:, last:length], jnp.int32([[last]]), cache)
    np.testing.assert_array_equal(decode[0, 0], learner[0, last])
    start = max(length - 40, 0)
    positions = jnp.minimum(jnp.arange(start, start + 40), last)[None]
    prefill = _over_pages()(q[0, positions[0]][None], positions, cache)
    np.testing.assert_array_equal(prefill[0, : length - start], learner[0, start:length])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("recipe", ["f32", _SLOW("bf16"), "fp8"])
def test_decode_prefill_and_learner_are_equal(recipe, length):
    """Other pages hold NaN, and the table's other entries no page at all."""
    _check(recipe, length, max(LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f32", "bf16", "fp8"])
def test_thousands_of_keys(recipe):
    _check(recipe, 4097, 4097)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "recipe"),
    [(DENSE, "f32"), (DENSE, "fp8"), (LATENT, "f32"), (LATENT, "fp8")],
    ids=["dense f32", "dense fp8", "latent f32", "latent fp8"],
)
def test_the_whole_forward(model, recipe):
    """Prefill in two chunks and a decode step: hidden states as over rows of slots, bit for bit,
    with rows that share a page and pages of all layers in one pool."""
    recipe = get_recipe(recipe)
    weights = quantized(initial_params(model), recipe)
    rope = tuple(map(jnp.asarray, models.rope_tables(model, 192)))
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 130)).astype(np.int32)
    tokens[1, :64] = tokens[0, :64]

    @exact_jit
    def step(tokens, positions, cache):
        return hidden_states(
            weights, Tokens.of(tokens, rope, positions=positions), model, recipe, cache=cache
        )

    rows = init_cache(model, recipe, 2, 192)
    paged = init_paged_cache(model, recipe, 9, jnp.int32([[4, 7, 1], [4, 2, 8]]))
    for start, stop in ((0, 70), (70, 129), (129, 130)):
        positions = np.broadcast_to(np.arange(start, stop, dtype=np.int32), (2, stop - start))
        one, other = (step(tokens[:, start:stop], positions, c) for c in (rows, paged))
        np.testing.assert_array_equal(one.hidden, other.hidden)
        rows, paged = one.cache, other.cache
    assert paged.slots == 192 and jax.tree.leaves(paged.runs)[0].shape[0] == 18


@pytest.mark.slow
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_layer_in_the_arrays_of_all(name, paged):
    """What a kernel is given instead of one layer's arrays: the same numbers, nothing moved."""
    recipe = dataclasses.replace(get_recipe(name), kernels="triton")
    rng = np.random.default_rng(0)
    config = models.ModelConfig(97, 64, 64, 3, _HEADS, _KV, _DIM)
    if paged:
        table = jnp.int32([[6, 1, 2], [6, 4, 3]])
        made = init_paged_cache(config, recipe, 7, table)
        cache = dataclasses.replace(run_cache(made, 0, 3), layer=jnp.int32(1))
    else:
        cache = LayerCache(init_cache(config, recipe, 2, 3 * PAGE).runs[0], jnp.int32(1))
    k, v = (jnp.asarray(rng.standard_normal((2, 150, _KV, _DIM)), jnp.bfloat16) for _ in "kv")
    (k, k_scale), (v, v_scale) = (quantize_kv(x, get_recipe(name), "k") for x in (k, v))
    positions = jnp.broadcast_to(jnp.arange(150), (2, 150))
    cache = cache.write(StoredKV(k, v, k_scale, v_scale), positions)
    q = jnp.asarray(rng.standard_normal((2, 1, _HEADS, _DIM)), jnp.bfloat16)

    def attend(cache: LayerCache) -> np.ndarray:
        kv = cache.stored
        out = attention(
            q,
            kv.k,
            kv.v,
            jnp.asarray([[149], [70]]),
            scale=0.2,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            table=cache.table,
            layer=cache.layer,
            implementation="reference",
        )
        return np.asarray(out)

    whole, own = cache.as_read("triton"), cache.as_read("reference")
    assert whole.layer is not None and (own.layer is None) == paged
    if not paged:
        alone = LayerCache(jax.tree.map(lambda x: x[1], cache.stored)).as_read("reference")
        np.testing.assert_array_equal(attend(alone), attend(own))
    assert np.abs(attend(own)).max() > 0.1
    np.testing.assert_array_equal(attend(whole), attend(own))
    again = cache.with_merged(cache.merged)
    assert jax.tree.map(jnp.shape, again) == jax.tree.map(jnp.shape, cache)
