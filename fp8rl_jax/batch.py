"""The learner's batch: one sequence a row, or several.

`pack` puts sequences into rows of equal capacity, so that the learner computes hardly any padding.
The rows are the micro-batches of the devices; how many are needed follows from the lengths, and the
program computes no others. `unpack` gives results back by response. Both run on the host, on whole
batches, and depend on lengths and prompts alone: all processes pack alike.

First-fit decreasing fills the rows (Johnson, 1973: at most 11/9 of the fewest). Rows of similar
cost in attention share a micro-batch, because its devices wait for each other.

Responses to one prompt may share the whole pages of it within a row. The last, partial page belongs
to each of them, and with it the token that predicts a response's first one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.models.kv_cache import PAGE, pages_of
from fp8rl_jax.models.packing import packed
from fp8rl_jax.models.tokens import Tokens
from fp8rl_jax.models.truncation import Draws, Truncation
from fp8rl_jax.rl.aggregation import token_mean

Array = Any  # numpy on the host, jax.Array on the device


@flax.struct.dataclass
class Packing:
    """Where the tokens of several sequences are in rows of T slots; R = T.

    Attributes:
      starts: (B, T) int32, as for `packing.packed`: the slot of the first own token of each token's
        sequence, T for padding.
      predictors: (B, R) int32, the slot whose hidden state predicts each response token.
      predicted: (B, T) int32, the response token that a slot predicts, or -1.
      shared: (B, T / PAGE, 2) int32, as for `packing.packed`, or None if no prompt is shared.
    """

    starts: Array
    predictors: Array
    predicted: Array
    shared: Array | None = None


@flax.struct.dataclass
class Batch:
    """Sequences to learn from, one row per response; with `packing` several a row.

    Attributes:
      tokens: (B, T) int32, prompt then response, right-padded.
      prompt_lengths: (B,) int32, tokens of the prompt; None with `packing`.
      targets: (B, R) int32, the response; with `packing` the responses of a row, one after another,
        as in all arrays (B, R).
      mask: (B, R) float32, 1 for response tokens that the policy drew; 0 for what an environment
        said between them.
      temperature: (B,) float32, temperature of the rollout; (B, R) with `packing`.
      advantages: (B, R) float32.
      weights: (B, R) float32, the aggregation's; 0 for a token that does not count.
      rollout_weights: (B, R) float32, the correction's; 1 without a correction. The loss is the sum
        over tokens of weights times rollout_weights times the token's loss.
      old_logprobs: (B, R) float32, log-probabilities before the first update.
      ref_logprobs: (B, R) float32, log-probabilities under the reference policy.
      routing: {name of taps.ROUTING: (B, L, T, top_k)}, results of the rollout's routers to replay;
        {} for the learner's own routing.
      packing: where the sequences of a row are, or None.
      frozen_hidden: (B, R, D), a frozen model's hidden state that predicts each response token, for
        a loss with the divergence from that model; else None.
      frozen_head: (D, V), its output head, which has no rows; None while they are split.
      lengths: (B,) int32, number of tokens of prompt and response together; None with `packing`.
      truncation, kept: as in `Rollout`: log-probabilities are over the tokens that were kept when
        the targets were drawn. Without `kept` they are those that the truncation keeps of the
        learner's logits, so its weights must be those that drew.
    """

    tokens: Array
    prompt_lengths: Array
    targets: Array
    mask: Array
    temperature: Array
    advantages: Array
    weights: Array
    rollout_weights: Array
    old_logprobs: Array
    ref_logprobs: Array
    routing: dict[str, Array] = flax.struct.field(default_factory=dict)
    packing: Packing | None = None
    frozen_hidden: Array = None
    frozen_head: Array = None
    lengths: Array = None
    truncation: Truncation | None = flax.struct.field(pytree_node=False, default=None)
    kept: Array = None

    def inputs(self, rope: tuple[jax.Array, jax.Array]) -> Tokens:
        """Returns what a forward pass reads, with the tables `rope`."""
        if self.packing is None:
            return Tokens.of(self.tokens, rope, lengths=self.lengths)
        places = packed(self.packing.starts, len(rope[0]), self.packing.shared)
        return Tokens(self.tokens, places, self.valid, rope)

    @property
    def predictions(self) -> tuple[jax.Array, jax.Array]:
        """The slot that predicts each response token, (B, R) int32, and the response token that
        each slot predicts, (B, T) int32, or -1."""
        if self.packing is not None:
            return self.packing.predictors, self.packing.predicted
        before = self.prompt_lengths[:, None] - 1
        responses = self.targets.shape[1]
        of_slot = jnp.arange(self.tokens.shape[1]) - before
        of_slot = jnp.where((of_slot >= 0) & (of_slot < responses), of_slot, -1)
        return before + jnp.arange(responses), of_slot

    @property
    def draws(self) -> Draws:
        """The response tokens, and the distribution that they were drawn from."""
        of_rows = self.temperature.reshape(len(self.targets), -1)
        by_token = jnp.broadcast_to(of_rows, self.targets.shape)
        counts = None if self.packing is None else self.mask > 0
        return Draws(self.targets, by_token, self.truncation, self.kept, counts)

    @property
    def valid(self) -> jax.Array:
        """(B, T) bool, whether a token is one of a sequence."""
        slots = self.tokens.shape[1]
        if self.packing is None:
            return jnp.arange(slots) < self.lengths[:, None]
        return self.packing.starts < slots

    @property
    def sequences(self) -> jax.Array | None:
        """(B, K, R) bool, whether tokens are of the response whose sequence begins with page k of
        its row; False for all of a page with which none begins. None for one sequence a row."""
        if self.packing is None:
            return None
        starts = jnp.take_along_axis(self.packing.starts, self.packing.predictors, axis=1)
        pages = jnp.arange(self.tokens.shape[1] // PAGE)
        return ((starts // PAGE)[:, None] == pages[:, None]) & (self.mask > 0)[:, None]


_BY_RESPONSE = (  # fields (B, R)
    "targets",
    "mask",
    "advantages",
    "weights",
    "rollout_weights",
    "old_logprobs",
    "ref_logprobs",
)


def make_batch(
    tokens, prompt_lengths, targets, mask, temperature, advantages=None, **fields
) -> Batch:
    """Returns a batch on the host; all tokens of a response are drawn, unless `lengths` are given.

    Args:
      tokens, prompt_lengths, targets, temperature: see `Batch`.
      mask: (B, R), bool or 0 and 1.
      advantages: (B, R), or (B,) for all tokens of a response; None for 1.
      **fields: further fields of `Batch`. Defaults: weights of the mean over all tokens, no
        correction, log-probabilities of 0, no routing.
    """
    ones = np.ones(targets.shape, np.float32)
    values = ones if advantages is None else np.asarray(advantages, np.float32)
    neutral = {
        "weights": token_mean(np.asarray(mask) > 0).astype(np.float32),
        "rollout_weights": ones,
        "old_logprobs": 0 * ones,
        "ref_logprobs": 0 * ones,
        "lengths": (prompt_lengths + np.asarray(mask).sum(1)).astype(np.int32),
    }
    return Batch(
        tokens,
        prompt_lengths,
        targets,
        np.asarray(mask, np.float32),
        temperature,
        values.reshape(len(ones), -1) * ones,
        **{**neutral, **fields},
    )


def of_sequences(tokens: np.ndarray, lengths: np.ndarray, slots: int = 1) -> Batch:
    """Returns sequences (B, T) of `lengths` (B,) as a batch without responses, R = `slots`."""
    nothing = np.zeros((len(tokens), slots), np.int32)
    return make_batch(tokens, lengths, nothing, nothing > 0, np.ones(len(tokens), np.float32))


def slots_of(tokens: int) -> int:
    """Returns how many slots of a row a sequence of `tokens` tokens takes."""
    return PAGE * pages_of(tokens)


def most_micro_batches(sequences: int, longest: int, capacity: int, devices: int) -> int:
    """Returns how many micro-batches `sequences` sequences need if all are of the `longest`
    length, in rows of `capacity` slots, one for each of `devices` devices."""
    return -(-_most_rows(sequences, longest, capacity) // devices)


def _most_rows(sequences: int, longest: int, capacity: int) -> int:
    return -(-sequences // (capacity // slots_of(longest)))


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where `pack` put each of N sequences.

    Attributes:
      rows: (N,) its row.
      starts: (N,) slot of its first own token; responses: (N,) of its first response token among
        the row's.
      shared: (N,) tokens before the own ones, which an earlier sequence of its row computes.
      lengths, prompts: (N,) its tokens, and those of its prompt.
      micro_batches: number of micro-batches that hold anything.
    """

    rows: np.ndarray
    starts: np.ndarray
    responses: np.ndarray
    shared: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    micro_batches: int

    def unpack(self, packed: np.ndarray, slots: int) -> np.ndarray:
        """Returns values (B, R) of packed response tokens by sequence, (N, slots); 0 elsewhere."""
        found = np.zeros((len(self.rows), slots), packed.dtype)
        for index, (row, first, count) in enumerate(
            zip(self.rows, self.responses, self.lengths - self.prompts, strict=True)
        ):
            found[index, :count] = packed[row, first : first + count]
        return found


