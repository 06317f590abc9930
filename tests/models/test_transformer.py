"""The one forward: right against float64, the same bits whole, in chunks, padded and decoded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drift_harness import FAMILIES, Case
from oracles import decoder_oracle as oracle
from small_models import UNEVEN, UNEVEN_LATENT

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import (
    ModelConfig,
    Tokens,
    forward,
    hidden_states,
    init_cache,
    param_shapes,
    rope_tables,
)
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.quant import get_recipe

_LENGTH, _SLOTS = 70, 150
_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
_RECIPES = ["f32", "fp8", *map(_SLOW, ("bf16", "fp8_blockwise_pow2"))]


@functools.cache
def _params(model, seed=0):
    return oracle.random_params(param_shapes(model), seed)


def _tokens(model=UNEVEN, batch=2, length=_LENGTH, seed=0):
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, (batch, length))
    return tokens.astype(np.int32)


@functools.cache
def _program(recipe, model=UNEVEN):
    """(params, tokens, rope) -> logits, and whether each layer's output is finite."""

    def run(params, tokens, rope):
        out = forward(params, Tokens.of(tokens, rope), model, recipe)
        return out.logits, out.aux["finite"]

    return exact_jit(run)


def _whole(recipe, tokens, model=UNEVEN):
    """Logits without a cache, as the learner computes them."""
    return np.asarray(
        _program(recipe, model)(_params(model), tokens, rope_tables(model, _SLOTS))[0]
    )


@functools.cache
def _logits(recipe):
    return _whole(recipe, _tokens())


@functools.cache
def _expected():
    return oracle.decoder_logits(_params(UNEVEN), UNEVEN, _tokens())


# Against the oracle.


@pytest.mark.parametrize(("kv_heads", "tied"), [_SLOW(4, True), (2, False), (1, True)])
def test_float32_is_the_real_number_result(kv_heads, tied):
    """Groups of 1, 2 and 4 query heads, both heads; rows of other lengths, padded to the right."""
    model = ModelConfig(
        vocab_size=37,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        rope_theta=500.0,
        rms_norm_eps=1e-2,
        tie_word_embeddings=tied,
    )
    tokens, lengths = _tokens(model, batch=3, length=13), (13, 6, 1)
    for row, length in enumerate(lengths):
        tokens[row, length:] = 36
    logits = _whole("f32", tokens, model)
    assert logits.shape == (3, 13, 37) and logits.dtype == np.float32
    for row, length in enumerate(lengths):
        expected = oracle.sequence_logits(_params(model), model, tokens[row, :length])
        scale = np.abs(expected).max()
        assert np.abs(logits[row, :length] - expected).max() < 3e-6 * scale


def test_float32_over_several_blocks():
    """Past one chunk of keys and one block of the contraction."""
    error = np.abs(_logits("f32") - _expected()).max() / np.abs(_expected()).max()
    assert error < 3e-6


@pytest.mark.parametrize(
    ("recipe", "low", "high"),
    [_SLOW("bf16", 3e-3, 1.2e-2), ("fp8", 3e-2, 9e-2), _SLOW("fp8_blockwise_pow2", 3e-2, 9e-2)],
)
def test_rounding_error_within_recorded_bounds(recipe, low, high):
    """Relative error of the logits (root mean square), two-sided: rounding is there, and small."""
    difference = _logits(recipe) - _expected()
    error = np.sqrt((difference**2).mean() / (_expected() ** 2).mean())
    assert low < error < high


# The same bits.


@functools.cache
def _cached_program(recipe, model=UNEVEN):
    def run(params, tokens, cache, positions, rope):
        out = forward(
            params, Tokens.of(tokens, rope, positions=positions), model, recipe, cache=cache
        )
        return out.logits, out.cache

    return exact_jit(run)


