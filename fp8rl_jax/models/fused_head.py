"""Log-probabilities by the GPU kernels that never hold the logits of many tokens.

The learner's side is differentiable here: one `custom_vjp` around the kernels' two passes. The
sampler has the logits of its few rows in memory, because it draws from them, and takes the kernel
that reads them; both give a row the same bits (kernels/gpu/head.py). Where a program may run
elsewhere too (`Recipe.kernels` of "auto"), that takes the plain definition of logprobs.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fp8rl_jax.kernels import by_platform, gpu_kernels, resolve
from fp8rl_jax.models import tensor_parallel
from fp8rl_jax.quant import BoundWeight, Recipe, Weight, compute_value
from fp8rl_jax.quant.varying import share

# (hidden, head, targets, 1 / temperature) -> (logp, entropy, logsumexp), of M rows
Plain = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]


def applies(recipe: Recipe) -> bool:
    """Whether the kernels take log-probabilities: not where a vocabulary lies in parts."""
    return resolve(recipe.kernels) != "reference" and tensor_parallel.size() == 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logprobs(recipe: Recipe, plain: Plain, hidden, head, master, targets, inverse):
    return _forward(recipe, plain, hidden, head, master, targets, inverse)[0]


def _forward(recipe: Recipe, plain: Plain, hidden, head, master, targets, inverse):
    operands = (compute_value(hidden, recipe), compute_value(head, recipe), targets, inverse)

    def kernel(*operands):
        return gpu_kernels().head.head_logprobs(*operands)

    logp, entropy, logsumexp = by_platform(recipe.kernels, kernel, plain, *operands)
    like = tuple(jnp.zeros((0,), x.dtype) for x in (hidden, head if master is None else master))
    return (logp, entropy), (operands, logsumexp, like, master is None)


def _backward(recipe: Recipe, plain: Plain, residual, cotangents):
    operands, logsumexp, like, own = residual

    def kernel(operands, logsumexp, dlogp):
        return gpu_kernels().head.head_logprobs_vjp(*operands, logsumexp, dlogp)

    def elsewhere(operands, logsumexp, dlogp):
        def logp(hidden, head):
            return plain(hidden, head, *operands[2:])[0]

        gradients = jax.vjp(logp, *(x.astype(jnp.float32) for x in operands[:2]))[1](dlogp)
        return tuple(x.astype(jnp.float32) for x in gradients)

    found = by_platform(recipe.kernels, kernel, elsewhere, operands, logsumexp, cotangents[0])
    dhidden, dhead = (x.astype(kind.dtype) for x, kind in zip(found, like, strict=True))
    return (dhidden, dhead, None, None, None) if own else (dhidden, None, dhead, None, None)


_logprobs.defvjp(_forward, _backward)


def token_logprobs(
    hidden: jax.Array,
    head: Weight,
    targets: jax.Array,
    inverse_temperature: jax.Array,
    recipe: Recipe,
    plain: Plain,
) -> tuple[jax.Array, jax.Array]:
    """`logprobs.token_logprobs` by the kernels, every device of a mesh with its own rows.

    Args:
      hidden: (B, T, D).
      head: (D, V), an array or a BoundWeight.
      targets: (B, T) int32.
      inverse_temperature: (B,) float32.
      recipe: numerics.
      plain: the same for rows, in jnp, where the program runs without a GPU.

    Returns:
      (logp, entropy), each (B, T) float32. The entropy carries no gradient.
    """
    value, master = (head.value, head.master) if isinstance(head, BoundWeight) else (head, None)

    def run(hidden, targets, inverse, value, master):
        batch, length, width = hidden.shape
        inverse = jnp.broadcast_to(inverse[:, None], (batch, length)).reshape(-1)
        operands = (hidden.reshape(-1, width), value, master, targets.reshape(-1), inverse)
        found = _logprobs(recipe, plain, *share(*operands))
        return tuple(x.reshape(batch, length) for x in found)

    logp, entropy = tensor_parallel.by_own_rows(
        run, hidden, targets, inverse_temperature, shared=(value, master)
    )
    return logp, jax.lax.stop_gradient(entropy)


def drawn_logprobs(
    logits: jax.Array,
    scaled: jax.Array,
    tokens: jax.Array,
    inverse_temperature: jax.Array,
    recipe: Recipe,
    plain: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Log-probabilities of drawn tokens from logits (M, V): the bits of `token_logprobs`.

    Args:
      logits: (M, V) float32, before temperature; scaled: (M, W), of `scaled_logits`.
      tokens: (M,) int32; inverse_temperature: (M,) float32.
      recipe: numerics.
      plain: (scaled, tokens) -> (M,) in jnp, where the program runs without a GPU.
    """

    def kernel(logits, scaled, tokens, inverse):
        return gpu_kernels().head.logprobs_of_logits(logits, tokens, inverse)[0]

    def elsewhere(logits, scaled, tokens, inverse):
        return plain(scaled, tokens)

    def run(*operands):
        return by_platform(recipe.kernels, kernel, elsewhere, *operands)

    return tensor_parallel.by_own_rows(run, logits, scaled, tokens, inverse_temperature)
