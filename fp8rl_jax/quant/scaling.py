"""Scaling policies: how a scale follows from the amax seen now and the amaxes seen before.

A policy is three pure functions, in the manner of an optax transformation::

    init(shape) -> state                   state for an array of `shape` scales
    scale(state, amax, fp8_max) -> s       the multiplier used now, float32, shaped as amax
    update(state, amax) -> state           once per optimiser step, with that step's largest amax

`dynamic` keeps no state and scales by the amax of the values that it quantises. `delayed`
(Micikevicius et al., arXiv:2209.05433; the semantics are TransformerEngine's) scales by amaxes of
earlier steps only. `static` is a constant. `power_of_two` wraps any of them.

Policies are called inside jit, grad, remat and a scan over layers: they must be built from jax
operations on their arguments. A policy with state is frozen within an optimiser step, for the
learner as for the rollout; its scales then depend on no row of the batch, which is what keeps the
two sides equal.

Two policies are the same if they are the same object, so the functions below return one object
for equal arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.base import user_code
from fp8rl_jax.base.bounds import bounded
from fp8rl_jax.base.errors import UserError, raised
from fp8rl_jax.kernels import folded

State = Any
_FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
_INF_BITS, _SIGN_MASK = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScalingPolicy:
    """A scaling policy: three pure functions (see the module), and the `name` that tables show.

    Args of the functions:
      shape: tuple of ints, the scales of one call site (one per block).
      state: what `init` or `update` returned; any pytree of arrays, () for none.
      amax: float32, shape `shape`, not negative; NaN or inf where the values hold NaN or inf.
      fp8_max: 448.0 for E4M3, 57344.0 for E5M2, 127.0 for INT8.
    """

    init: Callable[[tuple[int, ...]], State]
    scale: Callable[[State, jax.Array, float], jax.Array]
    update: Callable[[State, jax.Array], State]
    name: str = "user"

    def __repr__(self) -> str:
        return f"ScalingPolicy({self.name})"

    @functools.cached_property
    def stateful(self) -> bool:
        """Whether the policy keeps a state between optimiser steps."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.init((1, 1)))))

    @functools.cached_property
    def reads_amax(self) -> bool:
        """Whether the scale depends on the values that are being quantised (read off its jaxpr)."""
        state = jax.eval_shape(lambda: self.init((1, 1)))
        amax = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        jaxpr = jax.make_jaxpr(lambda s, a: self.scale(s, a, 448.0))(state, amax).jaxpr
        variable = jaxpr.invars[-1]
        used = [v for equation in jaxpr.eqns for v in equation.invars] + list(jaxpr.outvars)
        return any(v is variable for v in used)