def _step(recipe, tokens, cache, positions, model=UNEVEN):
    arguments = _params(model), tokens, cache, positions, rope_tables(model, _SLOTS)
    logits, cache = _cached_program(recipe, model)(*arguments)
    return np.asarray(logits), cache


def _empty_cache(recipe, model=UNEVEN):
    return init_cache(model, get_recipe(recipe), 2, _SLOTS)


@pytest.mark.parametrize("recipe", _RECIPES)
def test_prefill_in_chunks_equals_the_whole(recipe):
    """Two chunks of 35 through a cache of 150 slots against 70 tokens at once."""
    cache, parts = _empty_cache(recipe), []
    for start in (0, 35):
        positions = np.tile(np.arange(start, start + 35, dtype=np.int32), (2, 1))
        logits, cache = _step(recipe, _tokens()[:, start : start + 35], cache, positions)
        parts.append(logits)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), _logits(recipe))


@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_decoding_ragged_prompts_equals_the_whole(recipe):
    """Prompts of 35 and 20 tokens in one padded prefill, then one token at a time.

    Each row goes on at its own position and overwrites the slots that its padding had filled.
    """
    tokens, lengths = _tokens(), np.int32([35, 20])
    prompts = tokens[:, :35].copy()
    prompts[1, 20:] = 7
    positions = np.tile(np.arange(35, dtype=np.int32), (2, 1))
    logits, cache = _step(recipe, prompts, _empty_cache(recipe), positions)
    expected = _logits(recipe)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(logits[row, :length], expected[row, :length])
    for step in range(_LENGTH - 35):
        position = (lengths + step)[:, None]
        token = np.take_along_axis(tokens, position, axis=1)
        logits, cache = _step(recipe, token, cache, position)
        wanted = np.take_along_axis(expected, position[..., None], axis=1)
        np.testing.assert_array_equal(logits, wanted)


@pytest.mark.parametrize("recipe", ["f32", _SLOW("fp8")])
def test_latents_and_experts_one_token_at_a_time_equal_the_whole(recipe):
    """DeepSeek's layers: the sorting of one step's tokens, and queries that meet latents."""
    tokens, cache = _tokens(UNEVEN_LATENT, length=9), _empty_cache(recipe, UNEVEN_LATENT)
    expected = _whole(recipe, tokens, UNEVEN_LATENT)
    assert np.isfinite(expected).all()
    for step in range(9):
        position = np.full((2, 1), step, np.int32)
        logits, cache = _step(recipe, tokens[:, step : step + 1], cache, position, UNEVEN_LATENT)
        np.testing.assert_array_equal(logits[:, 0], expected[:, step])


@pytest.mark.parametrize("recipe", ["f32", _SLOW("fp8")])
def test_right_padding_changes_nothing_before_it(recipe):
    """Neither what stands behind a position nor how much of it; what stands before does."""
    logits, tokens = _logits(recipe), _tokens()
    short = _whole(recipe, tokens[:, :12])
    np.testing.assert_array_equal(short, logits[:, :12])
    tokens[:, 12:] = (tokens[:, 12:] + 1) % UNEVEN.vocab_size
    other = _whole(recipe, tokens)
    np.testing.assert_array_equal(other[:, :12], short)
    assert (other[:, 12:] != logits[:, 12:]).any(axis=-1).all()


@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_rows_do_not_see_each_other(recipe):
    """A sequence has the same logits whatever stands beside it."""
    tokens = _tokens()
    tokens[1] = _tokens(seed=9)[1]
    other = _whole(recipe, tokens)
    np.testing.assert_array_equal(other[0], _logits(recipe)[0])
    assert (other[1] != _logits(recipe)[1]).any()


# Gradients.

_SHORT = 12


@functools.cache
def _loss_and_gradients(remat, recipe="f32"):
    """Mean negative log-probability of the next token, and its gradients by masters."""

    def loss(params, tokens, rope):
        logits = forward(
            params, Tokens.of(tokens, rope), UNEVEN, recipe, observe=Observe(remat=remat)
        ).logits
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    program = exact_jit(jax.value_and_grad(loss))
    rope = rope_tables(UNEVEN, _SHORT)
    return jax.device_get(program(_params(UNEVEN), _tokens(length=_SHORT), rope))


