"""Three forms of one parameter tree: which bytes they hold, and that they give the same bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import decoder_oracle, quant_oracle

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import (
    ModelConfig,
    Tokens,
    checksum,
    forward,
    init_params,
    param_shapes,
    quantize_params,
    rope_tables,
    trainable_params,
    weight_health,
)
from fp8rl_jax.quant import QArray

_SHAPE = dict(
    vocab_size=50, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
_MODEL = ModelConfig(hidden_size=48, intermediate_size=96, **_SHAPE)
_TIED = dataclasses.replace(_MODEL, tie_word_embeddings=True)
# Kernels of 160 x 136 and the like: several blocks of 128, the last ones partial.
_WIDE = ModelConfig(hidden_size=160, intermediate_size=136, **_SHAPE)
_LENGTH = 12
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@functools.cache
def _params(model, seed=0):
    return decoder_oracle.random_params(param_shapes(model), seed)


def _leaves(tree):
    """{path: leaf}, QArrays whole."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, QArray))
    return {"/".join(entry.key for entry in path): leaf for path, leaf in flat}


@functools.cache
def _quantized(model, recipe):
    return exact_jit(functools.partial(quantize_params, recipe=recipe))(_params(model))


@exact_jit
def _refit(params):
    """FP8 weights, their checksum and their health, in one program."""
    weights = quantize_params(params, "fp8")
    return weights, checksum(weights), weight_health(params, weights, "fp8")


# Initialisation.


def test_init_params():
    """Names, shapes, float32, unit norms, and standard deviations of the initialisation."""
    model = ModelConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        embedding_init_std=0.5,
    )
    init = jax.jit(functools.partial(init_params, model))
    keys = [jax.random.key(seed, impl="unsafe_rbg") for seed in (0, 1)]  # compiles fast
    params = _leaves(init(keys[0]))
    attention, residual = "layers/self_attn/", 1 / np.sqrt(2 * 3)
    expected = {  # shape, standard deviation (0: constant 1)
        "embed_tokens": ((60, 64), 0.5),
        "lm_head": ((64, 60), 1 / 8),
        "norm/weight": ((64,), 0),
        "layers/input_layernorm/weight": ((3, 64), 0),
        "layers/post_attention_layernorm/weight": ((3, 64), 0),
        attention + "q_norm/weight": ((3, 8), 0),
        attention + "k_norm/weight": ((3, 8), 0),
        attention + "q_proj/kernel": ((3, 64, 32), 1 / 8),
        attention + "k_proj/kernel": ((3, 64, 16), 1 / 8),
        attention + "v_proj/kernel": ((3, 64, 16), 1 / 8),
        "layers/o_proj/kernel": ((3, 32, 64), residual / np.sqrt(32)),
        "layers/gate_proj/kernel": ((3, 64, 96), 1 / 8),
        "layers/up_proj/kernel": ((3, 64, 96), 1 / 8),
        "layers/down_proj/kernel": ((3, 96, 64), residual / np.sqrt(96)),
    }
    assert {name: leaf.shape for name, leaf in params.items()} == {
        name: shape for name, (shape, _) in expected.items()
    }
    for name, (_, deviation) in expected.items():
        leaf = np.asarray(params[name])
        assert leaf.dtype == np.float32
        if deviation:
            assert leaf.std() == pytest.approx(deviation, rel=0.08), name
            if leaf.ndim == 3:
                assert (leaf[0] != leaf[1]).any()  # every layer has its own draw
        else:
            assert (leaf == 1).all(), name
    other = _leaves(init(keys[1]))
    assert (np.asarray(other["embed_tokens"]) != np.asarray(params["embed_tokens"])).any()


def test_a_tied_model_has_no_head():
    assert "lm_head" not in _params(_TIED)
    assert set(_params(_MODEL)) - set(_params(_TIED)) == {"lm_head"}


# Quantised form.


def test_roles_under_fp8():
    """Linear layers hold the oracle's bytes and scales, tables bf16, norms the masters."""
    masters = _leaves(_params(_WIDE))
    weights = _leaves(_refit(_params(_WIDE))[0])
    assert weights.keys() == masters.keys()
    seen = set()
    for name, weight in weights.items():
        master = masters[name]
        rounded = master.astype(ml_dtypes.bfloat16)
        if name.endswith("kernel"):
            assert isinstance(weight, QArray)
            seen.add(name.split("/")[-2])
            for layer in range(2):
                codes, scale = quant_oracle.quantize_blocks(
                    rounded[layer].astype(np.float32), (128, 128)
                )
                got = np.asarray(weight.qvalue[layer]).view(np.uint8)
                np.testing.assert_array_equal(got, codes)
                np.testing.assert_array_equal(np.asarray(weight.scale[layer]), scale)
        elif name.endswith("weight"):
            assert weight.dtype == np.float32
            np.testing.assert_array_equal(weight, master)
        else:
            assert weight.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(weight).view(np.uint16), rounded.view("u2"))
    assert seen == set(_LINEAR)


