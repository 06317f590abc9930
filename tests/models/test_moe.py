"""The layer of experts: its function and gradients, and that no row's bits depend on another."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import decoder_oracle, moe_oracle

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, Tokens, forward, moe, param_shapes, rope_tables
from fp8rl_jax.models import router as routing
from fp8rl_jax.quant import get_recipe

_MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=144,
    intermediate_size=1,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
)
_ROWS = 45
_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@functools.cache
def _weights(model=_MODEL):
    """(router (D, E), (gate, up, down)) float32; values that bf16 holds exactly."""
    rng = np.random.default_rng(1)
    count, width, inner = model.num_experts, model.hidden_size, model.moe_intermediate_size

    def draw(*shape):
        values = rng.standard_normal(shape) / np.sqrt(shape[-2])
        return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)

    shapes = ((count, width, inner), (count, width, inner), (count, inner, width))
    return draw(width, count), tuple(draw(*shape) for shape in shapes)


def _tokens(rows=_ROWS, seed=0, width=_MODEL.hidden_size):
    values = np.random.default_rng(seed).standard_normal((rows, width))
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)


def _function(recipe, model=_MODEL):
    """(x (M, D) float32, router, experts) -> ((M, D) float32, (E,) tokens per expert)."""
    recipe = get_recipe(recipe)
    dtype = recipe.compute_dtype

    def run(x, router, experts):
        named = dict(zip(moe_oracle.NAMES, experts, strict=True))
        rows, valid = x.astype(dtype)[None], jnp.ones((1, len(x)), bool)
        logits = routing.router_logits(rows, router)
        chosen = routing.select_experts(model, logits, None)
        weights = routing.routing_weights(model, logits, chosen)
        y = moe.moe_forward(model, recipe, rows, weights, chosen, named)
        tokens = routing.expert_tokens(model, chosen, valid)
        return y[0].astype(jnp.float32), tokens

    return run


@functools.cache
def _program(recipe, model=_MODEL):
    return exact_jit(_function(recipe, model))


def _layer(recipe, x, model=_MODEL):
    return np.asarray(_program(recipe, model)(x, *_weights(model))[0])


def _oracle(x, model=_MODEL):
    return moe_oracle.layer(x, *_weights(model), model.num_experts_per_tok, model.norm_topk_prob)


def _error(ours, exact) -> float:
    """Relative error, root mean square."""
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


# The function.


@pytest.mark.parametrize(
    "top_k,renormalize", [(2, True), *(_SLOW(*c) for c in ((1, False), (2, False), (6, True)))]
)
def test_float32_is_the_real_number_result(top_k, renormalize):
    model = dataclasses.replace(_MODEL, num_experts_per_tok=top_k, norm_topk_prob=renormalize)
    assert _error(_layer("f32", _tokens(), model), _oracle(_tokens(), model)) < 1e-6


@pytest.mark.parametrize(
    "recipe,low,high",
    [_SLOW("bf16", 2e-3, 5e-3), ("fp8", 4.5e-2, 7.5e-2), _SLOW("mxfp8", 5.5e-2, 8.5e-2)],
)
def test_rounding_error_within_recorded_bounds(recipe, low, high):
    """The router reads the same bf16 values and is exact, so that every choice is the oracle's."""
    assert low < _error(_layer(recipe, _tokens()), _oracle(_tokens())) < high


def test_whole_model_against_the_oracle():
    """Logits of two sequences through two layers, in float32; every expert is somebody's."""
    params = decoder_oracle.random_params(param_shapes(_MODEL), 0)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 20)).astype(np.int32)

    def run(params, tokens, rope):
        return forward(params, Tokens.of(tokens, rope, lengths=jnp.int32([20, 15])), _MODEL, "f32")

    out = exact_jit(run)(params, tokens, rope_tables(_MODEL, 20))
    expected = decoder_oracle.decoder_logits(params, _MODEL, tokens)
    real = np.arange(20) < np.array([[20], [15]])
    error = np.abs(out.logits - expected).max(-1) / np.abs(expected).max()
    assert error[real].max() < 3e-6
    assert error[~real].min() > 1e-3, "padding has no experts"
    counts = np.asarray(out.aux["expert_tokens"])
    assert counts.shape == (2, 6) and counts.dtype == np.int32
    np.testing.assert_array_equal(counts.sum(1), 35 * 2)  # padding is not counted
    assert (counts > 0).all()


def test_tokens_per_expert():
    """What the choices of a plain loop add up to."""
    _, tokens = _program("f32")(_tokens(), *_weights())
    router = _weights()[0]
    chosen = [moe_oracle.choose(x, router, 2, True)[0] for x in _tokens()]
    np.testing.assert_array_equal(tokens, np.bincount(np.ravel(chosen), minlength=6))