def _fill(sizes: np.ndarray, capacity: int, most: int) -> np.ndarray:
    """Returns the row of each size, (N,), among rows of `capacity` slots, at most `most`.

    The largest size goes first, each to the first row that has room for it. If that takes more
    rows, each row gets as many sizes as it could take of the largest; `most` rows must suffice for
    N of that size.
    """
    rows = np.zeros(len(sizes), np.int64)
    left = np.full(len(sizes), capacity)
    for index in np.argsort(-sizes, kind="stable"):
        rows[index] = np.argmax(left >= sizes[index])
        left[rows[index]] -= sizes[index]
    return rows if rows.max() < most else np.arange(len(sizes)) // (capacity // sizes.max())


def _fill_by_prompt(
    own: np.ndarray, whole: np.ndarray, prompts: np.ndarray, capacity: int, most: int
) -> np.ndarray | None:
    """Assigns sequences to rows as `_fill`, those of a prompt to as few as they need; None if
    `most` rows do not suffice. `own`: (N,) slots of each besides `whole`, those of its prompt."""
    rows = np.zeros(len(own), np.int64)
    left = np.full(most, capacity)
    groups = [np.flatnonzero(prompts == prompt) for prompt in np.unique(prompts)]
    for group in sorted(groups, key=lambda g: -(whole[g[0]] + own[g].sum())):
        waiting = group[np.argsort(-own[group], kind="stable")]
        while len(waiting):
            fits = left >= whole[group[0]] + own[waiting].sum()
            row = np.argmax(fits) if fits.any() else np.argmax(left)
            room = left[row] - whole[group[0]]
            taken = np.zeros(len(waiting), bool)
            for index, size in enumerate(own[waiting]):
                taken[index] = size <= room
                room -= size * taken[index]
            if not taken.any():
                return None
            rows[waiting[taken]] = row
            left[row] = room
            waiting = waiting[~taken]
    return rows


