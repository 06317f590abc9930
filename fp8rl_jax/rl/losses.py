"""Losses of policy gradients, per response token.

A loss is a function ``(logp, old, advantages, mask, sequences=None) -> (loss, stats)`` of arrays
(B, R): the log-probabilities now (differentiable) and before the first update, float32; advantages,
float32, constant; mask, bool. A row is a response; with `sequences` (B, K, R) bool it holds up to K
of them, and `sequences` says which tokens are of which; of some k none are. `loss` is float32 and
exactly 0 outside the mask, where inputs change no bit and get no gradient. `stats` holds {name:
(B, R) float32}: ratio, and 1 in clipped_low, clipped_high and clipped_dual where that bound removes
the gradient. The caller weighs tokens by an aggregation.

At equal log-probabilities every ratio is exactly 1, and the gradients of ppo, gspo, cispo and
reinforce are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from fp8rl_jax.base.bounds import bounded
from fp8rl_jax.kernels import sum_last
from fp8rl_jax.rl.corrections import MAX_LOG_RATIO

Stats = dict[str, jax.Array]
TokenLoss = Callable[..., tuple[jax.Array, Stats]]


def _inside(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns x where the mask is set, else 0; not by a product, which would keep NaN and inf."""
    return jnp.where(mask, x, 0.0)