# Gradients.


@functools.cache
def _gradients(recipe, model=_MODEL):
    """Gradients of a weighted sum of the layer's output by x, router and experts."""

    def loss(x, weights, dy):
        return (_function(recipe, model)(x, *weights)[0] * dy).sum()

    grads = exact_jit(jax.grad(loss, (0, 1)))(_tokens(), _weights(model), _tokens(seed=5))
    return jax.device_get(grads)


@functools.cache
def _dense_gradients(model=_MODEL):
    def loss(x, weights, dy):
        top_k, renormalize = model.num_experts_per_tok, model.norm_topk_prob
        return (moe_oracle.dense_layer(x, *weights, top_k, renormalize) * dy).sum()

    program = jax.jit(jax.grad(loss, (0, 1)))
    return jax.device_get(program(_tokens(), _weights(model), _tokens(seed=5)))


_NAMES = ("x", "router", *moe_oracle.NAMES)


@pytest.mark.parametrize("top_k,renormalize", [_SLOW(1, False), (2, True), _SLOW(3, False)])
def test_float32_gradients_are_those_of_the_dense_loop(top_k, renormalize):
    model = dataclasses.replace(_MODEL, num_experts_per_tok=top_k, norm_topk_prob=renormalize)
    ours, plain = (
        jax.tree.leaves(g(model)) for g in (functools.partial(_gradients, "f32"), _dense_gradients)
    )
    for name, grad, expected in zip(_NAMES, ours, plain, strict=True):
        scale = np.abs(expected).max()
        assert scale > 1e-2, name
        np.testing.assert_allclose(grad, expected, atol=2e-6 * scale, err_msg=name)


@pytest.mark.slow  # of the product itself: tests/quant/test_experts.py
@pytest.mark.parametrize("recipe,low,high", [("bf16", 2e-3, 7e-3), ("fp8", 4e-2, 7.5e-2)])
def test_gradients_within_recorded_bounds(recipe, low, high):
    """Relative error of every gradient, two-sided."""
    plain = jax.tree.leaves(_dense_gradients())
    for name, ours, exact in zip(_NAMES, jax.tree.leaves(_gradients(recipe)), plain, strict=True):
        assert low < _error(ours, exact) < high, name


@pytest.mark.slow
def test_an_expert_without_tokens_gets_no_gradient():
    """And none of the others' gradients is disturbed by its empty tiles."""
    (router, experts), x = _weights(), _tokens()
    router, x[:, 0] = router.copy(), 1.0
    router[0] = [0, 0, 0, 0, 0, -99]

    def loss(router, experts, dy):
        return (_function("fp8")(x, router, experts)[0] * dy).sum()

    grads = exact_jit(jax.grad(loss, (0, 1)))(router, experts, _tokens(seed=5))
    for leaf in grads[1]:
        leaf = np.asarray(leaf)
        assert np.isfinite(leaf).all() and not leaf[5].any()
        assert all(part.any() for part in leaf[:5])


# Bits.


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f32", "fp8", "bf16", "mxfp8", "fake"])
def test_bits_do_not_depend_on_the_size_of_a_tile(recipe, monkeypatch):
    """8 to 128 rows a tile: the same output to the last bit."""
    expected = _layer(recipe, _tokens())
    for rows in (8, 16, 64, 128):
        monkeypatch.setattr(moe, "tile_rows", lambda *_, rows=rows: rows)
        _program.cache_clear()
        np.testing.assert_array_equal(_layer(recipe, _tokens()), expected)
    monkeypatch.undo()
    _program.cache_clear()


@pytest.mark.parametrize("recipe", ["f32", *map(_SLOW, ("fp8", "bf16"))])
def test_rows_do_not_see_each_other(recipe):
    """Alone, in another order, beside others, or beside NaN: a row keeps its bits."""
    x, whole = _tokens(), _layer(recipe, _tokens())
    for rows in (1, 2, 17):
        np.testing.assert_array_equal(_layer(recipe, x[:rows]), whole[:rows])
    order = np.random.default_rng(3).permutation(_ROWS)
    np.testing.assert_array_equal(_layer(recipe, x[order]), whole[order])
    x[20:] = np.nan
    mixed = _layer(recipe, x)
    np.testing.assert_array_equal(mixed[:20], whole[:20])
    assert np.isnan(mixed[20:]).all()


# Choice.


