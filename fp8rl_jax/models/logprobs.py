"""The log-probability: float32, after temperature, over the tokens that may be drawn.

``logp(t) = logits_t / temperature - log sum_v exp(logits_v / temperature)``, over all tokens v, or
those that top-k and top-p keep (truncation.py). The sampler records it for the token it chose, the
learner recomputes it for the same token; both by `logprobs_of_logits`.

On a GPU both use kernels (kernels/gpu/head.py) that give a row the same bits. The learner's kernel
never stores the logits. The sampler stores the logits of its few rows, because it draws from them,
and its kernel reads them. So does the learner, for a chunk of tokens at a time, where it must find
the tokens that a truncation keeps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import (
    EXP_LANES,
    by_platform,
    gpu_kernels,
    max_last,
    prevent_fma,
    resolve,
    sum_last,
)
from fp8rl_jax.kernels.arrays import pad_to
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.parallel.columns import split_head
from fp8rl_jax.models.parallel.mesh import ONE_DEVICE, Parallel
from fp8rl_jax.models.parallel.specs import head_spec
from fp8rl_jax.models.truncation import Draws, kept_tokens
from fp8rl_jax.quant import BoundWeight, Recipe, Rows, Weight, compute_value, matmul
from fp8rl_jax.quant.varying import varying_vjp

_CHUNK = 1024  # tokens whose logits are in memory at once
_FEW = 256  # tokens of a chunk that may be left out


def output_head(params, config: ModelConfig, parallel: Parallel = ONE_DEVICE) -> Weight:
    """Returns the output head (D, V) of a parameter tree: `lm_head` or the transposed embedding."""
    head = params["embed_tokens"].T if config.tie_word_embeddings else params["lm_head"]
    return parallel.replicate(head, head_spec(head.shape[1], parallel.tensor))


def head_logits(
    hidden: jax.Array, head: Weight, recipe: Recipe, parallel: Parallel = ONE_DEVICE
) -> jax.Array:
    """Computes float32 logits (M, V) of hidden states (M, D). The head is never quantised."""
    rows = Rows(1 if parallel.uses_shard_map(recipe) else parallel.devices)
    product = functools.partial(matmul, recipe.for_head(), rows=rows)
    return split_head(recipe, parallel, product, hidden, head)


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """Returns 1/temperature in float32, taking 0 (greedy decoding) as 1."""
    temperature = jnp.where(temperature == 0, 1.0, temperature).astype(jnp.float32)
    return lax.optimization_barrier(1.0 / temperature)


def scaled_logits(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divides (M, V) logits by (M,) temperatures; pads with -inf to a multiple of 16 columns."""
    return _scaled(logits, inverse_temperature(temperature))


def _scaled(logits: jax.Array, inverse: jax.Array) -> jax.Array:
    scaled = prevent_fma(logits * inverse[:, None])
    missing = -logits.shape[1] % EXP_LANES
    return jnp.pad(scaled, ((0, 0), (0, missing)), constant_values=-jnp.inf)