def _log_ratio(logp: jax.Array, old: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns logp - old, clamped to +-20, beyond which no gradient flows; 0 outside the mask."""
    return jnp.clip(_inside(logp, mask) - _inside(old, mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)


@jax.custom_vjp
def _mean_of_response(x: jax.Array, mask: jax.Array, sequences: jax.Array | None) -> jax.Array:
    """Returns at each token of the mask the mean of x over its response's, (B, R), else 0.

    A linear function of x that is its own transpose, so its derivative sums in the same order.
    """
    x = _inside(x, mask)
    if sequences is None:
        mean = sum_last(x) / jnp.maximum(mask.sum(1), 1)
        return _inside(mean[:, None], mask)
    own = sequences & mask[:, None]
    mean = sum_last(jnp.where(own, x[:, None], 0.0)) / jnp.maximum(own.sum(2), 1)
    return _inside(jnp.take_along_axis(mean, own.argmax(1), axis=1), own.any(1))


_mean_of_response.defvjp(
    lambda x, mask, sequences: (_mean_of_response(x, mask, sequences), (mask, sequences)),
    lambda masks, cotangent: (_mean_of_response(cotangent, masks[0], masks[1]), None, None),
)


def _clip_stats(ratio, advantages, mask, low: float, high: float) -> Stats:
    """Returns the ratio, and which tokens the bounds `low` and `high` of the ratio clip."""
    stats = {
        "ratio": ratio * mask,
        "clipped_low": ((ratio < low) & (advantages < 0) & mask).astype(jnp.float32),
        "clipped_high": ((ratio > high) & (advantages > 0) & mask).astype(jnp.float32),
    }
    return jax.tree.map(stop_gradient, stats)


def _clipped(ratio, advantages, mask, clip_low: float, clip_high: float):
    value = -jnp.minimum(
        ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    )
    return value, _clip_stats(ratio, advantages, mask, 1.0 - clip_low, 1.0 + clip_high)


@bounded
def ppo(clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0) -> TokenLoss:
    """Returns the loss ``-min(r A, clip(r, 1 - low, 1 + high) A)``, r = exp(logp - old).

    PPO (arXiv:1707.06347, equation 7); `clip_high` above `clip_low` is DAPO's clip-higher
    (arXiv:2503.14476). With `dual_clip` c above 1 the loss of a negative advantage is at most
    ``-c A`` (arXiv:1912.09729); 0 leaves it out.
    """

    def loss(logp, old, advantages, mask, sequences=None):
        ratio = jnp.exp(_log_ratio(logp, old, mask))
        value, stats = _clipped(ratio, advantages, mask, clip_low, clip_high)
        if dual_clip:
            bound = -dual_clip * advantages
            dual = (advantages < 0) & (value > bound)
            value = jnp.where(dual, bound, value)
            stats["clipped_dual"] = stop_gradient((dual & mask).astype(jnp.float32))
        return _inside(value, mask), stats

    return loss


@bounded
def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """Returns PPO's loss with the response's ratio ``s = exp(mean(logp - old))`` at every token.

    A token's ratio has the value s and the gradient of its own log-probability (arXiv:2507.18071,
    sections 4.1 and 4.3).
    """

    def loss(logp, old, advantages, mask, sequences=None):
        of_row = stop_gradient(_mean_of_response(_log_ratio(logp, old, mask), mask, sequences))
        own = _inside(logp, mask)
        ratio = jnp.exp(jnp.minimum(of_row + (own - stop_gradient(own)), 10.0))
        value, stats = _clipped(ratio, advantages, mask, clip_low, clip_high)
        return _inside(value, mask), stats

    return loss


@bounded
def cispo(clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """Returns the loss ``-stop_gradient(clip(r, 1 - low, 1 + high)) A logp`` (MiniMax-M1,
    arXiv:2506.13585, equations 4 and 5). The largest weight, 1 + clip_high, is TRL's epsilon_high.
    """

    def loss(logp, old, advantages, mask, sequences=None):
        ratio = stop_gradient(jnp.exp(_log_ratio(logp, old, mask)))
        weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
        value = -(weight * advantages) * _inside(logp, mask)
        stats = _clip_stats(ratio, advantages, mask, 1.0 - clip_low, 1.0 + clip_high)
        return _inside(value, mask), stats

    return loss


def reinforce() -> TokenLoss:
    """Returns the loss ``-A logp``; `old` is not used, so the ratio is 1 by definition."""

    def loss(logp, old, advantages, mask, sequences=None):
        value = -advantages * _inside(logp, mask)
        return _inside(value, mask), _clip_stats(jnp.ones_like(logp), advantages, mask, 0.0, 2.0)

    return loss


@bounded
def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """Returns the loss ``-A (4 / tau) sigmoid(tau (r - 1))``, tau by the sign of A
    (arXiv:2511.20347)."""

    def loss(logp, old, advantages, mask, sequences=None):
        ratio = jnp.exp(_log_ratio(logp, old, mask))
        tau = jnp.where(advantages > 0, tau_positive, tau_negative)
        value = -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))
        return _inside(value, mask), _clip_stats(ratio, advantages, mask, 0.0, jnp.inf)

    return loss


@bounded
def gmpo(clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """Returns the loss ``-A exp(mean of clipped log-ratios)``, equal at a response's tokens.

    With s = 1 for A > 0, else -1, a log-ratio l becomes ``s min(s l, s clip(l, -low, high))``
    (arXiv:2507.20673). Aggregate it with seq_mean_token_mean.
    """

    def loss(logp, old, advantages, mask, sequences=None):
        each = _log_ratio(logp, old, mask)
        advantages = _inside(advantages, mask)
        sign = jnp.where(advantages > 0, 1.0, -1.0)
        clipped = sign * jnp.minimum(sign * each, sign * jnp.clip(each, -clip_low, clip_high))
        ratio = jnp.exp(_mean_of_response(clipped, mask, sequences))
        stats = _clip_stats(ratio * mask, advantages, mask, 0.0, jnp.inf)
        for name, where in (
            ("clipped_low", (each < -clip_low) & (advantages < 0)),
            ("clipped_high", (each > clip_high) & (advantages > 0)),
        ):
            stats[name] = stop_gradient((where & mask).astype(jnp.float32))
        return _inside(-advantages * ratio, mask), stats

    return loss


def none() -> TokenLoss:
    """Returns the loss 0: only divergences teach."""

    def loss(logp, old, advantages, mask, sequences=None):
        ratio = jnp.exp(_log_ratio(logp, old, mask))
        return jnp.zeros_like(logp), _clip_stats(ratio, advantages, mask, 0.0, jnp.inf)

    return loss


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
    "none": none,
}