@pytest.mark.parametrize("recipe", ["bf16", "f32"])
def test_roles_without_quantisation(recipe):
    """The compute dtype for linear layers and tables, float32 for norms."""
    masters = _leaves(_params(_MODEL))
    dtype = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}[recipe]
    for name, weight in _leaves(_quantized(_MODEL, recipe)).items():
        expected = masters[name]
        if not name.endswith("weight"):
            expected = expected.astype(dtype)
        assert weight.dtype == expected.dtype, name
        np.testing.assert_array_equal(np.asarray(weight), expected)


# The three forms in the forward pass.


def _inputs(model):
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, _LENGTH))
    return tokens.astype(np.int32), rope_tables(model, _LENGTH)


@functools.cache
def _program(model, recipe):
    return exact_jit(
        lambda params, tokens, rope: forward(params, Tokens.of(tokens, rope), model, recipe).logits
    )


@functools.cache
def _train_step(model, recipe):
    """Logits and gradients of a step that quantises and differentiates, as the learner does."""

    def step(params, tokens, rope):
        weights = quantize_params(params, recipe)

        def loss(params):
            paired = trainable_params(params, weights, recipe)
            logits = forward(paired, Tokens.of(tokens, rope), model, recipe).logits
            logp = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean(), logits

        return jax.grad(loss, has_aux=True)(params)

    grads, logits = exact_jit(step)(_params(model), *_inputs(model))
    return jax.device_get(grads), np.asarray(logits)


_FORMS = [
    pytest.param(_MODEL, "fp8", id="fp8", marks=pytest.mark.slow),
    pytest.param(_MODEL, "bf16", id="bf16", marks=pytest.mark.slow),
    pytest.param(_TIED, "f32", id="f32-tied", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "recipe"), _FORMS)
def test_three_forms_give_the_same_bits(model, recipe):
    """Raw masters, rollout weights, and masters paired with weights under a gradient."""
    rollout = np.asarray(_program(model, recipe)(_quantized(model, recipe), *_inputs(model)))
    assert np.isfinite(rollout).all() and rollout.std() > 0.1
    masters = _program(model, recipe)(_params(model), *_inputs(model))
    np.testing.assert_array_equal(masters, rollout)
    np.testing.assert_array_equal(_train_step(model, recipe)[1], rollout)


@pytest.mark.parametrize(("model", "recipe"), _FORMS)
def test_gradients_reach_every_master(model, recipe):
    """One float32 gradient per master, of its shape, finite, in every layer not zero."""
    grads, params = _leaves(_train_step(model, recipe)[0]), _leaves(_params(model))
    assert grads.keys() == params.keys()
    for name, grad in grads.items():
        assert grad.dtype == np.float32 and grad.shape == params[name].shape
        assert np.isfinite(grad).all(), name
        for part in grad if name.startswith("layers/") else [grad]:
            assert np.abs(part).max() > 1e-6, name
    unseen = np.setdiff1d(np.arange(model.vocab_size), _inputs(model)[0])
    if not model.tie_word_embeddings:  # a token that does not occur leaves its row alone
        assert unseen.size and not grads["embed_tokens"][unseen].any()


@pytest.mark.slow
def test_fp8_gradients_differ_from_bf16_by_rounding_only():
    """Relative error (Frobenius) of each master's gradient, within two-sided recorded bounds."""
    exact, rounded = (_leaves(_train_step(_MODEL, recipe)[0]) for recipe in ("bf16", "fp8"))
    for name, expected in exact.items():
        error = np.linalg.norm(rounded[name] - expected) / np.linalg.norm(expected)
        assert 0.04 < error < 0.25, (name, error)


def test_weights_receive_no_gradient():
    """Only the masters are trained: the paired value is a constant of the step."""
    weights = _quantized(_MODEL, "f32")

    def through_value(scale):
        scaled = jax.tree.map(lambda w: w * scale, weights)
        paired = trainable_params(_params(_MODEL), scaled, "fp8")
        return paired["lm_head"].value.sum() + paired["layers"]["o_proj"]["kernel"].value.sum()

    assert float(jax.grad(through_value)(1.0)) == 0


# Checksum.

_checksum = jax.jit(checksum)