def logprobs_of_logits(
    scaled: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probability of each target, and the entropy and normaliser of each row.

    Args:
      scaled: (M, W) float32 from `scaled_logits`.
      targets: (M,) int32.

    Returns:
      logp (M,) float32; entropy (M,) float32 in nats, without gradient; logsumexp (M,) float32.
    """
    top = lax.stop_gradient(max_last(scaled)[:, None])
    weight = jnp.exp(scaled - top)
    total = sum_last(weight)
    logsumexp = jnp.log(total) + top[:, 0]
    chosen = jnp.take_along_axis(scaled, targets[:, None], axis=1)[:, 0]
    finite = prevent_fma(scaled - top)  # -inf times a weight of 0 would be NaN
    entropy = jnp.log(total) - sum_last(prevent_fma(weight * finite)) / total
    return chosen - logsumexp, lax.stop_gradient(entropy), logsumexp


def _row_logprobs(
    recipe: Recipe, parallel: Parallel, hidden, head, targets, inverse
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (logp, entropy, logsumexp) of rows, from all their logits at once."""
    return logprobs_of_logits(
        _scaled(head_logits(hidden, head, recipe, parallel), inverse), targets
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunk_logprobs(
    recipe: Recipe, parallel: Parallel, hidden: jax.Array, head: Weight, draws: Draws
) -> tuple[jax.Array, jax.Array]:
    """Returns (logp, entropy) of rows, arrays (M, ...); 0 if none of them counts.

    Keeps the arguments, logsumexp and the cut for the backward pass, which recomputes the logits
    and no more: the gradient of a row's log-probability with respect to them is
    ``(one_hot(target) - softmax) * inverse``, over the tokens that are kept. The choice is made
    here, within the derivative's rules: JAX's own derivative of a `cond` within a loop would keep a
    copy of the head for every chunk.
    """
    return _chunk_forward(recipe, parallel, hidden, head, draws)[0]


def _chunk_forward(recipe: Recipe, parallel: Parallel, hidden, head, draws: Draws):
    def rows():
        logits = head_logits(hidden, head, recipe, parallel)
        scaled = scaled_logits(logits, draws.temperature)
        keeps, cut = kept_tokens(draws, scaled, logits.shape[1])
        of_rows = drawn_logprobs(
            logits, scaled, draws.targets, draws.temperature, recipe, parallel, keeps
        )
        return of_rows, cut

    (logp, entropy, logsumexp), cut = if_any(draws.counts, rows)
    return (logp, entropy), (hidden, head, draws, logsumexp, cut)


def if_any(counts: jax.Array | None, run: Callable):
    """Returns ``run()``, or zeros if `counts`, () bool, is False."""
    if counts is None:
        return run()

    def none():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))

    return lax.cond(counts, run, none)


def _chunk_backward(recipe: Recipe, parallel: Parallel, residual, cotangents):
    hidden, head, draws, logsumexp, cut = residual

    def gradients():
        inverse = inverse_temperature(draws.temperature)
        logits, pull = jax.vjp(lambda x: head_logits(x, head, recipe, parallel), hidden)
        targets = draws.targets[:, None]
        is_target = jnp.arange(logits.shape[1], dtype=targets.dtype) == targets
        scaled = logits * inverse[:, None]
        probability = jnp.exp(scaled - logsumexp[:, None])
        keeps, _ = kept_tokens(draws, prevent_fma(scaled), logits.shape[1], cut)
        if keeps is not None:
            probability = jnp.where(keeps, probability, 0.0)
        of_logits = (is_target - probability) * (cotangents[0] * inverse)[:, None]
        # The head's gradient is summed over all rows on every device, in one order on any mesh.
        rows, of_rows = parallel.replicate((hidden, of_logits))
        pull_head = jax.vjp(lambda w: head_logits(rows, w, recipe, parallel), head)[1]
        return *pull(of_logits), *jax.tree.map(parallel.replicate, pull_head(of_rows))

    return *if_any(draws.counts, gradients), None


_chunk_logprobs.defvjp(_chunk_forward, _chunk_backward)


def _by_kernel(recipe: Recipe, parallel: Parallel) -> bool:
    """Returns whether kernels compute log-probabilities; they take no sharded vocabulary."""
    return resolve(recipe.kernels) != "reference" and parallel.tensor == 1


@functools.partial(varying_vjp, static=1)
def _kernel_logprobs(recipe: Recipe, hidden, head, master, targets, inverse, count):
    """Runs `_chunk_logprobs` by kernels; the head's gradient goes to `master` if there is one.

    Of rows after the first `count` () int32, if it is not None, chunks are left out. With
    `Recipe.kernels` "auto" it runs `_row_logprobs`, of all rows, on platforms other than CUDA.
    """
    return _kernel_forward(recipe, hidden, head, master, targets, inverse, count)[0]


