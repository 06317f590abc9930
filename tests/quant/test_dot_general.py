"""The dot_general rule: forward and both gradients against the oracle, and inside Flax."""

from __future__ import annotations

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from marks import quick_if, slow
from oracles import quant_oracle as oracle

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.quant import (
    Activation,
    BoundWeight,
    get_recipe,
    init_probe,
    init_site,
    make_dot_general,
    matmul,
    quantize,
    quantize_weight,
)

MATRIX = (((1,), (0,)), ((), ()))


def _operands(m=256, k=384, n=256, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((k, n)), jnp.float32)
    dy = jnp.asarray(rng.standard_normal((m, n)), jnp.bfloat16).astype(jnp.float32)
    return x, w, dy


def _all_three(recipe, x, w, dy):
    dot = make_dot_general(recipe)

    def run(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: dot(x, w, MATRIX, preferred_element_type=jnp.float32), x, w)
        return y, *vjp(dy)

    return [np.asarray(a, np.float32) for a in exact_jit(run)(x, w, dy)]


@pytest.mark.slow
def test_an_activation_that_was_quantised_before():
    """Its quantised form stands for x in the product, and for nothing in the backward pass."""
    x, w, dy = _operands()
    product = functools.partial(matmul, get_recipe("fp8"))

    @exact_jit
    def run(x, w, dy):
        q = quantize(x[::-1].astype(jnp.float32), (1, 128))
        want, vjp = jax.vjp(product, x, w)
        got, vjp_with_q = jax.vjp(product, Activation(x, q), w)
        return want, vjp(dy), got, vjp_with_q(dy)

    want, gradients, got, (dx, dw) = run(x, w, dy)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want[::-1]))
    for one, other in zip((dx.value, dw), gradients, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert not np.any(np.asarray(dx.q.scale))


def _exact(x, w, dy):
    x, w, dy = (np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, w, dy))
    return x @ w, dy @ w.T, x.T @ dy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "power_of_two"),
    quick_if(
        lambda case: case == ((131, 300, 200), False),
        itertools.product(((256, 384, 256), (131, 300, 200), (512, 1280, 128)), (False, True)),
    ),
)
def test_equals_the_oracle(shape, power_of_two):
    """fprop, dgrad and wgrad are the oracle's quantised products up to float32 summation."""
    x, w, dy = _operands(*shape)
    recipe = "fp8_blockwise_pow2" if power_of_two else "fp8"
    y, dx, dw = _all_three(recipe, x, w, dy)
    x, w, dy = (np.asarray(a, np.float32) for a in (x, w, dy))
    assert oracle.calc_diff(y, oracle.matmul_1x128_128x128(x, w, power_of_two)) < 1e-12
    assert oracle.calc_diff(dw, oracle.wgrad_reference(x, dy, power_of_two)) < 1e-12
    # dx is rounded to bf16, the dtype of x
    assert 1e-8 < oracle.calc_diff(dx, oracle.dgrad_reference(dy, w, power_of_two)) < 4e-6


@pytest.mark.slow  # quick in test_recipes.py
@pytest.mark.parametrize(
    "recipe,low,high", [("fp8", 6.0e-4, 7.2e-4), ("fp8_blockwise_pow2", 6.8e-4, 7.5e-4)]
)
def test_error_is_that_of_fp8(recipe, low, high):
    """Two-sided: DeepGEMM's calc_diff of normal inputs. A quantiser that does nothing fails."""
    x, w, dy = _operands(256, 512, 384, seed=1)
    for ours, exact in zip(_all_three(recipe, x, w, dy), _exact(x, w, dy), strict=True):
        assert low < oracle.calc_diff(ours, exact) < high