def _small_tree():
    rng = np.random.default_rng(0)
    return {
        "bytes": rng.integers(0, 120, (3, 5)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        "halves": rng.standard_normal((4, 2)).astype(ml_dtypes.bfloat16),
        "words": [rng.standard_normal(7).astype(np.float32), np.float32(0.0)],
    }


def test_checksum_of_equal_trees():
    """Equal bytes, equal hash: copies, and one compiled with other code around it."""
    tree = _small_tree()
    copy = jax.tree.map(np.array, tree)
    assert _checksum(tree).dtype == np.uint32 and _checksum(tree).shape == ()
    assert int(_checksum(tree)) == int(_checksum(copy))
    weights, together, _ = _refit(_params(_WIDE))
    assert int(_checksum(weights)) == int(together)


def test_checksum_sees_every_bit():
    """Each single bit of each leaf changes it, and all the hashes are different."""
    tree = _small_tree()
    leaves, structure = jax.tree.flatten(tree)
    hashes = [int(_checksum(tree))]
    bits = 0
    for index, leaf in enumerate(leaves):
        raw = np.asarray(leaf).tobytes()
        for position in range(8 * len(raw)):
            changed = bytearray(raw)
            changed[position // 8] ^= 1 << position % 8
            other = np.frombuffer(bytes(changed), leaf.dtype).reshape(leaf.shape)
            flipped = [other if i == index else x for i, x in enumerate(leaves)]
            hashes.append(int(_checksum(jax.tree.unflatten(structure, flipped))))
            bits += 1
    assert bits == 8 * (15 + 16 + 28 + 4)
    assert len(set(hashes)) == len(hashes)


def test_checksum_sees_order():
    """Two values exchanged, within a leaf or between leaves, give another hash."""
    base = int(_checksum([np.float32([1, 2, 3]), np.float32([4, 5, 6])]))
    for other in (
        [np.float32([2, 1, 3]), np.float32([4, 5, 6])],
        [np.float32([4, 2, 3]), np.float32([1, 5, 6])],
        [np.float32([4, 5, 6]), np.float32([1, 2, 3])],
    ):
        assert int(_checksum(other)) != base


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_checksum_of_a_stack_is_that_of_its_words(dtype):
    """A stack, read layer by layer on a CPU, an array of one axis and numpy have one sum."""
    kinds = {"uint8": ml_dtypes.float8_e4m3fn, "uint16": ml_dtypes.bfloat16, "uint32": np.float32}
    words = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (3, 2, 5, 7), dtype)

    def mix(h):
        h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    index = np.arange(1, words.size + 1, dtype=np.uint32)
    mixed = mix(words.reshape(-1).astype(np.uint32) ^ mix(index))
    want = mix(mixed.sum(dtype=np.uint32, keepdims=True))
    stack = words.view(kinds[dtype])
    assert _checksum([stack]) == _checksum([stack.reshape(-1)]) == want


def test_checksum_of_model_weights_sees_one_bit():
    """The last byte of one FP8 kernel, one scale, one norm weight: each alone is seen."""
    weights = _refit(_params(_WIDE))[0]
    base = int(_checksum(weights))
    leaves, structure = jax.tree.flatten(weights)
    assert len(leaves) == 2 * 7 + 2 + 5  # bytes and scales, tables, norms
    for index, leaf in enumerate(leaves):
        changed = np.array(leaf)
        changed.reshape(-1).view(np.uint8)[-1] ^= 1
        flipped = [changed if i == index else x for i, x in enumerate(leaves)]
        assert int(_checksum(jax.tree.unflatten(structure, flipped))) != base


# Health.


def _health(params):
    """Counts of every site and layer, added up."""
    total = {}
    for counts in _refit(params)[2].values():
        for name, count in counts.items():
            total[name] = total.get(name, 0.0) + float(np.sum(count))
    return total


def _with_down_proj(change):
    params = jax.tree.map(np.array, _params(_WIDE))
    change(params["layers"]["down_proj"]["kernel"])
    return params


def test_weight_health_of_healthy_weights():
    """Every element of the seven linear layers counted, dynamic scales saturate nothing."""
    counts = _health(_params(_WIDE))
    elements = 2 * (160 * 64 + 2 * 160 * 32 + 64 * 160 + 3 * 160 * 136)
    assert counts["elements"] == elements
    assert counts["saturated"] == counts["nonfinite_blocks"] == 0
    underflowed = 0
    for name, master in _leaves(_params(_WIDE)).items():
        if name.endswith("kernel"):
            for layer in range(2):
                x = master[layer].astype(ml_dtypes.bfloat16).astype(np.float32)
                codes, _ = quant_oracle.quantize_blocks(x, (128, 128))
                underflowed += int(((x != 0) & (codes & 0x7F == 0)).sum())
    assert counts["underflowed"] == underflowed > 0


def test_weight_health_counts_underflow():
    """A value 1e6 times the others sends the rest of its 128x128 block to zero."""
    before = _health(_params(_WIDE))

    def plant(kernel):
        kernel[0, :128, :128] = 1e-3
        kernel[0, 5, 7] = 1e3

    after = _health(_with_down_proj(plant))
    # Block (0, 0) held a few underflows by itself; now all but the planted value are lost.
    x = _params(_WIDE)["layers"]["down_proj"]["kernel"][0, :128, :128]
    codes, _ = quant_oracle.quantize_blocks(
        x.astype(ml_dtypes.bfloat16).astype(np.float32), (128, 128)
    )
    own = int(((x != 0) & (codes & 0x7F == 0)).sum())
    assert after["underflowed"] - before["underflowed"] == 128 * 128 - 1 - own


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weight_health_counts_nonfinite_blocks(bad):
    """One bad value in each of two blocks: two blocks."""

    def plant(kernel):
        kernel[1, 3, 3] = kernel[1, 4, 4] = kernel[0, 135, 159] = bad

    assert _health(_with_down_proj(plant))["nonfinite_blocks"] == 2


def test_weight_health_without_quantised_weights():
    params = _params(_MODEL)
    assert weight_health(params, params, "bf16") == {}
