"""The router of a layer with experts: which experts a token uses, and with what weights.

Two families (Qwen3 technical report, arXiv:2505.09388; DeepSeek-V3, arXiv:2412.19437, 2.1.2)::

                softmax                              sigmoid
    p         = softmax(x W_router)                  sigmoid(x W_router)          float32
    score     = p                                    p + b, in the best groups only
    S         = the k experts of largest score       ties: the lower number
    w_i       = p_i, or p_i / sum_{j in S} p_j       norm_topk_prob; times routed_scaling_factor

b is a correction that balances the experts' load without entering their weights; a group's score is
the sum of its two largest, and only the `topk_group` best groups count. b receives no gradient.

In gpt-oss (arXiv:2508.10925) the logits have a bias, and its softmax over the k selected logits is
the softmax with norm_topk_prob.

The router's weight is float32 in every form of the parameters. Its product adds in the canonical
order, its exponentials run over experts padded to a multiple of 16. Selection and weights are
separate functions: the learner can replay the experts that the sampler selected ("routing replay",
arXiv:2510.11370), with weights from the learner's logits.

Gradients: softmax or sigmoid, gather and renormalisation are differentiated; the selection is a
constant, as in Hugging Face transformers.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from fp8rl_jax.kernels import (
    EXP_LANES,
    block_matmul,
    broadcast_last,
    keep,
    kept,
    matmul_at_once,
    prevent_fma,
    sum_all,
    sum_last,
    sum_rows,
)
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.layers import kernel_init, vector
from fp8rl_jax.models.parallel.mesh import Parallel
from fp8rl_jax.quant.varying import varying_vjp

_TINY = 1e-20  # added to a sum of sigmoids before dividing by it, as in DeepSeek's code


@flax.struct.dataclass
class RouterWeights:
    """Parameters of a router.

    Attributes:
      kernel: (D, E) float32.
      bias: (E,) float32 of the logits (gpt-oss), or None.
      correction: (E,) float32, which enters only the selection; None with a softmax.
    """

    kernel: jax.Array
    bias: jax.Array | None
    correction: jax.Array | None


class Router(nn.Module):
    """A router's parameters: `kernel`, in some models `bias`, and with sigmoid scoring
    `e_score_correction_bias`."""

    config: ModelConfig
    parallel: Parallel

    @nn.compact
    def __call__(self) -> RouterWeights:
        shape = (self.config.hidden_size, self.config.num_experts)
        return RouterWeights(
            kernel=self.parallel.replicate(self.param("kernel", kernel_init(), shape)),
            bias=vector(self, self.config, self.parallel, "bias"),
            correction=vector(self, self.config, self.parallel, "e_score_correction_bias"),
        )


@functools.partial(varying_vjp, static=1)
def _router_product(implementation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return block_matmul(x, kernel, implementation=implementation)


def _router_product_forward(implementation, x, kernel):
    return _router_product(implementation, x, kernel), keep((x, kernel))


def _router_product_backward(implementation, residual, dy):
    x, kernel = kept(residual)
    dx = block_matmul(dy, kernel.T, implementation=implementation).astype(x.dtype)
    return dx, matmul_at_once(x.astype(jnp.float32).T, dy, implementation).astype(kernel.dtype)


_router_product.defvjp(_router_product_forward, _router_product_backward)


def router_logits(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, implementation: str = "auto"
) -> jax.Array:
    """Multiplies x (..., D) in the compute dtype by kernel (D, E) float32, in canonical order, and
    adds a bias (E,) float32 if there is one.

    Returns (..., E) float32. `implementation` as in `Recipe.kernels`. Keeps x for the backward pass
    in its dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    logits = _router_product(implementation, rows, kernel).reshape(*x.shape[:-1], -1)
    return logits if bias is None else _plus_bias(logits, bias)


@varying_vjp
def _plus_bias(logits: jax.Array, bias: jax.Array) -> jax.Array:
    return prevent_fma(logits) + bias


_plus_bias.defvjp(
    lambda logits, bias: (_plus_bias(logits, bias), None),
    lambda residual, dy: (dy, sum_rows(dy.reshape(-1, dy.shape[-1]))),
)


def _probabilities(config: ModelConfig, logits: jax.Array) -> jax.Array:
    """Returns softmax or sigmoid of float32 logits (..., E), float32."""
    experts = logits.shape[-1]
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, -experts % EXP_LANES)]
    padded = jnp.pad(logits, missing, constant_values=-jnp.inf)
    if config.scoring_func == "sigmoid":
        return (1.0 / (1.0 + jnp.exp(-padded)))[..., :experts]
    raised = jnp.exp(padded - lax.stop_gradient(padded.max(-1, keepdims=True)))
    inverse = broadcast_last(1.0 / sum_last(raised)[..., None], raised.shape[-1])
    return prevent_fma(raised * inverse)[..., :experts]


