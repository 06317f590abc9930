"""Oracles for a layer of experts, with no sorting, no tiles and no gathering of rows.

`layer` is numpy in float64, one token and one expert at a time. `dense_layer` is jnp, for
gradients by plain automatic differentiation: every expert computes every token, and a (M, E) matrix
of weights, zero where an expert was not chosen, adds them up. Both follow the published definition:
softmax over all experts, the k most probable, their probabilities (divided by their sum, if asked).
"""

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ("gate_proj", "up_proj", "down_proj")


def matrices(experts):
    """(gate, up, down) of a parameter tree's {'gate_proj': {'kernel': ...}, ...}."""
    return tuple(experts[name]["kernel"] for name in NAMES)


def choose(x, router, top_k, renormalize):
    """Of one token (D,): its experts, the most probable first, and their weights, in float64."""
    logits = np.float64(x) @ np.float64(router)
    probability = np.exp(logits - logits.max())
    probability /= probability.sum()
    chosen = sorted(range(len(logits)), key=lambda expert: (-probability[expert], expert))[:top_k]
    weights = probability[chosen]
    return chosen, weights / weights.sum() if renormalize else weights


def layer(x, router, experts, top_k, renormalize):
    """(M, D) -> (M, D) float64."""
    gate, up, down = (np.float64(w) for w in experts)
    out = np.zeros(np.shape(x))
    for row, token in enumerate(np.float64(x)):
        for expert, weight in zip(*choose(token, router, top_k, renormalize), strict=True):
            opened = token @ gate[expert]
            hidden = opened / (1 + np.exp(-opened)) * (token @ up[expert])
            out[row] += weight * (hidden @ down[expert])
    return out


def dense_layer(x, router, experts, top_k, renormalize):
    """(M, D) float32 -> (M, D) float32, differentiable in all arguments."""
    gate, up, down = experts
    probability = jax.nn.softmax(x @ router)
    kth = jnp.sort(probability)[:, -top_k][:, None]
    weights = jnp.where(probability >= kth, probability, 0.0)
    if renormalize:
        weights = weights / weights.sum(1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("md,edf->emf", x, gate)) * jnp.einsum("md,edf->emf", x, up)
    return jnp.einsum("me,emf,efd->md", weights, hidden, down)
