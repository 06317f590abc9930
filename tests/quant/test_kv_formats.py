"""Formats of stored K and V: the definition of INT8, one for each of both, what recipes say of it.

Proven: INT8 against numpy, element by element; what never may be a plausible byte; that recipes
which store the same are equal. Not here: attention over them (tests/kernels), zero drift
(tests/drift/test_drift_space.py).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import kv_formats
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.config import load_config
from fp8rl_jax.config.precision import side_recipe
from fp8rl_jax.quant import Recipe, gemm_table, get_recipe, kv_health, quantize_kv, static
from fp8rl_jax.quant.qarray import E4M3, INT8


def _keys(seed: int = 0) -> np.ndarray:
    """(40, 3, 64) float32; rows of every size, one of zeros."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-30, 30, (40, 3, 1)))
    keys = (rng.standard_normal((40, 3, 64)) * sizes).astype(np.float32)
    keys[7, 1] = 0
    return keys


def test_int8_is_numpys():
    """scale = amax / 127 of the bf16 values, which are rounded to the nearest multiple, ties to
    even. Both quotients are float32's."""
    x, recipe = _keys(), kv_formats.RECIPES["int8"]
    stored, scale = exact_jit(lambda x: quantize_kv(x, recipe, "k"))(x)
    assert stored.dtype == INT8 and scale.dtype == jnp.float32 and scale.shape == x.shape[:2]
    value = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    amax = np.abs(value).max(-1, keepdims=True)
    multiplier = np.float32(127) / np.where(amax == 0, np.float32(1), amax)
    multiplier = np.where(amax == 0, np.float32(1), multiplier)
    np.testing.assert_array_equal(stored, np.rint(value * multiplier).astype(np.int8))
    np.testing.assert_array_equal(scale, (np.float32(1) / multiplier)[..., 0])
    assert np.abs(np.asarray(stored)).max() == 127
    # Two-sided: half a step of the largest, of which the values take up a third or so.
    error = np.asarray(stored) * np.asarray(scale)[..., None] - value
    relative = np.sqrt((error**2).mean(-1) / np.maximum((value**2).mean(-1), 1e-30))
    assert 0.004 < np.median(relative) < 0.008


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(bad):
    """INT8 has no NaN: the row's scale is one, and no other row sees it."""
    x, recipe = _keys(), kv_formats.RECIPES["int8"]
    x[3, 2, 5] = bad
    stored, scale = exact_jit(lambda x: quantize_kv(x, recipe, "v"))(x)
    assert np.isnan(scale[3, 2]) and np.isfinite(np.delete(scale, 3, 0)).all()
    counts = jax.jit(lambda x, q, s: kv_health(x, q, s, recipe))(x, stored, scale)
    assert counts["nonfinite_blocks"] == 1 and counts["elements"] == x.size


def test_each_has_its_format():
    """The query stays; K and V go their own ways, one of them in the compute dtype."""
    x = jnp.asarray(_keys())
    for name, recipe in kv_formats.RECIPES.items():
        for part, kind in zip("kv", name.split("_") * (1 + ("_" not in name)), strict=True):
            stored, scale = quantize_kv(x, recipe, part)
            wanted = {"int8": INT8, "fp8": E4M3, "bf16": jnp.dtype(jnp.bfloat16)}[kind]
            assert stored.dtype == wanted and (scale is None) == (kind == "bf16")
        assert recipe.stored_dtype("q") is None and recipe.kv_quantized


def test_recipes_that_store_the_same_are_equal():
    fp8, bf16 = get_recipe("fp8"), get_recipe("bf16")
    neither = dataclasses.replace(fp8, k_dtype=None, v_dtype=None)
    assert neither == dataclasses.replace(fp8, kv="none")
    assert neither == dataclasses.replace(get_recipe("fp8_linear"), name=fp8.name)
    off = dataclasses.replace(kv_formats.int8(), kv="none", name=fp8.name)
    assert off == neither
    assert dataclasses.replace(bf16, kv="dynamic").stored_dtype("v") == E4M3


def test_what_a_recipe_says():
    rows = {row["operand"]: row for row in gemm_table(kv_formats.int8_fp8())}
    assert (rows["k"]["format"], rows["v"]["format"]) == ("INT8", "E4M3")
    assert rows["k"]["block"] == rows["v"]["block"] == "token, kv head"
    assert "K INT8, V E4M3, one scale per (token, kv head)" in str(kv_formats.int8_fp8())
    assert "INT8, one scale per (token, kv head)" in str(kv_formats.int8())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"k_dtype": jnp.dtype(jnp.float8_e5m2)}, ["k_dtype", "E4M3, INT8 or None"]),
        ({"v_dtype": INT8, "kv": "calibrated"}, ["calibrated scales", "kv='dynamic'"]),
        ({"v_dtype": None, "kv": "calibrated"}, ["calibrated scales", "kv='dynamic'"]),
        ({"k_dtype": INT8, "kv_policy": static(8.0)}, ["INT8", "no NaN", "kv_policy=dynamic()"]),
        ({"k_dtype": INT8, "fp8_attention": True}, ["FP8 attention needs K and V in E4M3"]),
        ({"v_dtype": None, "fp8_attention": True}, ["FP8 attention needs K and V in E4M3"]),
    ],
)
def test_refused(fields, words):
    with pytest.raises(UserError) as refusal:
        Recipe("mine", **fields)
    assert all(word in str(refusal.value) for word in words), refusal.value


_CACHE = {
    "bf16": ("none", E4M3, E4M3),
    "fp8": ("dynamic", E4M3, E4M3),
    "fp8_calibrated": ("calibrated", E4M3, E4M3),
    "int8": ("dynamic", INT8, INT8),
    "k=int8,v=fp8": ("dynamic", INT8, E4M3),
    " v = bf16, k = fp8": ("dynamic", E4M3, None),
    "k=bf16,v=bf16": ("none", E4M3, E4M3),
}


@pytest.mark.parametrize("text", _CACHE)
@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_the_field(text, name):
    """`precision.kv_cache` sets both sides, whatever the recipe."""
    precision = load_config("tiny_arithmetic").precision
    precision.rollout, precision.kv_cache = name, text
    recipe = side_recipe(precision, "rollout", 4)
    assert (recipe.kv, recipe.k_dtype, recipe.v_dtype) == _CACHE[text]
    assert recipe.quantized == (name == "fp8")


def test_the_headroom_of_calibrated_scales():
    precision = load_config("tiny_arithmetic").precision
    for text, margin in {"fp8_calibrated": 1.05, "fp8_calibrated(margin=1.5)": 1.5}.items():
        precision.kv_cache = text
        recipe = side_recipe(precision, "rollout", 4)
        assert recipe.calibrates and recipe.kv_margin == margin


@pytest.mark.parametrize(
    "text",
    ["", "int4", "k=int8", "k=int8,v=", "k=int8,k=fp8", "k=int8,v=fp8,q=fp8", "k:int8,v:fp8"],
)
def test_a_field_that_is_not_understood(text):
    precision = load_config("tiny_arithmetic").precision
    precision.kv_cache = text
    with pytest.raises(UserError, match=r"^precision\.kv_cache: .*'k=int8,v=fp8'"):
        side_recipe(precision, "rollout", 4)
