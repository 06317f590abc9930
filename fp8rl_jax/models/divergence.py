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
from fp8rl_jax.models.truncation import Truncation, kept_tokens
from fp8rl_jax.quant import Recipe, Weight


def _divergence_logprobs(recipe, parallel, truncation, operands):
    """Returns log-probabilities (M, V) of the policy and of the other model, the vector-Jacobian
    product of the former, and (M, V) bool, the tokens that are kept, or None for all."""
    hidden, head, other, targets, temperature, recorded = operands
    inverse = inverse_temperature(temperature)[:, None]
    keeps = None
    if truncation is not None:
        scaled = prevent_fma(head_logits(hidden, head, recipe, parallel) * inverse)
        keeps, _ = kept_tokens(truncation, scaled, targets, temperature, recorded, scaled.shape[1])

    def logprobs(hidden, head):
        scaled = head_logits(hidden, head, recipe, parallel) * inverse
        if keeps is not None:
            scaled = jnp.where(keeps, scaled, -jnp.inf)
        return jax.nn.log_softmax(scaled, axis=-1)

    logp, pull = jax.vjp(logprobs, hidden, head)
    return logp, logprobs(*other), pull, keeps


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunk_divergences(
    recipe, parallel, truncation, hidden, head, other, targets, temperature, recorded, any_counts
):
    """Returns KL (M,) of rows from those of `other`: hidden states (M, D') and head (D', V).

    `any_counts` and what is kept as in `_chunk_logprobs`.
    """
    rows = hidden, head, other, targets, temperature, recorded, any_counts
    return _divergence_forward(recipe, parallel, truncation, *rows)[0]


def _divergence_forward(
    recipe, parallel, truncation, hidden, head, other, targets, temperature, recorded, any_counts
):
    operands = hidden, head, other, targets, temperature, recorded

    def divergence(operands):
        logp, logq, _, keeps = _divergence_logprobs(recipe, parallel, truncation, operands)
        p = jnp.exp(logp)
        d = logq - logp
        if keeps is not None:
            d = jnp.where(keeps, d, 0.0)
        # The sum of p e^d is 1, so this is the sum of -p d, in terms that are never negative.
        small = p * (jnp.expm1(jnp.minimum(d, 1)) - d)
        return jnp.where(d > 1, jnp.exp(logq) - p * (1 + d), small).sum(-1)

    return if_any(any_counts, divergence, operands), (operands, any_counts)


def _divergence_backward(recipe, parallel, truncation, residual, cotangent):
    operands, any_counts = residual

    def gradients(operands):
        logp, logq, pull, keeps = _divergence_logprobs(recipe, parallel, truncation, operands)
        # Without the derivative of the first log p, which is the same for all tokens.
        of_token = jnp.exp(logp) * (logp - logq)
        if keeps is not None:
            of_token = jnp.where(keeps, of_token, 0.0)
        return pull(of_token * cotangent[:, None])

    return (*if_any(any_counts, gradients, operands), None, None, None, None, None)


_chunk_divergences.defvjp(_divergence_forward, _divergence_backward)


def token_divergences(
    hidden: jax.Array,
    head: Weight,
    other_hidden: jax.Array,
    other_head: jax.Array,
    temperature: jax.Array,
    recipe: Recipe,
    parallel: Parallel = ONE_DEVICE,
    counts: jax.Array | None = None,
    targets: jax.Array | None = None,
    truncation: Truncation | None = None,
    recorded: jax.Array | None = None,
) -> jax.Array:
    """Returns ``KL(p || q) = sum_v p_v (log p_v - log q_v)`` over the full vocabulary, or with a
    `truncation` over the kept tokens, p and q renormalised: (B, T) float32 in nats, by chunks of
    tokens; differentiable in p, and exactly 0 where p and q have equal logits.

    Args:
      hidden, head, temperature, recipe, parallel, counts: as for `token_logprobs`; they give p.
      other_hidden, other_head: (B, T, D') and (D', V) of q, a constant.
      targets, truncation, recorded: as for `token_logprobs`; `targets` only with a truncation.
    """
    if temperature.ndim == 1:
        temperature = jnp.broadcast_to(temperature[:, None], hidden.shape[:2])

    def divergence(hidden, temperature, other, targets, recorded, any_counts=None):
        rows = hidden, head, (other, other_head), targets, temperature, recorded, any_counts
        return (_chunk_divergences(recipe, parallel, truncation, *rows),)

    rows = hidden, temperature, other_hidden, targets, recorded
    return by_chunks_of_all_rows(divergence, rows, counts, parallel.row_devices)[0]