def select_experts(
    config: ModelConfig, logits: jax.Array, correction: jax.Array | None
) -> jax.Array:
    """Selects experts (..., k) int32 by logits (..., E): highest score first, ties by number."""
    logits = lax.stop_gradient(logits)
    if config.scoring_func == "softmax":  # softmax keeps the order of the logits
        return lax.top_k(logits, config.num_experts_per_tok)[1]
    return lax.top_k(selection_scores(config, logits, correction), config.num_experts_per_tok)[1]


def selection_scores(
    config: ModelConfig, logits: jax.Array, correction: jax.Array | None
) -> jax.Array:
    """Returns the scores that select experts, (..., E) float32; -inf outside the best groups.

    Args:
      config: shapes.
      logits: (..., E) float32.
      correction: of a shape that broadcasts with `logits`; None with a softmax.
    """
    score = _probabilities(config, logits)
    if correction is not None:
        score = score + lax.stop_gradient(correction)
    if config.n_group > 1:
        groups = score.reshape(*score.shape[:-1], config.n_group, -1)
        best = lax.top_k(groups, min(2, groups.shape[-1]))[0]
        kept = lax.top_k(best[..., 0] + best[..., -1], config.topk_group)[1]
        inside = (kept[..., None] == jnp.arange(config.n_group)).any(-2)
        score = jnp.where(inside[..., None], groups, -jnp.inf).reshape(score.shape)
    return score


def routing_weights(config: ModelConfig, logits: jax.Array, experts: jax.Array) -> jax.Array:
    """Returns weights (..., k) float32 of the selected `experts` (..., k), from logits (..., E)."""
    weights = jnp.take_along_axis(_probabilities(config, logits), experts, axis=-1)
    if config.norm_topk_prob:
        total = weights[..., :1]
        for slot in range(1, config.num_experts_per_tok):
            total = total + weights[..., slot : slot + 1]
        if config.scoring_func == "sigmoid":
            total = total + _TINY
        weights = prevent_fma(weights * broadcast_last(1.0 / total, weights.shape[-1]))
    if config.routed_scaling_factor != 1.0:
        weights = prevent_fma(weights * jnp.float32(config.routed_scaling_factor))
    return weights


def expert_tokens(config: ModelConfig, experts: jax.Array, valid: jax.Array) -> jax.Array:
    """Counts the `valid` (B, T) tokens of each expert in `experts` (B, T, k), (E,) int32."""
    counted = jnp.broadcast_to(valid[..., None], experts.shape).astype(jnp.int32)
    return jnp.zeros(config.num_experts, jnp.int32).at[experts].add(counted)


def sum_probability(config: ModelConfig, logits: jax.Array, valid: jax.Array) -> jax.Array:
    """Sums each expert's share of probability over the `valid` (B, T) tokens, (E,) float32.

    With sigmoids, the share is ``p_i / sum_j p_j`` (arXiv:2412.19437, equation 18).
    """
    shares = _probabilities(config, logits.reshape(-1, config.num_experts))
    if config.scoring_func == "sigmoid":
        shares = shares / broadcast_last(sum_last(shares)[..., None] + _TINY, shares.shape[-1])
    return sum_rows(jnp.where(valid.reshape(-1, 1), shares, 0.0))


def load_balance_loss(
    config: ModelConfig, expert_tokens: jax.Array, probability: jax.Array
) -> jax.Array:
    """Returns ``mean over layers of (E / k) sum_i f_i P_i``: 1 when balanced, up to E / k.

    f_i is the fraction of tokens that use expert i, P_i the mean of its share of probability over
    the tokens (Switch Transformer, arXiv:2101.03961, equation 4; divided by k as in DeepSeek-V3,
    equation 17). The gradient flows through P alone.

    For fixed counts of all tokens of an update, the loss is linear in the probabilities: the losses
    of parts of the tokens add up to the loss of all tokens.

    Args:
      expert_tokens: (S, E) int32, of the S layers with experts, over all tokens of the update.
      probability: (S, E) float32, `sum_probability` of each layer over these tokens, or a part.

    Returns:
      () float32.
    """
    slots = jnp.maximum(expert_tokens.sum(-1, keepdims=True), 1)  # k for each token
    share = lax.stop_gradient(expert_tokens / slots)  # f_i / k
    mean = probability / jnp.maximum(slots // config.num_experts_per_tok, 1)
    return config.num_experts * sum_all(prevent_fma(share * mean)) / share.shape[0]
