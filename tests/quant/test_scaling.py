"""Scaling policies as pure functions: exact scales, one step after another.

Proven: `delayed` gives, bit for bit and at each of 50 steps, the scale of a plain-Python float64
oracle of TransformerEngine's semantics and the reciprocal of what Flax's fp8_ops keeps; `dynamic`,
`static` and `power_of_two` give the correctly rounded quotient, or its exact power of two, over
every exponent of float32; the two properties that callers read (`stateful`, `reads_amax`); every
form that a config may write, and every sentence that a wrong one is answered with.

Not proven: what quantising by these scales gives (test_quantize_matrix.py), and how states travel
through a train step. Measured, and stated where they are tested, are three differences: a NaN in
the history freezes our scale (TransformerEngine's fmaxf passes over it); with a margin, an
overflowing quotient stops at FLT_MAX * 2**-margin (there at FLT_MAX); and XLA:CPU takes an amax
that is a denormal for zero.
"""

from __future__ import annotations

import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from oracles import quant_oracle as oracle

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.quant import delayed, dynamic, get_scaling_policy, power_of_two, scaling, static

FORMATS = {"e4m3": 448.0, "e5m2": 57344.0}
FLT_MAX = np.finfo(np.float32).max


def _trace(seed: int, steps: int = 50, nan: bool = True) -> np.ndarray:
    """Amaxes of a rough run: zeros at the start, spikes, tiny values, infinities and NaN."""
    rng = np.random.default_rng(seed)
    amax = np.exp(2 * rng.standard_normal(steps)).astype(np.float32)
    amax[[0, 1, 6, 7, 8]] = 0
    amax[[2, 3]] = np.inf  # early: what is not finite freezes a history of 16 for 16 steps
    amax[[4, 5]] = np.nan if nan else 0
    amax[28:31] = 2e-32  # its quotient and the inverse of that are normal in both formats
    amax[31] = 0
    amax[40] = 1e30
    amax[47] = 3e38
    return np.roll(amax, seed)


def _ours(policy, trace: np.ndarray, fp8_max: float) -> np.ndarray:
    """Multipliers of steps 0..T for amaxes (T, ...): one before each update and one at the end."""

    def step(state, amax):
        # The amax of the step itself must not be looked at: NaN would show.
        s = policy.scale(state, jnp.full_like(amax, jnp.nan), fp8_max)
        return policy.update(state, amax), s

    def run(trace):
        state, scales = jax.lax.scan(step, policy.init(trace.shape[1:]), trace)
        return jnp.concatenate([scales, policy.scale(state, trace[-1], fp8_max)[None]])

    return np.asarray(jax.jit(run)(trace))


def _oracle_trace(trace, *args, **kwargs) -> np.ndarray:
    tensor = oracle.DelayedScaling(*args, **kwargs)
    scales = [tensor.scale]
    for amax in trace:
        tensor.update(float(amax))
        scales.append(tensor.scale)
    return np.array(scales, np.float32)


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("history", [4, *map(slow, (1, 16))])
@pytest.mark.parametrize("fmt", ["e4m3", slow("e5m2")])
def test_delayed_equals_the_float64_oracle(fmt, history, margin):
    """Three traces at once, so that one tensor's history cannot leak into another's."""
    traces = np.stack([_trace(seed) for seed in range(3)], axis=1)
    ours = _ours(delayed(history, margin), traces, FORMATS[fmt])
    for column in range(3):
        expected = _oracle_trace(traces[:, column], history, margin, fmt)
        np.testing.assert_array_equal(ours[:, column], expected)
        assert len(np.unique(expected)) > 5, "the trace moves the scale"
    eager = delayed(history, margin)
    state = eager.init((3,))
    for step, amax in enumerate(traces[:25]):
        s = eager.scale(state, jnp.asarray(amax), FORMATS[fmt])
        np.testing.assert_array_equal(np.asarray(s), ours[step])
        state = eager.update(state, jnp.asarray(amax))