def _kernel_forward(recipe: Recipe, hidden, head, master, targets, inverse, count):
    own = recipe.for_head()
    operands = (compute_value(hidden, own), compute_value(head, own), targets, inverse, count)

    def kernel(hidden, head, targets, inverse, count):
        return gpu_kernels().head.head_logprobs(hidden, head, targets, inverse, count)

    def plain(*operands):  # within `by_own_rows`
        return _row_logprobs(recipe, ONE_DEVICE, *operands[:-1])

    logp, entropy, logsumexp = by_platform(recipe.kernels, kernel, plain, *operands)
    like = tuple(jnp.zeros((0,), x.dtype) for x in (hidden, head if master is None else master))
    return (logp, entropy), (operands, logsumexp, like, master is None)


def _kernel_backward(recipe: Recipe, residual, cotangents):
    operands, logsumexp, like, own = residual

    def kernel(operands, logsumexp, dlogp):
        hidden, head, targets, inverse, count = operands
        run = gpu_kernels().head.head_logprobs_vjp
        return run(hidden, head, targets, inverse, logsumexp, dlogp, count)

    def elsewhere(operands, logsumexp, dlogp):
        def logp(hidden, head):
            return _row_logprobs(recipe, ONE_DEVICE, hidden, head, *operands[2:-1])[0]

        gradients = jax.vjp(logp, *(x.astype(jnp.float32) for x in operands[:2]))[1](dlogp)
        return tuple(x.astype(jnp.float32) for x in gradients)

    found = by_platform(recipe.kernels, kernel, elsewhere, operands, logsumexp, cotangents[0])
    dhidden, dhead = (x.astype(kind.dtype) for x, kind in zip(found, like, strict=True))
    weights = (dhead, None) if own else (None, dhead)
    return dhidden, *weights, None, None, None


_kernel_logprobs.defvjp(_kernel_forward, _kernel_backward)


def _token_logprobs_by_kernel(
    hidden: jax.Array, head: Weight, draws: Draws, recipe: Recipe, parallel: Parallel
) -> tuple[jax.Array, jax.Array]:
    """Runs `token_logprobs` by kernels, each device on its rows.

    A device's tokens that count go first, so that chunks of others can be left out.
    """
    value, master = (head.value, head.master) if isinstance(head, BoundWeight) else (head, None)

    def run(hidden, targets, inverse, counts, value, master):
        batch, length, width = hidden.shape
        hidden = hidden.reshape(-1, width)
        targets = targets.reshape(-1)
        inverse = inverse.reshape(-1)
        if counts is None:
            of_rows = _kernel_logprobs(recipe, hidden, value, master, targets, inverse, None)
        else:
            order = jnp.argsort(~counts.reshape(-1), stable=True)
            back = jnp.argsort(order)
            hidden = rows_at(hidden[None], order[None], back[None])[0]
            of_sorted = _kernel_logprobs(
                recipe, hidden, value, master, targets[order], inverse[order], counts.sum()
            )
            of_rows = rows_at(jnp.stack(of_sorted, axis=1)[None], back[None], order[None])[0].T
        return tuple(x.reshape(batch, length) for x in of_rows)

    inverse = inverse_temperature(draws.temperature)
    return parallel.by_own_rows(
        run, hidden, draws.targets, inverse, draws.counts, shared=(value, master)
    )