@pytest.mark.parametrize("recipe", ["bf16", "f32"])
def test_unquantised_recipes(recipe):
    x, w, dy = _operands(64, 300, 130)
    for ours, exact in zip(_all_three(recipe, x, w, dy), _exact(x, w, dy), strict=True):
        assert oracle.calc_diff(ours, exact) < 1e-5
    y, *_ = _all_three("f32", x, w, dy)
    full = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert oracle.calc_diff(y, full) < 1e-12, "f32 does not round its operands"


@pytest.mark.parametrize("recipe", ["bf16", *map(slow, ("fp8", "fp8_tensorwise"))])
def test_three_kinds_of_weight_give_the_same_bits(recipe):
    """A plain array, bytes with their master, and bytes alone."""
    recipe = get_recipe(recipe)
    x, w, dy = _operands(40, 256, 130)
    value = quantize_weight(w, recipe)[0] if recipe.quantized else w.astype(jnp.bfloat16)

    def loss(x, w):
        return (matmul(recipe, x, w) * dy).sum(), matmul(recipe, x, w)

    grad = exact_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    paired = exact_jit(
        jax.value_and_grad(lambda x, m, v: loss(x, BoundWeight(v, m)), (0, 1), has_aux=True)
    )
    (_, y1), (dx1, dw1) = grad(x, w)
    (_, y2), (dx2, dw2) = paired(x, jnp.zeros_like(w), value)  # the master's value is not read
    y3 = exact_jit(lambda x, v: matmul(recipe, x, v))(x, value)
    for a, b in ((y1, y2), (y1, y3), (dx1, dx2), (dw1, dw2)):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert dw2.dtype == jnp.float32 and dx2.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "equal"),
    [("fp8", True), slow("bf16", True), ("f32", True), slow("fp8_tensorwise", False)],
)
def test_rows_do_not_see_each_other(name, equal):
    """A row's result is the same alone and among 300 others; not so with per-tensor scales."""
    x, w, _ = _operands(300, 1280, 200)
    f = exact_jit(functools.partial(matmul, get_recipe(name)))
    alone, among = np.asarray(f(x[:1], w)), np.asarray(f(x, w))[:1]
    assert np.array_equal(alone, among) == equal


@pytest.mark.slow  # nnx.Linear, below, is quick
@pytest.mark.parametrize("layer", ["dense", "dense_general"])
def test_flax_layer_trains(layer):
    """Drop-in: a user's own Flax model with our dot_general learns a linear map in FP8."""
    dot = make_dot_general("fp8")
    if layer == "dense":
        model = nn.Dense(32, dot_general=dot)
    else:
        model = nn.DenseGeneral((4, 8), axis=(-2, -1), dot_general=dot)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 64)).astype(np.float32)
    y = x @ rng.standard_normal((64, 32)).astype(np.float32)
    if layer == "dense_general":
        x, y = x.reshape(256, 8, 8), y.reshape(256, 4, 8)
    params = model.init(jax.random.key(0, impl="threefry2x32"), x)
    optimizer = optax.adam(3e-2)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: ((model.apply(p, x) - y) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(150):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.02 * losses[0]
    assert losses[-1] > 1e-6, "FP8 has an error floor"


@pytest.mark.slow
def test_works_under_vmap_scan_and_remat():
    x, w, _ = _operands(16, 128, 128)
    recipe = get_recipe("fp8")
    stack = jnp.stack([w, w * 2])

    def body(x, w):
        return jax.checkpoint(lambda x: matmul(recipe, x, w).astype(jnp.bfloat16))(x), None

    scanned = jax.jit(jax.grad(lambda s: jax.lax.scan(body, x, s)[0].astype(jnp.float32).sum()))
    assert np.isfinite(np.asarray(scanned(stack))).all()
    mapped = jax.jit(jax.vmap(lambda w: matmul(recipe, x, w)))(stack)
    np.testing.assert_allclose(mapped[1], mapped[0] * 2, rtol=1e-6)


def test_errors():
    dot = make_dot_general("fp8")
    q = quantize_weight(jnp.ones((8, 8)), get_recipe("fp8"))[0]
    with pytest.raises(ValueError, match="contracted on axis 0"):
        dot(jnp.ones((2, 8)), q, (((1,), (1,)), ((), ())))
    with pytest.raises(UserError, match="did you mean 'fp8_blockwise'"):
        make_dot_general("fp8_blokwise")


@pytest.mark.parametrize("recipe", ["fp8", slow("fp8_delayed")])
def test_batch_dimensions_are_products_of_their_own(recipe):
    """DenseGeneral's batch_dims: every matrix has its own scales (and states)."""
    recipe = get_recipe(recipe)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((9, 3, 5, 64)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((3, 64, 40)) * [[[1]], [[9]], [[81]]], jnp.float32)

    def product(numbers):
        def run(x, w, site):
            dot = make_dot_general(recipe, site)
            return dot(x, w, numbers, preferred_element_type=jnp.float32)

        return exact_jit(run)

    y = product((((3,), (1,)), ((1,), (0,))))(x, w, init_site(recipe, w.shape))
    assert y.shape == (3, 9, 5, 40)
    one = product((((2,), (0,)), ((), ())))
    for batch in range(3):
        alone = one(x[:, batch], w[batch], init_site(recipe, (64, 40)))
        np.testing.assert_array_equal(y[batch], alone)


@pytest.mark.slow
def test_flax_dense_general_with_batch_dims():
    layer = nn.DenseGeneral(24, axis=-1, batch_dims=(0,), dot_general=make_dot_general("fp8"))
    plain = nn.DenseGeneral(24, axis=-1, batch_dims=(0,))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 70, 128)), jnp.float32)
    params = plain.init(jax.random.key(0, impl="threefry2x32"), x)
    ours, exact = layer.apply(params, x), plain.apply(params, x)
    assert 3e-4 < oracle.calc_diff(ours, exact) < 1e-3