def _plain_loss(params, tokens):
    """The same loss in plain jnp: batched einsum, whole softmax, a Python loop over layers."""
    config, length = UNEVEN, tokens.shape[1]
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x, weight):
        return weight * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)

    angle = jnp.arange(length)[:, None] * config.rope_theta ** (-jnp.arange(0, dim, 2) / dim)
    turn = jnp.exp(1j * angle)[:, None]  # rotation as multiplication by a complex number

    def rotate(x):
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return jnp.concatenate([turned.real, turned.imag], axis=-1)

    x = params["embed_tokens"][tokens]
    for layer in range(config.num_hidden_layers):
        p = jax.tree.map(lambda leaf: leaf[layer], params["layers"])  # noqa: B023
        a = p["self_attn"]
        h = norm(x, p["input_layernorm"]["weight"])
        q, k, v = (
            (h @ a[f"{name}_proj"]["kernel"]).reshape(*tokens.shape, -1, dim) for name in "qkv"
        )
        q, k = rotate(norm(q, a["q_norm"]["weight"])), rotate(norm(k, a["k_norm"]["weight"]))
        k, v = (jnp.repeat(y, heads // kv_heads, axis=2) for y in (k, v))
        score = jnp.einsum("bthd,bshd->bhts", q, k) / dim**0.5
        score = jnp.where(jnp.tril(jnp.ones((length, length), bool)), score, -jnp.inf)
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(score), v)
        x = x + out.reshape(*tokens.shape, -1) @ p["o_proj"]["kernel"]
        h = norm(x, p["post_attention_layernorm"]["weight"])
        gated = jax.nn.silu(h @ p["gate_proj"]["kernel"]) * (h @ p["up_proj"]["kernel"])
        x = x + gated @ p["down_proj"]["kernel"]
    logp = jax.nn.log_softmax(norm(x, params["norm"]["weight"]) @ params["lm_head"])[:, :-1]
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


def _named(tree):
    return {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(tree)}


def test_gradients_equal_those_of_a_plain_forward():
    """Every element of every gradient, through the custom rules of matmul and attention."""
    value, grads = _loss_and_gradients("none")
    program = jax.jit(jax.value_and_grad(_plain_loss))
    plain_value, plain = program(_params(UNEVEN), _tokens(length=_SHORT))
    np.testing.assert_allclose(value, plain_value, rtol=1e-6)
    grads, plain = _named(grads), _named(plain)
    assert grads.keys() == plain.keys()
    for name, expected in plain.items():
        scale = np.abs(expected).max()
        assert scale > 1e-4, name
        np.testing.assert_allclose(grads[name], expected, atol=1e-5 * scale, err_msg=name)


def test_gradients_equal_finite_differences():
    """Along one random direction per parameter, central differences of the float64 oracle."""
    tokens = _tokens(length=_SHORT)

    def loss(params):
        logits = oracle.decoder_logits(params, UNEVEN, tokens)[:, :-1]
        top = logits.max(-1, keepdims=True)
        logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        return -np.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    value, grads = _loss_and_gradients("none")
    params = oracle.to_float64(_params(UNEVEN))
    np.testing.assert_allclose(value, loss(params), rtol=1e-6)
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    for index, grad in enumerate(jax.tree.leaves(grads)):
        # Half random, half along the gradient, so that the slope is not lost in rounding.
        direction = rng.standard_normal(grad.shape)
        direction = direction / np.linalg.norm(direction) + grad / np.linalg.norm(grad)
        around = []
        for step in (1e-4, -1e-4):
            moved = [x + step * direction if i == index else x for i, x in enumerate(leaves)]
            around.append(loss(jax.tree.unflatten(structure, moved)))
        slope = (around[0] - around[1]) / 2e-4
        np.testing.assert_allclose((grad * direction).sum(), slope, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f32", "fp8"])
def test_remat_changes_no_bit_of_the_loss(recipe):
    """Recomputing each layer: the same loss, and gradients that differ by rounding at most."""
    value, grads = _loss_and_gradients("none", recipe)
    again, regrads = _loss_and_gradients("full", recipe)
    assert value.tobytes() == again.tobytes()
    grads, regrads = _named(grads), _named(regrads)
    for name, expected in grads.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(regrads[name], expected, atol=1e-5 * scale, err_msg=name)


# Outputs and errors.


def test_finite_names_the_first_bad_layer():
    """A NaN in the second layer's weights: the first layer's output is still finite."""
    params = jax.tree.map(np.array, _params(UNEVEN))
    rope = rope_tables(UNEVEN, _SLOTS)
    _, finite = _program("f32")(params, _tokens(), rope)
    np.testing.assert_array_equal(finite, [True, True])
    params["layers"]["up_proj"]["kernel"][1, 0, 0] = np.nan
    logits, finite = _program("f32")(params, _tokens(), rope)
    np.testing.assert_array_equal(finite, [True, False])
    assert np.isnan(logits).any()


def test_one_bad_sequence_is_reported_and_spoils_no_other():
    """A NaN that one of two sequences meets: no layer is finite, the other's logits keep bits."""
    params, tokens = jax.tree.map(np.array, _params(UNEVEN)), _tokens()
    only_second = np.setdiff1d(tokens[1], tokens[0])[0]
    params["embed_tokens"][only_second] = np.nan
    logits, finite = _program("f32")(params, tokens, rope_tables(UNEVEN, _SLOTS))
    np.testing.assert_array_equal(finite, [False, False])
    np.testing.assert_array_equal(logits[0], _logits("f32")[0])
    assert np.isnan(logits[1]).any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["fp8", "fp8_blockwise"])
def test_every_family_is_observed(family, recipe):
    """What the cache loses, and its largest values, of every format of keys, values and latents."""
    case = Case(recipe, family, layers=3, experts=8 if family in ("glm", "gpt-oss") else 0)
    model, tokens = case.model(), jax.ShapeDtypeStruct((2, 8), jnp.int32)
    collect = ("kv_health", "kv_amax")
    observe = Observe(collect=collect)

    def run(params, ids):
        return hidden_states(params, Tokens.of(ids), model, recipe, observe=observe)

    aux = jax.eval_shape(run, param_shapes(model), tokens).aux
    assert {x.shape for x in jax.tree.leaves(aux["kv_health"])} == {(3,)}
    assert set(aux["kv_amax"]) == ({"latent"} if model.latent else {"q", "k", "v"})


@pytest.mark.parametrize("recipe", ["f32", "bf16"])
def test_hidden_output_has_no_logits(recipe):
    """Hidden states in the compute dtype, and nothing of the vocabulary's size."""
    out = jax.eval_shape(
        lambda params, tokens: hidden_states(params, Tokens.of(tokens), UNEVEN, recipe),
        _params(UNEVEN),
        _tokens(),
    )
    assert out.logits is None and out.cache is None
    assert out.hidden.shape == (2, _LENGTH, 48)
    assert out.hidden.dtype == {"f32": jnp.float32, "bf16": jnp.bfloat16}[recipe]


@pytest.mark.parametrize("field", ["remat", "collect"])
def test_unknown_choices_are_refused(field):
    """The message names the value and what may be written."""
    given, allowed = {
        "remat": ("some", "one of none, full"),
        "collect": (("some",), "some of kv_health, kv_amax, expert_probability"),
    }[field]
    with pytest.raises(ValueError, match=f"{field} is .*'some'.*; write {allowed}"):
        Observe(**{field: given})