def token_logprobs(
    hidden: jax.Array, head: Weight, draws: Draws, recipe: Recipe, parallel: Parallel = ONE_DEVICE
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities of drawn tokens, by chunks: (B, T, V) is never in memory.

    Args:
      hidden: (B, T, D) after the final norm; position t predicts draws.targets[:, t].
      head: (D, V), from `output_head`.
      draws: the tokens (B, T). Under a truncation log-probabilities and entropy are over the tokens
        that it kept.
      recipe: numerics.
      parallel: as for `forward`.

    Returns:
      (logp, entropy), each (B, T) float32. The entropy carries no gradient.
    """
    assert draws.temperature.shape == draws.targets.shape
    if _by_kernel(recipe, parallel) and draws.truncation is None:
        return _token_logprobs_by_kernel(hidden, head, draws, recipe, parallel)

    def logp(hidden: jax.Array, draws: Draws):
        return _chunk_logprobs(recipe, parallel, hidden, head, draws)

    return by_chunks_of_all_rows(logp, hidden, draws)


def by_chunks_of_all_rows(run: Callable, hidden: Any, draws: Draws) -> Any:
    """Computes ``run(hidden, draws)``, a tree of arrays (B, T), by chunks of tokens of all B rows.

    All devices have equally many rows of such a chunk, where chunks of tokens in order would lie on
    one. Its size does not depend on the number of devices, nor does the order in which gradients
    of chunks are added.

    Args:
      run: function of hidden states (M, D) and of draws, arrays (M, ...), with `Draws.counts` of a
        chunk.
      hidden: (B, T, D), or a tree of such arrays.
      draws: the tokens (B, T).
    """
    batch, length = draws.targets.shape
    tokens = _CHUNK if draws.counts is None else _FEW
    count = -(-length // max(tokens // batch, 1))
    chunk = -(-length // count)  # of nearly equal chunks, so that little is padding

    def chunks_of(x: jax.Array) -> jax.Array:
        x = pad_to(x, 1, chunk)
        x = x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(len(x), batch * chunk, *x.shape[3:])

    hidden, draws = jax.tree.map(chunks_of, (hidden, draws))
    if draws.counts is not None:
        draws = dataclasses.replace(draws, counts=draws.counts.any(1))
    if len(draws.targets) == 1:
        of_one = run(*jax.tree.map(lambda x: x[0], (hidden, draws)))
        of_chunks = jax.tree.map(lambda x: x[None], of_one)
    else:
        of_chunks = lax.map(lambda chunk: run(*chunk), (hidden, draws))

    def joined(x: jax.Array) -> jax.Array:
        return x.reshape(-1, batch, chunk).swapaxes(0, 1).reshape(batch, -1)[:, :length]

    return jax.tree.map(joined, of_chunks)


def drawn_logprobs(
    logits: jax.Array,
    scaled: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array,
    recipe: Recipe,
    parallel: Parallel = ONE_DEVICE,
    keeps: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (logp, entropy, logsumexp) of drawn tokens, (M,) float32 each, with the bits of
    `token_logprobs`.

    Args:
      logits: (M, V) float32, before temperature; scaled: (M, W), from `scaled_logits`.
      tokens: (M,) int32; temperature: (M,) float32.
      recipe: numerics.
      parallel: as for `forward`.
      keeps: (M, W) bool, the tokens that may be drawn; None for all.
    """
    if keeps is not None:
        scaled = jnp.where(keeps, scaled, -jnp.inf)
    if not _by_kernel(recipe, parallel):
        return logprobs_of_logits(scaled, tokens)
    if keeps is not None:
        logits = jnp.where(keeps[:, : logits.shape[1]], logits, -jnp.inf)

    def kernel(logits, scaled, tokens, inverse):
        return gpu_kernels().head.logprobs_of_logits(logits, tokens, inverse)

    def plain(logits, scaled, tokens, inverse):
        return logprobs_of_logits(scaled, tokens)

    run = functools.partial(by_platform, recipe.kernels, kernel, plain)
    inverse = inverse_temperature(temperature)
    return parallel.by_own_rows(run, logits, scaled, tokens, inverse)


@jax.custom_vjp
def rows_at(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns rows of x (B, T, D) by their index (B, R) int32: (B, R, D).

    Its derivative reads rows, too, by the inverse index (B, T) int32, -1 for a row that is not
    read. That of a gather adds them to zeros, which XLA:GPU does in no fixed order or by a sort.
    """
    return jnp.take_along_axis(x, index[:, :, None], axis=1)


def _rows_at_forward(x, index, inverse):
    return rows_at(x, index, inverse), inverse


def _rows_at_backward(inverse, cotangent):
    read = jnp.take_along_axis(cotangent, jnp.maximum(inverse, 0)[:, :, None], axis=1)
    return jnp.where(inverse[:, :, None] >= 0, read, 0), None, None


rows_at.defvjp(_rows_at_forward, _rows_at_backward)