@pytest.mark.parametrize("history", [4, 16])
def test_a_nan_freezes_where_transformer_engine_passes_over_it(history):
    """TransformerEngine takes the maximum by C's fmaxf, which drops NaN; here it is kept.

    Without NaN both are the same. With one, ours stays at the last scale until the NaN has left
    the history.
    """
    clean = _trace(0, nan=False)
    kept = _oracle_trace(clean, history)
    np.testing.assert_array_equal(kept, _oracle_trace(clean, history, nan_counts=False))
    np.testing.assert_array_equal(_ours(delayed(history), clean, 448.0), kept)

    calm = np.linspace(1, 2, 50).astype(np.float32)
    calm[20] = np.nan
    ours = _ours(delayed(history), calm, 448.0)
    theirs = _oracle_trace(calm, history, nan_counts=False)
    different = np.flatnonzero(ours != theirs)
    np.testing.assert_array_equal(different, np.arange(22, 21 + history))
    assert (ours[different] == ours[21]).all(), "frozen, not something else"


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_overflowing_quotient(fmt):
    """FLT_MAX without a margin, as TransformerEngine has it; with one, 2**margin below it.

    TransformerEngine clips ``maximum * 2**-margin / amax``, here the margin comes after clipping.
    Both are finite, and ours is the more careful of the two.
    """
    trace = np.array([1e-37, 3e-37, 1.0], np.float32)
    ours = _ours(delayed(1), trace, FORMATS[fmt])
    np.testing.assert_array_equal(ours, _oracle_trace(trace, 1, fmt=fmt))
    assert ours[1] == FLT_MAX
    ours, theirs = _ours(delayed(1, 2), trace, FORMATS[fmt]), _oracle_trace(trace, 1, 2, fmt=fmt)
    assert ours[1] == FLT_MAX / 4 and ours[1] < theirs[1] <= FLT_MAX
    np.testing.assert_array_equal(ours[[0, 3]], theirs[[0, 3]])


def test_a_denormal_amax_is_zero_on_cpu():
    """It leaves the scale alone there; IEEE arithmetic, the oracle's, gives FLT_MAX."""
    if jax.default_backend() != "cpu":
        pytest.skip("only XLA:CPU flushes denormals")
    trace = np.array([2.0, 1e-40, 1e-40], np.float32)
    np.testing.assert_array_equal(_ours(delayed(1), trace, 448.0), [1, 224, 224, 224])
    np.testing.assert_array_equal(_oracle_trace(trace, 1), [1, 224, FLT_MAX, FLT_MAX])


@pytest.mark.parametrize("margin", [2, slow(0)])
@pytest.mark.parametrize("history", [4, *map(slow, (1, 16))])
@pytest.mark.parametrize("fmt", ["e5m2", slow("e4m3")])
def test_delayed_equals_flax(fmt, history, margin):
    """Flax's fp8_ops keeps exactly our stored scale 1 / s, at every step. It has 'max' only."""
    reason = "Flax's delayed scaling is the published oracle"
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops", reason=reason)
    trace = _trace(1)
    ours = _ours(delayed(history, margin), trace, FORMATS[fmt])
    scale, seen, theirs = jnp.ones((1,)), jnp.zeros((history,)), []
    for amax in [*trace, 1.0]:
        scale = fp8_ops.compute_scale(seen.max(axis=0), scale, jnp.float32(FORMATS[fmt]), margin)
        theirs.append(np.asarray(scale)[0])
        # Its history takes a tensor, whose amax it takes itself.
        seen = fp8_ops.compute_amax_history(jnp.asarray([-amax], jnp.float32), seen)
    np.testing.assert_array_equal(np.float32(1) / ours, np.array(theirs))


