"""The divergence of a policy from another model, exact over the vocabulary at every token.

``KL(p || q) = sum_v p_v (log p_v - log q_v)`` over all tokens v, or those that a truncation kept,
by chunks of tokens, so that no probabilities of either model are stored.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels import prevent_fma
from fp8rl_jax.models.logprobs import (
    by_chunks_of_all_rows,
    head_logits,
    if_any,
    inverse_temperature,
)
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE, Parallel
from fp8rl_jax.models.truncation import Draws, kept_tokens
from fp8rl_jax.quant import Recipe, Weight


def _divergence_logprobs(recipe: Recipe, parallel: Parallel, hidden, head, other, draws: Draws):
    """Returns log-probabilities (M, V) of the policy and of the other model, the vector-Jacobian
    product of the former, and (M, V) bool, the tokens that are kept, or None for all."""
    inverse = inverse_temperature(draws.temperature)[:, None]
    keeps = None
    if draws.truncation is not None:
        scaled = prevent_fma(head_logits(hidden, head, recipe, parallel) * inverse)
        keeps, _ = kept_tokens(draws, scaled, scaled.shape[1])

    def logprobs(hidden, head):
        scaled = head_logits(hidden, head, recipe, parallel) * inverse
        if keeps is not None:
            scaled = jnp.where(keeps, scaled, -jnp.inf)
        return jax.nn.log_softmax(scaled, axis=-1)

    logp, pull = jax.vjp(logprobs, hidden, head)
    return logp, logprobs(*other), pull, keeps


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunk_divergences(
    recipe: Recipe,
    parallel: Parallel,
    hidden: jax.Array,
    head: Weight,
    other: tuple[jax.Array, jax.Array],
    draws: Draws,
) -> jax.Array:
    """Returns KL (M,) of rows, arrays (M, ...), from those of `other`; 0 if none of them counts."""
    return _divergence_forward(recipe, parallel, hidden, head, other, draws)[0]


def _divergence_forward(recipe: Recipe, parallel: Parallel, hidden, head, other, draws: Draws):
    def divergence():
        logp, logq, _, keeps = _divergence_logprobs(recipe, parallel, hidden, head, other, draws)
        p = jnp.exp(logp)
        d = logq - logp
        if keeps is not None:
            d = jnp.where(keeps, d, 0.0)
        # The sum of p e^d is 1, so this is the sum of -p d, in terms that are never negative.
        small = p * (jnp.expm1(jnp.minimum(d, 1)) - d)
        return jnp.where(d > 1, jnp.exp(logq) - p * (1 + d), small).sum(-1)

    return if_any(draws.counts, divergence), (hidden, head, other, draws)


def _divergence_backward(recipe: Recipe, parallel: Parallel, residual, cotangent):
    hidden, head, other, draws = residual

    def gradients():
        logp, logq, pull, keeps = _divergence_logprobs(recipe, parallel, hidden, head, other, draws)
        # Without the derivative of the first log p, which is the same for all tokens.
        of_token = jnp.exp(logp) * (logp - logq)
        if keeps is not None:
            of_token = jnp.where(keeps, of_token, 0.0)
        return pull(of_token * cotangent[:, None])

    return *if_any(draws.counts, gradients), None, None


_chunk_divergences.defvjp(_divergence_forward, _divergence_backward)


def token_divergences(
    hidden: jax.Array,
    head: Weight,
    other: tuple[jax.Array, jax.Array],
    draws: Draws,
    recipe: Recipe,
    parallel: Parallel = ONE_DEVICE,
) -> jax.Array:
    """Returns ``KL(p || q) = sum_v p_v (log p_v - log q_v)`` over the full vocabulary, or with a
    truncation over the kept tokens, p and q renormalised: (B, T) float32 in nats, by chunks of
    tokens; differentiable in p, and exactly 0 where p and q have equal logits.

    Args:
      hidden, head, draws, recipe, parallel: as for `token_logprobs`; they give p. The targets are
        read only with a truncation.
      other: hidden states (B, T, D') and head (D', V) of q, a constant.
    """
    other_hidden, other_head = other

    def divergence(hidden: tuple[jax.Array, jax.Array], draws: Draws) -> jax.Array:
        own, others = hidden
        return _chunk_divergences(recipe, parallel, own, head, (others, other_head), draws)

    return by_chunks_of_all_rows(divergence, (hidden, other_hidden), draws)