@dataclasses.dataclass(frozen=True)
class SharedPrompts:
    """Prompts that sequences may share.

    Attributes:
      numbers: (N,) number of each sequence's prompt; those with one number have the same tokens.
      slots: (N,) slots of its whole pages, without that of its last token.
    """

    numbers: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray) -> SharedPrompts:
        """Finds the equal ones of the prompts of `lengths` (N,) at the start of `tokens` (N, T)."""
        seen: dict[bytes, int] = {}
        rows = (row[:length].tobytes() for row, length in zip(tokens, lengths, strict=True))
        numbers = np.array([seen.setdefault(row, len(seen)) for row in rows])
        return cls(numbers, np.maximum(lengths - 1, 0) // PAGE * PAGE)


def assign(
    lengths: np.ndarray,
    longest: int,
    capacity: int,
    devices: int,
    prompts: SharedPrompts | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Assigns sequences to rows.

    Args:
      lengths: (N,) tokens of each sequence, at most `longest`.
      longest: most tokens that a sequence could have; fixes the number of rows.
      capacity: slots of a row, a multiple of PAGE.
      devices: number of devices that share the rows of a batch.
      prompts: those to share, or None.

    Returns:
      rows (N,); the slots of the sequences' first own tokens in them (N,); the slots of the first
      tokens of their prompts, which are others where a prompt is shared (N,); micro-batches that
      hold anything; and M, micro-batches that N sequences may need. Row d * M + i is the i-th of
      device d; the first micro-batches are filled.
    """
    sizes = PAGE * pages_of(np.asarray(lengths, np.int64))
    most = _most_rows(len(sizes), longest, capacity)
    if prompts is None:
        prompts = SharedPrompts(np.arange(len(sizes)), 0 * sizes)
    own = sizes - prompts.slots
    rows = _fill(sizes, capacity, most)
    if (prompts.slots > 0).any():
        by_prompt = _fill_by_prompt(own, prompts.slots, prompts.numbers, capacity, most)
        if by_prompt is not None and by_prompt.max() <= rows.max():
            rows = by_prompt
    costs = np.zeros(most)
    np.add.at(costs, rows, np.square(sizes, dtype=float))
    rank = np.empty(most, np.int64)
    rank[np.argsort(-costs, kind="stable")] = np.arange(most)
    rows = rank[rows]
    starts = np.zeros_like(sizes)
    begins = np.zeros_like(sizes)
    used = np.zeros(most, np.int64)
    held: dict[tuple[int, int], int] = {}  # where a row holds a prompt
    for index in np.lexsort((prompts.numbers, rows)):
        row = rows[index]
        starts[index] = begins[index] = used[row]
        if prompts.slots[index]:
            begins[index] = held.setdefault((row, prompts.numbers[index]), used[row])
        used[row] += sizes[index] if begins[index] == starts[index] else own[index]
    micro_batches = most_micro_batches(len(sizes), longest, capacity, devices)
    place = rows % devices * micro_batches + rows // devices
    return place, starts, begins, int(rows.max()) // devices + 1, micro_batches


def pack(
    batch: Batch, longest: int, capacity: int, devices: int, share_prompts: bool = False
) -> tuple[Batch, Slots]:
    """Packs a batch on the host; its routing may be on the devices.

    Args:
      batch: one sequence a row, N rows.
      longest, capacity, devices: as for `assign`.
      share_prompts: compute the whole pages of a prompt once for the sequences of a row that begin
        with it.

    Returns:
      (the packed batch, where its sequences are).
    """
    lengths = np.asarray(batch.lengths)
    prompts = np.asarray(batch.prompt_lengths)
    given = SharedPrompts.of(np.asarray(batch.tokens), prompts) if share_prompts else None
    rows, starts, begins, filled, count = assign(lengths, longest, capacity, devices, given)
    shared = 0 * starts if given is None else np.where(begins == starts, 0, given.slots)
    shape = count * devices, capacity
    names = _BY_RESPONSE if batch.kept is None else (*_BY_RESPONSE, "kept")
    arrays = {name: np.asarray(getattr(batch, name)) for name in names}
    found = {name: np.zeros((*shape, *x.shape[2:]), x.dtype) for name, x in arrays.items()}
    tokens, first = np.zeros(shape, np.int32), np.full(shape, capacity, np.int32)
    pages = np.zeros((shape[0], capacity // PAGE, 2), np.int32)
    pages[..., 0] = np.arange(capacity // PAGE)
    temperature = np.ones(shape, np.float32)
    predictors, predicted = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    responses, taken = np.zeros(len(rows), np.int64), np.zeros(len(tokens), np.int64)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        end, count = start + lengths[index] - shared[index], lengths[index] - prompts[index]
        tokens[row, start:end] = batch.tokens[index, shared[index] : lengths[index]]
        first[row, start:end] = start
        pages[row, start // PAGE : pages_of(end)] = begins[index] // PAGE, shared[index] // PAGE
        begin = responses[index] = taken[row]
        taken[row] = begin + count
        flat, before = slice(begin, begin + count), slice(end - 1 - count, end - 1)
        predictors[row, flat] = np.arange(before.start, before.stop)
        predicted[row, before] = np.arange(begin, begin + count)
        temperature[row, flat] = batch.temperature[index]
        for name, array in arrays.items():
            found[name][row, flat] = array[index, :count]
    packing = Packing(first, predictors, predicted, pages if share_prompts else None)
    slots = Slots(rows, starts, responses, shared, lengths, prompts, filled)
    routing = {name: _pack_routing(x, slots, shape) for name, x in batch.routing.items()}
    packed = Batch(
        tokens=tokens,
        prompt_lengths=None,
        temperature=temperature,
        routing=routing,
        packing=packing,
        truncation=batch.truncation,
        **found,  # type: ignore[arg-type]
    )
    return packed, slots


def _pack_routing(routing: jax.Array, slots: Slots, shape: tuple[int, int]) -> jax.Array:
    """Packs the routers' results (N, L, T, k), on their devices."""
    row = np.zeros(shape, np.int32)
    slot = np.zeros(shape, np.int32)
    for index, (at, start) in enumerate(zip(slots.rows, slots.starts, strict=True)):
        own = np.arange(slots.shared[index], slots.lengths[index])
        places = at, slice(start, start + len(own))
        row[places] = index
        slot[places] = own
    return jnp.moveaxis(routing[row, :, slot], 2, 1)