def _routes(logits, top_k, renormalize):
    model = dataclasses.replace(
        _MODEL, num_experts=logits.shape[1], num_experts_per_tok=top_k, norm_topk_prob=renormalize
    )

    def run(logits):
        chosen = routing.select_experts(model, logits, None)
        return routing.routing_weights(model, logits, chosen), chosen

    return exact_jit(run)(logits)


@pytest.mark.parametrize("rows", [1, 200, *map(_SLOW, (3, 16))])
@pytest.mark.parametrize("experts,top_k", [(3, 2), (64, 8), _SLOW(8, 2), _SLOW(128, 8)])
def test_ties_go_to_the_lower_number(rows, experts, top_k):
    """Logits of few distinct values: a stable sort's choice, whatever the number of rows."""
    rng = np.random.default_rng(rows)
    logits = rng.integers(0, 3, (rows, experts)).astype(np.float32)
    logits[0] = 0
    weights, chosen = _routes(logits, top_k, True)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(chosen, order)
    np.testing.assert_allclose(np.asarray(weights).sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("experts", [3, 16, 20])
def test_weights_are_probabilities(experts):
    """Of all experts; extreme logits give neither NaN nor a probability above 1."""
    logits = np.random.default_rng(0).standard_normal((7, experts)).astype(np.float32)
    logits[1] *= 1e4
    weights, chosen = _routes(logits, experts, False)
    exact = np.exp(np.float64(logits) - logits.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, np.take_along_axis(exact, np.asarray(chosen), 1), rtol=1e-5)
    assert (np.diff(np.asarray(weights)) <= 0).all(), "the most probable first"


# Tiles.


@pytest.mark.parametrize(
    "tokens,experts,top_k,rows",
    [(1, 1, 1, 8), (1, 8, 2, 8), (16, 8, 2, 8), (33, 5, 5, 16), (40, 9, 3, 16), (130, 4, 2, 128)],
)
def test_every_assignment_has_a_row_of_its_own(tokens, experts, top_k, rows):
    """Any choices (nearly all the same, all equally likely): a tile holds rows of its expert alone,
    no row is used twice, the rest is padding, and the tiles suffice."""
    program = jax.jit(lambda chosen: moe.make_tiles(chosen, experts, rows))
    rng = np.random.default_rng(0)
    for skew in np.repeat([0.0, 1.0, 9.0], 8):
        score = rng.standard_normal((tokens, experts)) + skew * rng.permutation(experts)
        chosen = np.argsort(-score, axis=1)[:, :top_k].astype(np.int32)
        owner, assignment, place = (np.asarray(a) for a in program(chosen))
        source = assignment // top_k
        assert len(source) == len(owner) * rows
        assert len(set(place.ravel())) == place.size and place.max() < len(source)
        np.testing.assert_array_equal(owner[place // rows], chosen)
        expected = np.arange(tokens * top_k).reshape(tokens, top_k)
        np.testing.assert_array_equal(assignment[place], expected)
        assert (source == tokens).sum() == len(source) - place.size
        used = np.unique(place // rows)
        np.testing.assert_array_equal(used, np.arange(len(used)))
        assert (owner[len(used) :] == experts).all()


def test_tiles_suffice_for_the_worst_case():
    """One row more than full tiles for every expert fills every tile that there is."""
    chosen = np.repeat(np.arange(4, dtype=np.int32), 9)[:, None]  # 9 rows each, tiles of 8
    tiles = jax.jit(lambda chosen: moe.make_tiles(chosen, 4, 8))(chosen)
    assert len(tiles.experts) == 8
    np.testing.assert_array_equal(tiles.experts, np.repeat(np.arange(4), 2))


@pytest.mark.parametrize(
    "assignments,experts,rows",
    [(1, 8, 8), (32, 8, 8), (65, 8, 16), (512, 8, 64), (1024, 8, 128), (10**6, 8, 128)],
)
def test_tile_rows(assignments, experts, rows):
    """Few rows where few come, 128 at most."""
    assert moe.tile_rows(assignments, experts) == rows


# Errors.


@pytest.mark.parametrize(
    "fields,words",
    [
        (dict(num_experts=-1), ("num_experts is -1", "from 0 to")),
        (dict(num_experts_per_tok=7), ("num_experts_per_tok = 7", "num_experts = 6")),
        (dict(num_experts_per_tok=0), ("num_experts_per_tok", "from 1 to")),
        (dict(moe_intermediate_size=0), ("moe_intermediate_size", "from 1 to")),
        (dict(num_experts_per_tok=1), ("norm_topk_prob", "router learns nothing")),
    ],
)
def test_impossible_shapes(fields, words):
    with pytest.raises(UserError) as error:
        dataclasses.replace(_MODEL, **fields)
    message = str(error.value)
    assert all(word in message for word in words) and message.count(". ") == 0
