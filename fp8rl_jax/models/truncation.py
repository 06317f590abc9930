"""The tokens that may be drawn: top-k and top-p, and the distribution over those that are kept.

``p(t) = exp(x_t) / sum over kept v of exp(x_v)``, x = logits / temperature: what is drawn is what
is recorded and scored. The most likely tokens are kept, so a row's kept tokens are those up to a
*cut*, the least likely one of them: its x, and among tokens with that x the largest id.

The learner finds the kept tokens again, since its logits have the sampler's bits. Where other
weights score a response (a later update, a reference policy, rollouts of older versions, other
recipes), the sampler records them for each token: their ids, or a bit for each token of the
vocabulary, whichever is smaller.

A cut depends on its row alone, bit for bit: comparisons are exact, and masses are sums in the fixed
order of `sum_last`. The learner treats it as a constant: no gradient flows through the choice.

Not done: the choice within a GPU kernel; top-p on a vocabulary that is split over devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8rl_jax.kernels import max_last, sum_last

_BITS = 32  # tokens that one recorded number holds
_NO_TOKEN = np.iinfo(np.int32).max
_MAGNITUDE = np.int32(0x7FFFFFFF)


class Cut(NamedTuple):
    """The least likely kept token of each row.

    Attributes:
      value: (M, 1) float32, its logit divided by the temperature; -inf keeps all tokens.
      last: (M, 1) int32, the largest id that is kept of tokens with that value.
    """

    value: jax.Array
    last: jax.Array

    def keeps(self, scaled: jax.Array) -> jax.Array:
        """Returns (M, W) bool, which tokens of scaled logits (M, W) are kept; those of NaN are."""
        ids = jnp.arange(scaled.shape[1], dtype=jnp.int32)
        return ~((scaled < self.value) | ((scaled == self.value) & (ids > self.last)))


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn; at least one of the two leaves tokens out.

    Attributes:
      top_k: number of most likely tokens, of equal ones those with the smallest ids; 0 for all.
      top_p: of these, the most likely ones until their share of the probability reaches `top_p`,
        and all that are as likely as the last of them; 1.0 for all. Nucleus sampling (Holtzman et
        al., arXiv:1904.09751).
    """

    top_k: int = 0
    top_p: float = 1.0

    def cut(self, scaled: jax.Array, temperature: jax.Array) -> Cut:
        """Returns the cuts of scaled logits (M, W), of which columns without a token are -inf.

        Rows of `temperature` (M,) 0 are decoded greedily: all their tokens are kept.
        """
        rows = scaled.shape[0]
        value = jnp.full((rows, 1), -jnp.inf, jnp.float32)
        last = jnp.full((rows, 1), _NO_TOKEN, jnp.int32)
        candidates = scaled
        if self.top_k:
            value = _least_value(scaled, jnp.ones_like(scaled), np.float32(self.top_k))[:, None]
            last = _last_of_equal(scaled, value, self.top_k)[:, None]
            candidates = jnp.where(Cut(value, last).keeps(scaled), scaled, -jnp.inf)
        if self.top_p < 1.0:
            weight = lax.optimization_barrier(jnp.exp(candidates - max_last(scaled)[:, None]))
            wanted = sum_last(weight) * np.float32(self.top_p)
            threshold = _least_value(candidates, weight, wanted)[:, None]
            last = jnp.where(threshold > value, _NO_TOKEN, last)
            value = jnp.maximum(threshold, value)
        greedy = temperature[:, None] == 0
        return Cut(jnp.where(greedy, -jnp.inf, value), jnp.where(greedy, _NO_TOKEN, last))

    def _by_id(self, vocabulary: int) -> bool:
        return 0 < self.top_k < -(-vocabulary // _BITS)

    def recorded_numbers(self, vocabulary: int) -> int:
        """Returns C, how many int32 numbers record the kept tokens of a vocabulary."""
        return self.top_k if self._by_id(vocabulary) else -(-vocabulary // _BITS)

    def record(self, keeps: jax.Array, vocabulary: int) -> jax.Array:
        """Records the kept tokens, (M, W) bool with W at least the vocabulary: (M, C) int32."""
        keeps = keeps[:, :vocabulary]
        if self._by_id(vocabulary):
            counts = jnp.cumsum(keeps, axis=1, dtype=jnp.int32)
            wanted = jnp.arange(1, self.top_k + 1, dtype=jnp.int32)
            ids = jax.vmap(lambda of_row: jnp.searchsorted(of_row, wanted))(counts)
            return jnp.where(wanted <= counts[:, -1:], ids.astype(jnp.int32), _NO_TOKEN)
        width = self.recorded_numbers(vocabulary)
        keeps = jnp.pad(keeps, ((0, 0), (0, width * _BITS - vocabulary)))
        numbers = jnp.zeros((keeps.shape[0], width), jnp.int32)
        for bit in range(_BITS):  # token t has bit t // C of number t % C
            of_bit = keeps[:, bit * width : (bit + 1) * width].astype(jnp.int32)
            numbers = numbers | (of_bit << bit)
        return numbers

    def recorded(self, numbers: jax.Array, vocabulary: int, width: int) -> jax.Array:
        """Returns the tokens that `record` has recorded in `numbers` (M, C): (M, W) bool, W =
        `width`, which may be more than the vocabulary."""
        if self._by_id(vocabulary):
            rows = jnp.arange(numbers.shape[0])[:, None]
            nothing = jnp.zeros((numbers.shape[0], width), bool)
            return nothing.at[rows, numbers].set(True, mode="drop")
        bits = [lax.shift_right_logical(numbers, np.int32(bit)) & 1 for bit in range(_BITS)]
        keeps = jnp.concatenate(bits, axis=1)[:, :vocabulary] == 1
        return jnp.pad(keeps, ((0, 0), (0, width - vocabulary)))


@flax.struct.dataclass
class Draws:
    """Tokens that were drawn, and the distribution that they were drawn from.

    Attributes:
      targets: (B, T) int32, the tokens.
      temperature: (B, T) float32, by which a token's logits are divided; 0 counts as 1.
      truncation: which tokens could be drawn; None for the whole vocabulary.
      kept: (B, T, C) int32, which tokens were kept, by `Truncation.record`; None for those that
        the truncation keeps of the logits that score.
      counts: (B, T) bool, tokens whose results are read; chunks without any are not computed, and
        get 0. None for all. Of a chunk () bool, whether it has any.
    """

    targets: Any
    temperature: Any
    truncation: Truncation | None = flax.struct.field(pytree_node=False, default=None)
    kept: Any = None
    counts: Any = None


def _largest(
    reaches: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, steps: int
) -> jax.Array:
    """Returns (M,) int32, the largest number for which `reaches` (M,) -> (M,) bool holds, by
    halving the range from `low`, for which it holds, to `high`, for which it does not."""

    def halve(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        holds = reaches(middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    return lax.fori_loop(0, steps, halve, (low, high))[0]


def _least_value(scaled: jax.Array, weight: jax.Array, wanted) -> jax.Array:
    """Returns (M,) float32, the largest value of which the tokens that have it or more have at
    least the weight `wanted` together.

    Halves the range of float32 32 times, instead of sorting the vocabulary: a sum of fewer positive
    numbers in one order is never larger, also when rounded.
    """

    def of_order(order: jax.Array) -> jax.Array:
        """Returns the float32 number at a place, int32, in the order of all of them."""
        return lax.bitcast_convert_type(
            jnp.where(order < 0, order ^ _MAGNITUDE, order), jnp.float32
        )

    def reaches(order: jax.Array) -> jax.Array:
        return sum_last(jnp.where(scaled >= of_order(order)[:, None], weight, 0.0)) >= wanted

    infinity = np.float32(np.inf).view(np.int32)
    low = jnp.full(scaled.shape[:1], -infinity - 1, jnp.int32)
    high = jnp.full(scaled.shape[:1], infinity, jnp.int32)
    return of_order(_largest(reaches, low, high, 32))


def _last_of_equal(scaled: jax.Array, value: jax.Array, count: int) -> jax.Array:
    """Returns (M,) int32, the id of the last of `count` most likely tokens, if of those with the
    least likely one's `value` (M, 1) the smallest ids are taken."""
    ids = jnp.arange(scaled.shape[1], dtype=jnp.int32)

    def leaves_one(last: jax.Array) -> jax.Array:
        before = (scaled > value) | ((scaled == value) & (ids < last[:, None]))
        return sum_last(before.astype(jnp.float32)) < count

    low = jnp.zeros(scaled.shape[:1], jnp.int32)
    high = jnp.full(scaled.shape[:1], scaled.shape[1], jnp.int32)
    return _largest(leaves_one, low, high, scaled.shape[1].bit_length())


def kept_tokens(
    draws: Draws, scaled: jax.Array, vocabulary: int, cut: Cut | None = None
) -> tuple[jax.Array | None, Cut | None]:
    """Returns which tokens were kept when the targets were drawn, and the cut if it was not
    recorded and so is that of these logits; (None, None) without a truncation.

    A target is always kept: it was drawn, and with other logits than the sampler's it may be beyond
    their cut.

    Args:
      draws: M drawn tokens, arrays (M, ...).
      scaled: (M, W) float32, logits divided by the temperature; W is at least the vocabulary.
      vocabulary: number of tokens.
      cut: the cut of `scaled`, if it is known.

    Returns:
      (M, W) bool, and the cut.
    """
    if draws.truncation is None:
        return None, None
    width = scaled.shape[1]
    if draws.kept is not None:
        greedy = draws.temperature[:, None] == 0  # all tokens, which ids cannot record
        keeps = draws.truncation.recorded(draws.kept, vocabulary, width) | greedy
    else:
        cut = draws.truncation.cut(scaled, draws.temperature) if cut is None else cut
        keeps = cut.keeps(scaled)
    targets = draws.targets[:, None]
    return keeps | (jnp.arange(width, dtype=targets.dtype) == targets), cut