def test_flax_keeps_the_inverse_only():
    """Flax stores 1 / s, so the multiplier that it recovers may be one ulp off ours, never more.

    Its stored scale is ours exactly, and stays so while frozen, though it inverts it twice a
    step: a third inversion of a float32 number gives what the first gave.
    """
    reason = "Flax's delayed scaling is the published oracle"
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops", reason=reason)
    amax = np.exp(np.random.default_rng(0).standard_normal(20000)).astype(np.float32)
    s = np.asarray(scaling.multiplier(jnp.asarray(amax), 448.0))
    stored = fp8_ops.compute_scale(jnp.asarray(amax), jnp.ones(20000), jnp.float32(448))
    np.testing.assert_array_equal(np.asarray(stored), np.float32(1) / s)
    ulps = np.abs((np.float32(1) / np.asarray(stored)).view(np.int32) - s.view(np.int32))
    assert ulps.max() == 1 and 0.05 < (ulps > 0).mean() < 0.25
    frozen = fp8_ops.compute_scale(jnp.zeros(20000), stored, jnp.float32(448))
    np.testing.assert_array_equal(np.asarray(frozen), np.asarray(stored))


def _every_exponent() -> np.ndarray:
    """Normal amaxes: each exponent with mantissas at and beside 1, 1.5 and 1.75 (where 448 and
    57344, 1.75 times a power of two, divide exactly), and random ones."""
    mantissas = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
    mantissas += list(np.random.default_rng(0).integers(0, 1 << 23, 8))
    exponents = np.arange(1, 255, dtype=np.uint32)[:, None] << 23
    return (exponents | np.array(mantissas, np.uint32)).view(np.float32).ravel()


@pytest.mark.parametrize("fmt", FORMATS)
def test_dynamic_is_the_correctly_rounded_quotient(fmt):
    """Against a float64 quotient rounded once: exact, because 53 bits exceed twice 24 plus 2."""
    amax = _every_exponent()
    s = np.asarray(jax.jit(lambda a: dynamic().scale((), a, FORMATS[fmt]))(amax))
    expected = np.minimum(FORMATS[fmt] / amax.astype(np.float64), float(FLT_MAX))
    np.testing.assert_array_equal(s, expected.astype(np.float32))
    special = jnp.array([0.0, jnp.inf, jnp.nan])
    for policy in (dynamic(), power_of_two(dynamic())):
        s = np.asarray(policy.scale((), special, FORMATS[fmt]))
        np.testing.assert_array_equal(s, [1, np.nan, np.nan])


def _exact_power(numerator: float, amax: np.float32) -> float:
    """The largest power of two not above numerator / amax, in integers; at most 2**127."""
    quotient = Fraction(numerator) / Fraction(float(amax))
    n, d = quotient.numerator, quotient.denominator
    exponent = n.bit_length() - d.bit_length()
    if Fraction(2) ** exponent > quotient:
        exponent -= 1
    assert Fraction(2) ** exponent <= quotient < Fraction(2) ** (exponent + 1)
    return 2.0 ** min(exponent, 127)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("how", ["dynamic", "delayed", "delayed with a margin", "static"])
def test_power_of_two_at_every_exponent(fmt, how):
    """Exact powers and their neighbours too, where a floating-point logarithm goes wrong."""
    amax = _every_exponent()
    expected = np.array([_exact_power(FORMATS[fmt], a) for a in amax])
    if how == "static":
        for a, s in list(zip(amax, expected, strict=True))[1700:2300:37]:
            policy = power_of_two(static(float(a)))
            assert float(policy.scale((), jnp.zeros(()), FORMATS[fmt])) == s
        return
    if how == "dynamic":
        s = jax.jit(lambda a: power_of_two(dynamic()).scale((), a, FORMATS[fmt]))(amax)
    else:
        policy = power_of_two(delayed(2, margin=3 if "margin" in how else 0))
        s = _ours(policy, amax[None], FORMATS[fmt])[1]
        s = s * np.float32(8) if "margin" in how else s
    np.testing.assert_array_equal(np.asarray(s), expected)