def find_amax(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Returns the largest absolute value in float32; NaN wins over inf, inf over every number.

    The maximum is taken on the integer bits: exact, independent of order, and NaN cannot get lost
    (XLA:CPU drops it in a float32 maximum of absolute values).
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & _SIGN_MASK
    if bits.ndim - 1 in np.atleast_1d(axis) % bits.ndim:
        bits = folded(bits, jnp.maximum)
    return lax.bitcast_convert_type(bits.max(axis=axis), jnp.float32)


def is_finite_amax(value: jax.Array) -> jax.Array:
    """Returns True where an amax (float32, not negative) is neither NaN nor infinite."""
    return lax.bitcast_convert_type(value, jnp.uint32) < _INF_BITS


def multiplier(amax: jax.Array, fp8_max: float) -> jax.Array:
    """Returns ``fp8_max / amax``, a true quotient: 1 where amax is 0, at most the largest float32.

    NaN where amax is NaN or infinite, so that values that are not finite stay visible.
    """
    s = jnp.float32(fp8_max) / jnp.where(amax == 0, 1.0, amax)
    s = jnp.minimum(s, _FLOAT32_MAX)
    s = jnp.where(amax == 0, 1.0, s)
    return jnp.where(is_finite_amax(amax), s, jnp.nan)


@functools.cache
def dynamic() -> ScalingPolicy:
    """Returns current scaling: by the amax of the values themselves, without state."""
    return ScalingPolicy(
        init=lambda shape: (),
        scale=lambda state, amax, fp8_max: multiplier(amax, fp8_max),
        update=lambda state, amax: state,
        name="dynamic",
    )


@bounded
def delayed(history: int = 1024, margin: float = 0) -> ScalingPolicy:
    """Returns delayed scaling with TransformerEngine's semantics.

    ``s = fp8_max / a / 2**margin``, a being the largest amax of the last `history` optimiser
    steps. Where a is zero or not finite the scale does not change; an infinite amax therefore
    freezes the scale until it leaves the history. The first scale is 1.

    Args:
      history: number of optimiser steps remembered, at least 1.
      margin: powers of two of headroom, between -64 and 64.

    Raises:
      UserError: an argument outside its range.
    """
    return _delayed(int(history), float(margin))


@functools.cache
def _delayed(history: int, margin: float) -> ScalingPolicy:
    def init(shape):
        return {"history": jnp.zeros((history, *shape)), "amax": jnp.zeros(shape)}

    def scale(state, amax, fp8_max):
        s = multiplier(state["amax"], fp8_max)
        # Before the first accepted amax the scale is 1, whatever the margin.
        limits = np.finfo(np.float32)
        moved = jnp.clip(s * jnp.float32(2.0**-margin), limits.tiny, limits.max)
        return jnp.where(state["amax"] > 0, moved, s)

    def update(state, amax):
        seen = jnp.concatenate([amax[None], state["history"][:-1]])
        largest = find_amax(seen, 0)
        accepted = is_finite_amax(largest) & (largest > 0)
        return {"history": seen, "amax": jnp.where(accepted, largest, state["amax"])}

    return ScalingPolicy(init, scale, update, f"delayed(history={history}, margin={margin:g})")


@bounded
def static(amax: float) -> ScalingPolicy:
    """Returns a constant scale that maps `amax` to the largest FP8 value; larger values saturate.

    Raises:
      UserError: amax is not between 1e-30 and 1e30.
    """
    return _static(float(amax))


@functools.cache
def _static(amax: float) -> ScalingPolicy:
    return ScalingPolicy(
        init=lambda shape: (),
        scale=lambda state, now, fp8_max: jnp.full(now.shape, fp8_max / amax, jnp.float32),
        update=lambda state, now: state,
        name=f"static(amax={amax:g})",
    )


@functools.cache
def power_of_two(policy: ScalingPolicy) -> ScalingPolicy:
    """Returns `policy` with its multiplier rounded down to a power of two before quantising."""

    def scale(state, amax, fp8_max):
        s = policy.scale(state, amax, fp8_max)
        bits = lax.bitcast_convert_type(s, jnp.uint32) & np.uint32(0xFF800000)  # no mantissa
        return jnp.where(jnp.isnan(s), s, lax.bitcast_convert_type(bits, jnp.float32))

    return ScalingPolicy(policy.init, scale, policy.update, f"power_of_two({policy.name})")


_FACTORIES: dict[str, Callable] = {"dynamic": dynamic, "delayed": delayed, "static": static}
_EXAMPLE = (
    "write dynamic, delayed(history=1024, margin=0), static(amax=8.0), power_of_two(dynamic), or "
    "a function of yours as 'package.module:function'"
)


@functools.cache
def get_scaling_policy(text: str) -> ScalingPolicy:
    """Returns the policy that a config names.

    Args:
      text: ``dynamic``, ``delayed`` or ``delayed(history=16, margin=1)``, ``static(amax=8.0)``,
        ``power_of_two(...)`` around any of these, or ``package.module:function``, a function
        without arguments that returns a ScalingPolicy.

    Raises:
      UserError: there is no such policy, or the function fails.

    Example:
      >>> policy = get_scaling_policy("power_of_two(static(amax=8.0))")
      >>> float(policy.scale(policy.init(()), jnp.float32(5.0), fp8_max=448.0))  # from 448 / 8
      32.0
    """
    if ":" in text and "(" not in text:
        return _load(text)
    try:
        return _read(ast.parse(text.strip(), mode="eval").body)
    except UserError:
        raise
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        raise UserError(f"scaling policy {text!r} is not understood: {_EXAMPLE}") from None


def _read(node: ast.expr) -> ScalingPolicy:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "power_of_two" and not node.keywords:
            (inner,) = node.args
            return power_of_two(_read(inner))
        keywords = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        if len(keywords) < len(node.keywords):
            raise ValueError("an argument is there twice")
        return _FACTORIES[node.func.id](*map(ast.literal_eval, node.args), **keywords)
    if isinstance(node, ast.Name):
        return _FACTORIES[node.id]()
    raise ValueError("neither a name nor a call")


def _load(text: str) -> ScalingPolicy:
    policy = user_code.call(text, "scaling policy", ScalingPolicy)
    return check_policy(dataclasses.replace(policy, name=text))


def check_scales(policy: ScalingPolicy) -> None:
    """Raises UserError if a scale of a trial, before or after an update, is not finite and
    positive. Runs the policy's functions (`check_policy` only traces them), unless all are of this
    module: a trial costs a second."""
    functions = (policy.init, policy.scale, policy.update)
    if all(getattr(f, "__module__", None) == __name__ for f in functions):
        return
    amax = jnp.array([[0.0, 1e-30], [1e-3, 1.0], [448.0, 1e30]], jnp.float32)
    try:
        _try_scales(policy, amax)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a user's function raises, SystemExit too
        raise _fails(policy, f"an amax of {np.asarray(amax).tolist()}", error) from None


def _try_scales(policy: ScalingPolicy, amax: jax.Array) -> None:
    state = policy.init(amax.shape)
    for when in ("at the start", "after an update"):
        for fp8_max in (448.0, 57344.0):
            scales = np.asarray(policy.scale(state, amax, fp8_max))
            if bad := np.argwhere(~(np.isfinite(scales) & (scales > 0))).tolist():
                at = tuple(bad[0])
                raise UserError(
                    f"scaling policy {policy.name!r}: {when} scale() returned {scales[at]:g} for "
                    f"an amax of {float(amax[at]):g} and fp8_max={fp8_max:g}; return a finite "
                    "number above 0"
                )
        state = policy.update(state, amax)


def _fails(policy: ScalingPolicy, on: str, error: BaseException) -> UserError:
    return UserError(
        f"scaling policy {policy.name!r} fails on {on} with {raised(error)}; init(shape), "
        "scale(state, amax, fp8_max) and update(state, amax) must work under jit for any shape"
    )


def check_policy(policy: ScalingPolicy) -> ScalingPolicy:
    """Traces the three functions on shapes; returns `policy`, or raises UserError on a misfit."""
    amax = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    named = f"scaling policy {policy.name!r}"
    try:
        state = jax.eval_shape(lambda: policy.init((3, 2)))
        s = jax.eval_shape(lambda state, amax: policy.scale(state, amax, 448.0), state, amax)
        after = jax.eval_shape(policy.update, state, amax)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's function raises, SystemExit too
        raise _fails(policy, "an amax of shape (3, 2)", error) from None
    if getattr(s, "shape", None) != (3, 2):
        raise UserError(
            f"{named}: scale() returned shape {getattr(s, 'shape', s)} for an amax of shape "
            "(3, 2); return one multiplier per amax"
        )
    if s.dtype != jnp.float32:
        raise UserError(f"{named}: scale() returned {s.dtype}; return float32")
    for leaf in jax.tree.leaves(state):
        if leaf.dtype == bool or leaf.dtype.itemsize not in (1, 2, 4):
            raise UserError(
                f"{named}: init() returned {leaf.dtype}; states are numbers of one, two or four "
                "bytes, such as float32 or int32"
            )
    given, found = (jax.tree.map(lambda x: f"{x.dtype}{x.shape}", tree) for tree in (state, after))
    if given != found:
        raise UserError(
            f"{named}: update() returns another structure, shape or dtype than init(); return a "
            "state like the one it was given"
        )
    return policy


def never_saturates(policy: ScalingPolicy) -> bool:
    """Returns whether `policy` is `dynamic` or its `power_of_two`, whose scales clip nothing.

    These are the policies that the GPU kernels have."""
    return policy in (dynamic(), power_of_two(dynamic()))