def test_nnx_linear_trains():
    """The example of docs/recipes.md: a user's own nnx model under an FP8 recipe."""
    layer = nnx.Linear(64, 32, dot_general=make_dot_general("fp8"), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(3e-2), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 64)).astype(np.float32)
    y = x @ rng.standard_normal((64, 32)).astype(np.float32)

    @nnx.jit
    def step(layer, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return loss

    losses = [float(step(layer, optimizer)) for _ in range(150)]
    assert 1e-6 < losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize("name", ["fp8", *map(slow, ("fp8_delayed", "mxfp8", "fake_forward"))])
def test_works_under_shard_map(name):
    """Rows over a mesh axis give the bits of the plain call (test_sharding.py: 8 devices)."""
    recipe = get_recipe(name)
    x, w, _ = _operands(32, 128, 128)
    state, probe = init_site(recipe, w.shape), init_probe(recipe, w.shape, True)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    def run(x, w, probe):
        return matmul(recipe, x, BoundWeight(w, None, state, probe))

    def loss(run):
        return jax.value_and_grad(lambda w, probe: (run(x, w, probe) ** 2).sum(), (0, 1))

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    np.testing.assert_array_equal(exact_jit(mapped)(x, w, probe), exact_jit(run)(x, w, probe))
    ours, plain = exact_jit(loss(mapped))(w, probe), exact_jit(loss(run))(w, probe)
    assert oracle.calc_diff(ours[1][0], plain[1][0]) < 1e-10
    for a, b in zip(jax.tree.leaves(ours[1][1]), jax.tree.leaves(plain[1][1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_second_derivatives_and_forward_mode_are_refused():
    """A derivative of rounding would be silently wrong: both orders of nesting say so."""
    x, w, _ = _operands(16, 128, 128)
    recipe = get_recipe("fp8")

    def loss(w):
        return (matmul(recipe, x, w) ** 2).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.eval_shape(jax.grad(lambda w: (jax.grad(loss)(w) ** 2).sum()), w)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (w,), (w,))


def test_a_stateful_recipe_needs_its_state():
    x, w, _ = _operands(16, 128, 128)
    with pytest.raises(ValueError, match=r"keeps a state.*init_site"):
        make_dot_general("fp8_delayed")(x, w, MATRIX)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8"])
def test_probes_observe_what_was_quantised(recipe):
    """amax and counts of activation, weight and gradient come back as the probe's cotangent."""
    recipe = get_recipe(recipe)
    x, w, dy = _operands(64, 256, 130)
    x = x.at[3, 5].set(600.0)  # saturates at scale 1
    w, dy = w.at[0, 0].set(1e-9), dy.at[:, 7].set(1e-30)
    state, probe = init_site(recipe, w.shape), init_probe(recipe, w.shape, True, weight=True)

    def loss(probe, x, w):
        dot = make_dot_general(recipe, state, probe)
        return (dot(x, w, MATRIX, preferred_element_type=jnp.float32) * dy).sum()

    seen = exact_jit(jax.grad(loss))(probe, x, w)
    delayed = recipe.name == "fp8_delayed"
    for operand, value in (("activation", x), ("weight", w), ("gradient", dy)):
        value = np.asarray(jnp.asarray(value).astype(jnp.bfloat16), np.float32)
        found = getattr(seen, operand)
        if delayed:
            np.testing.assert_array_equal(found.amax, np.abs(value).max(keepdims=True))
        else:
            assert found.amax is None
        saturated, underflowed, nonfinite, elements = np.asarray(found.counts)
        assert elements == value.size and nonfinite == 0
        assert saturated == (1 if delayed and operand == "activation" else 0)
        if delayed:  # at scale 1: half of the smallest code and below becomes 0
            smallest = 2.0**-16 if operand == "gradient" else 2.0**-9
            lost = (value != 0) & (np.abs(value) <= smallest / 2)
            assert underflowed == lost.sum() > 0 or operand == "activation"
        else:
            assert operand == "activation" or underflowed > 0


def test_rows_of_bad_values_do_not_spread_under_fixed_scales():
    """A scale from earlier steps: inf and NaN become NaN in their own rows, and only there."""
    recipe = get_recipe("fp8_delayed")
    x, w, _ = _operands(16, 128, 128)
    state = init_site(recipe, w.shape)
    run = exact_jit(lambda x: matmul(recipe, x, BoundWeight(w, None, state)))
    good, bad = run(x), run(x.at[2, 3].set(jnp.inf).at[5, 7].set(jnp.nan))
    rows = np.isnan(np.asarray(bad)).all(1)
    assert rows[[2, 5]].all() and rows.sum() == 2
    np.testing.assert_array_equal(np.asarray(good)[~rows], np.asarray(bad)[~rows])


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "bf16"])
def test_sizes_of_zero(recipe):
    """As of `lax.dot_general`, forward and backward: there is nothing to quantise."""
    product = make_dot_general(recipe)
    for x, w in (((2, 0), (0, 4)), ((0, 8), (8, 4)), ((2, 8), (8, 0))):
        dims = (((1,), (0,)), ((), ()))
        loss = lambda x, w, dims=dims: product(x, w, dims).sum()
        y = product(jnp.ones(x), jnp.ones(w), dims)
        assert y.shape == (x[0], w[1]) and not y.any()
        dx, dw = jax.grad(loss, (0, 1))(jnp.ones(x), jnp.ones(w))
        assert (dx.shape, dw.shape) == (x, w) and not dw.any()


def test_eager_calls_compile_whole_products(caplog):
    """Outside of any jit: forward and backward are a program each, not one for each operation."""
    x, w = jnp.ones((9, 131)), jnp.ones((131, 5))
    with jax.log_compiles():
        jax.grad(lambda w: make_dot_general("fp8")(x, w, MATRIX).sum())(w)
    programs = [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()]
    assert sum("jit(_follow)" in text for text in programs) == 2
    assert len(programs) < 10