def test_static():
    """One constant, whatever is seen, and no state."""
    for amax in (8.0, 3.3, 1e-30, 1e30):
        policy = static(amax)
        for seen in (0.0, 1e9, np.inf, np.nan):
            s = policy.scale(policy.init((2, 3)), jnp.full((2, 3), seen), 448.0)
            assert s.dtype == jnp.float32 and s.shape == (2, 3)
            np.testing.assert_array_equal(np.asarray(s), np.float32(448.0 / amax))
    assert static(8.0).update((), jnp.ones(3)) == ()


@pytest.mark.parametrize(
    "text,stateful,reads_amax",
    [
        ("dynamic", False, True),
        ("delayed(history=4)", True, False),
        ("static(amax=2.0)", False, False),
        ("power_of_two(dynamic)", False, True),
        ("power_of_two(delayed(history=4))", True, False),
        ("power_of_two(static(amax=2.0))", False, False),
    ],
)
def test_properties(text, stateful, reads_amax):
    policy = get_scaling_policy(text)
    assert (policy.stateful, policy.reads_amax) == (stateful, reads_amax)
    assert scaling.check_policy(policy) is policy
    assert scaling.never_saturates(policy) == (reads_amax and not stateful)
    for shape in ((), (3,), (2, 5)):
        state = policy.init(shape)
        s = policy.scale(state, jnp.ones(shape), 448.0)
        assert s.shape == shape and s.dtype == jnp.float32
        after = policy.update(state, jnp.ones(shape))
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize(
    "text,policy",
    [
        ("dynamic", dynamic()),
        ("dynamic()", dynamic()),
        (" dynamic ", dynamic()),
        ("delayed", delayed()),
        ("delayed()", delayed()),
        ("delayed(16)", delayed(16)),
        ("delayed(history=16, margin=1)", delayed(history=16, margin=1)),
        ("delayed(history=4, margin=-1)", delayed(history=4, margin=-1)),
        ("static(amax=8.0)", static(amax=8.0)),
        ("static(8.0)", static(8.0)),
        ("power_of_two(dynamic)", power_of_two(dynamic())),
        ("power_of_two( delayed( history=16 ) )", power_of_two(delayed(history=16))),
        ("power_of_two(power_of_two(dynamic))", power_of_two(power_of_two(dynamic()))),
    ],
)
def test_text_forms_name_the_same_object(text, policy):
    """Policies are compared by identity, so a config's text must find the very object."""
    assert get_scaling_policy(text) is policy
    assert get_scaling_policy(text) is get_scaling_policy(text)


@pytest.mark.parametrize(
    "one,other",
    [
        ("delayed", "delayed(history=1024)"),
        ("delayed(16)", "delayed(history=16)"),
        ("static(8.0)", "static(amax=8.0)"),
        ("static(amax=8)", "static(8.0)"),
        ("delayed(margin=1)", "delayed(1024, 1.0)"),
        ("power_of_two(delayed)", "power_of_two(delayed(history=1024))"),
    ],
)
def test_equal_arguments_give_one_object(one, other):
    """Promised by the module: recipes that name these would otherwise compare unequal."""
    assert get_scaling_policy(one) is get_scaling_policy(other)


