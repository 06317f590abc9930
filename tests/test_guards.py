"""No product feeds an addition without `prevent_fma`, and no rounding can be undone.

LLVM contracts ``a * b + c`` into one rounding where ``a * b`` has a single user, which differs
between the sampler and a train step. Whether a missing `prevent_fma` shows depends on shapes,
compiler and CPU, and comparisons of bits may miss it: here the forward pass is traced and read.
Those programs are not compiled.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import UNEVEN, UNEVEN_LATENT

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import prevent_fma, round_bf16
from fp8rl_jax.models import Tokens, forward, init_cache, init_params, rope_tables
from fp8rl_jax.models.logprobs import scaled_logits
from fp8rl_jax.quant import get_recipe

_ADDS = {"add", "sub", "add_any", "reduce_sum", "cumsum"}
# What hands a product on as it is.
_PASSES = {
    "convert_element_type",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "transpose",
    "slice",
    "neg",
    "select_n",
    "pad",
}


def _inner(equation) -> list:
    """Programs within an equation: bodies of loops, branches, calls."""
    values = equation.params.values()
    several = (x for v in values for x in (v if isinstance(v, (tuple, list)) else (v,)))
    return [getattr(x, "jaxpr", x) for x in several if hasattr(getattr(x, "jaxpr", x), "eqns")]


def _place(equation) -> str:
    """The operation and the line of ours that it comes from."""
    frames = str(equation.source_info.traceback).splitlines()
    ours = [f for f in frames if "fp8rl_jax" in f or "/kernels/" in f or __file__ in f]
    return f"{equation.primitive.name}: {(ours or frames)[0]}"


def _unguarded(jaxpr, products: frozenset[int] = frozenset()) -> tuple[list[str], list[bool]]:
    """(additions of bare products, which results are bare products); `products` are arguments'."""
    bare = {jaxpr.invars[i] for i in products}
    found: list[str] = []
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, equation.invars
        given = frozenset(i for i, x in enumerate(operands) if not hasattr(x, "val") and x in bare)
        floating = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
        if name in _ADDS and floating and given:
            found.append(_place(equation))
        results = [name == "mul" or (name in _PASSES and bool(given))] * len(equation.outvars)
        for inner in _inner(equation):
            call = len(inner.invars) == len(operands)  # loops carry other things first
            more, out = _unguarded(inner, given if call else frozenset())
            found += more
            if call and len(out) == len(results):
                results = out
        bare.update(x for x, product in zip(equation.outvars, results, strict=True) if product)
    return found, [not hasattr(x, "val") and x in bare for x in jaxpr.outvars]


def _simplifiable(jaxpr) -> list[str]:
    """Conversions of float32 to bf16 that do not follow `reduce_precision`: XLA may undo them."""
    found, rounded = [], set()
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, equation.invars
        if name == "reduce_precision" or (
            name in _PASSES and any(not hasattr(x, "val") and x in rounded for x in operands)
        ):
            rounded.update(equation.outvars)
        types = [x.aval.dtype for x in (*operands[:1], *equation.outvars[:1])]
        to_bf16 = name == "convert_element_type" and types == [jnp.float32, jnp.bfloat16]
        if to_bf16 and not hasattr(operands[0], "val") and operands[0] not in rounded:
            found.append(_place(equation))
        for inner in _inner(equation):
            found += _simplifiable(inner)
    return found


@pytest.mark.parametrize("recipe", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("model", [UNEVEN, UNEVEN_LATENT], ids=["dense", "latents and experts"])
def test_forward(model, recipe):
    """With a cache, and logits over temperatures."""

    def run(params, tokens, cache, positions, rope, temperature):
        out = forward(
            params, Tokens.of(tokens, rope, positions=positions), model, recipe, cache=cache
        )
        scaled = scaled_logits(out.logits[:, -1], temperature)
        return scaled - scaled.max(-1, keepdims=True)

    params = jax.eval_shape(
        functools.partial(init_params, model), jax.random.key(0, impl="threefry2x32")
    )
    cache = jax.eval_shape(lambda: init_cache(model, get_recipe(recipe), 2, 150))
    tokens = jnp.zeros((2, 3), jnp.int32)
    traced = jax.make_jaxpr(run)(
        params, tokens, cache, tokens, rope_tables(model, 150), jnp.ones(2)
    )
    # FP8 numbers are bf16 numbers: kernels/reference/bits.py rounds nothing.
    conversions = [place for place in _simplifiable(traced.jaxpr) if "bits.py" not in place]
    found = _unguarded(traced.jaxpr)[0] + conversions
    assert not found, "\n".join(found)


def test_a_conversion_that_does_not_round_is_found():
    x = jnp.ones(4)
    for function, count in ((lambda x: x.astype(jnp.bfloat16), 1), (round_bf16, 0)):
        assert len(_simplifiable(jax.make_jaxpr(function)(x).jaxpr)) == count


def test_a_missing_guard_is_found():
    """Through a reshape, a call, a choice and a loop; a guarded product is none."""
    x = jnp.ones(4)

    def bare(x):
        return jnp.where(x > 0, (x * x).reshape(2, 2).reshape(4), 0.0) - x

    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y + y * y, x)

    def guarded(x):
        return prevent_fma(x * x) + prevent_fma(x * x).sum()

    counts = [len(_unguarded(jax.make_jaxpr(f)(x).jaxpr)[0]) for f in (bare, looped, guarded)]
    assert counts == [1, 1, 0]


def test_exp_of_a_row_does_not_depend_on_others():
    """At widths that no vector divides: activations have such widths. (Rows of another width may
    differ: vector and scalar code are not the same.)"""
    x = 3 * jax.random.normal(jax.random.key(0, impl="threefry2x32"), (33, 257))
    values = exact_jit(jnp.exp)
    for width in (1, 17, 257):
        whole = values(x[:, :width])
        for rows in (1, 2, 7):
            np.testing.assert_array_equal(values(x[:rows, :width]), whole[:rows])
