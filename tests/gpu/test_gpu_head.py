"""Log-probabilities from hidden states and from logits in memory: one definition, equal bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_checks import (
    BOUNDS,
    assert_bitwise_equal,
    assert_close,
    float64_product,
    print_time,
    reports,
)

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels.gpu import head
from fp8rl_jax.kernels.gpu.matmul import matmul

pytestmark = pytest.mark.gpu

FEW = (1, 7, 64)  # rows at a time


def operands(source, rows: int, width: int, vocabulary: int) -> tuple:
    """Hidden states, targets, inverse temperatures, and the head (vocabulary, width)."""
    return (
        source.take(jnp.bfloat16, rows, width),
        jnp.arange(rows, dtype=jnp.int32) * 7 % vocabulary,
        source.scales(rows),
        source.take(jnp.bfloat16, vocabulary, width),
    )


def fused(hidden, targets, inverse, weight):
    return head.head_logprobs(hidden, weight.T, targets, inverse)


def from_memory(hidden, targets, inverse, weight):
    return head.logprobs_of_logits(matmul(hidden, weight.T), targets, inverse)


def test_log_probabilities(source, shape=(200, 1024, 5000)):
    """Without logits in memory, of logits, of few rows; against float64."""
    hidden, targets, inverse, weight = given = operands(source, *shape)
    whole, what = exact_jit(fused)(*given), f"log-probabilities {shape}"
    logits, size = float64_product(hidden, np.asarray(weight).T)
    logits, size = (x * np.asarray(inverse)[:, None] for x in (logits, size))
    top = logits.max(1)
    want = logits[np.arange(len(top)), np.asarray(targets)] - top
    want -= np.log(np.exp(logits - top[:, None]).sum(1))
    # Of the target's logit and of the sum over the vocabulary.
    assert_close(what, whole[0], want, size.max(1), 2 * BOUNDS["bf16"])
    in_memory = exact_jit(from_memory)
    assert_bitwise_equal(f"{what}: of logits, or without", in_memory(*given), whole)
    for few in FEW:
        part = slice(shape[0] // 2, shape[0] // 2 + few)
        alone = in_memory(hidden[part], targets[part], inverse[part], weight)
        of_whole = [x[part] for x in whole]
        assert_bitwise_equal(f"{what}: {few} rows alone, of logits", alone, of_whole)


@reports
def test_speed(source, shape=(4096, 4096, 151_936)):
    """Beside XLA's product and log-softmax, with the logits in memory."""

    def library(hidden, targets, inverse, weight):
        logits = jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)
        logp = jax.nn.log_softmax(logits * inverse[:, None], axis=-1)
        return jnp.take_along_axis(logp, targets[:, None], axis=-1)

    rows, width, vocabulary = shape
    moved = 2.0 * width * (rows + vocabulary)
    print_time(
        f"log-probabilities {shape}",
        2.0 * rows * width * vocabulary,
        moved,
        lambda: operands(source, *shape),
        fused,
        XLA=library,
    )