@pytest.mark.parametrize(
    "text,sentence",
    [
        ("dynamc", "'dynamc' is not understood.* write dynamic, delayed"),
        ("", "is not understood"),
        ("delayed(", "is not understood"),
        ("1 + 1", "is not understood"),
        ("power_of_two()", "is not understood"),
        ("dynamic(3)", "is not understood"),
        ("static()", "is not understood"),
        ("delayed(steps=3)", "is not understood"),
        ("delayed(history='many')", "is not understood"),
        ("delayed(history=0)", r"delayed\(history=0\): write a whole number from 1 "),
        ("delayed(history=2.5)", r"delayed\(history=2.5\): write a whole number"),
        ("power_of_two(delayed(history=-1))", r"history=-1\): write a whole number from 1 "),
        ("delayed(margin='x')", "is not understood"),
        ("delayed(margin=200)", r"delayed\(margin=200\): write a number from -64 to 64"),
        ("delayed(algorithm='max')", "is not understood"),
        ("static(amax=0)", r"static\(amax=0\): write a number from 1e-30"),
        ("static(amax=1e999)", "write a number from 1e-30"),
        ("static(amax=1e-37)", "write a number from 1e-30"),  # 448 / amax is no float32
        ("no_such_module_here:policy", "cannot be imported.*'package.module:function'"),
        ("os:no_such_name", "cannot be imported.*no_such_name"),
        (":policy", "write 'package.module:function'"),
        ("os:", "write 'package.module:function'"),
    ],
)
def test_errors_of_texts(text, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        get_scaling_policy(text)
    assert "\n" not in str(caught.value), "one sentence, one line"


_USER = """
import jax.numpy as jnp
from fp8rl_jax.quant import ScalingPolicy

def make(init=lambda shape: jnp.zeros(shape), update=lambda state, amax: amax,
         scale=lambda state, amax, fp8_max: fp8_max / (state + 1)):
    return ScalingPolicy(init, scale, update)

def good(): return make()
def raises(): raise RuntimeError("no luck")
def another_type(): return 3
def takes_an_argument(x): return make()
def one_scale_for_all(): return make(scale=lambda state, amax, fp8_max: fp8_max / amax.max())
def a_bf16_scale(): return make(scale=lambda state, amax, fp8_max: amax.astype(jnp.bfloat16))
def branches(): return make(scale=lambda state, amax, fp8_max: state if amax > 0 else amax)
def wrong_init(): return make(init=lambda: 0)
def update_changes_structure(): return make(update=lambda state, amax: (state, amax))
def update_changes_shape(): return make(update=lambda state, amax: amax.max())
def update_changes_dtype(): return make(update=lambda state, amax: amax.astype(jnp.bfloat16))
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_policies.py").write_text(_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_policies", raising=False)
    get_scaling_policy.cache_clear()  # an earlier test's module of the same name
    yield "users_policies"
    sys.modules.pop("users_policies", None)
    get_scaling_policy.cache_clear()


def test_a_users_policy(user_module):
    policy = get_scaling_policy(f"{user_module}:good")
    assert policy.name == "users_policies:good" and policy is get_scaling_policy(
        "users_policies:good"
    )
    assert policy.stateful and not policy.reads_amax
    state = policy.update(policy.init((2,)), jnp.array([1.0, 3.0]))
    np.testing.assert_array_equal(np.asarray(policy.scale(state, state, 448.0)), [224, 112])


@pytest.mark.parametrize(
    "function,sentence",
    [
        ("raises", "fails with RuntimeError: no luck; it takes no argument"),
        ("takes_an_argument", "fails with TypeError"),
        ("another_type", "returned int; .*returns a fp8rl_jax.quant.ScalingPolicy"),
        ("one_scale_for_all", r"scale\(\) returned shape \(\) .* one multiplier per amax"),
        ("branches", r"fails on an amax of shape \(3, 2\) .* must work under jit"),
        ("wrong_init", r"fails on an amax of shape \(3, 2\) with TypeError"),
        ("update_changes_structure", r"update\(\) returns another structure, shape or dtype"),
        ("update_changes_shape", r"update\(\) returns another structure, shape or dtype"),
        ("update_changes_dtype", r"update\(\) returns another structure, shape or dtype"),
        ("a_bf16_scale", r"scale\(\) returned bfloat16; return float32"),
        ("missing", "cannot be imported"),
    ],
)
def test_errors_of_a_users_policy(user_module, function, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        get_scaling_policy(f"{user_module}:{function}")
    assert "\n" not in str(caught.value), "one sentence, one line"
