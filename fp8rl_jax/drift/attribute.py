"""Finds the operation that makes the log-probabilities of rollout and learner differ.

1. The run's sampler and train step, unchanged, give the size of the drift.
2. The same programs with every intermediate value tapped are compared value by value, in the order
   of computation. The cause is at the **first** value whose bits differ. A tapped program may
   compile differently: if its log-probabilities are not those of the untapped one, bit for bit,
   half of the values are tapped at a time, then a quarter, and so on.
3. The rollout's values are swapped into the learner, which shows which operations differ on equal
   inputs, how much drift each adds, and how much remains when one layer is swapped.
4. Weights, recipes and the definition of the log-probability are compared separately, because
   these causes show in no single operation.

"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.drift import compare
from fp8rl_jax.drift.explain import Evidence, explain
from fp8rl_jax.drift.operations import CUTS, LAYER_TAPS, OPERATIONS, tap_names
from fp8rl_jax.drift.own_products import try_own_products
from fp8rl_jax.drift.programs import Host, Programs, Taps
from fp8rl_jax.models import Truncation
from fp8rl_jax.models.taps import LOGITS, MODEL_TAPS
from fp8rl_jax.quant import BoundWeight, QArray, is_weight
from fp8rl_jax.rl import mismatch_metrics

# A swapped-in value is quantised again, which may change the last bit of its scale.
_REQUANTISED = 1e-6


class Ran(NamedTuple):
    """Results of both programs on the host: the Rollout, the learner's Batch made of it, and the
    learner's log-probabilities (B, R)."""

    rollout: Host
    batch: Host
    logp: np.ndarray


@dataclasses.dataclass
class Observed:
    """Results of the tapped programs.

    Attributes:
      rows, logits: results of `compare_taps` and `compare_logits`.
      rollout_logits, rollout: the rollout's logits (B, R, V), and its values within the layers.
      unobservable: names that change the bits if tapped.
      pieces: number of pairs of tapped programs that ran.
    """

    rows: list[dict] = dataclasses.field(default_factory=list)
    logits: dict | None = None
    rollout_logits: np.ndarray | None = None
    rollout: Taps = dataclasses.field(default_factory=dict)
    unobservable: list[str] = dataclasses.field(default_factory=list)
    pieces: int = 0


def run_both(programs: Programs) -> Ran:
    """Runs sampler and train step without taps."""
    rollout = programs.rollout()
    batch = programs.batch(rollout)
    logp, _ = programs.learner(batch)
    return Ran(rollout, batch, logp)


def compare_sides(programs: Programs, rollout: Host, batch: Host, logp: np.ndarray) -> dict:
    """Compares the log-probabilities of rollout and learner: metrics, differences by slot, length
    and row, and the worst tokens."""
    mask = np.asarray(rollout.mask)
    d = np.asarray(logp, np.float64) - rollout.logprobs
    return {
        "headline": mismatch_metrics(logp, rollout.logprobs, mask),
        "by_slot": compare.by_row("slot", d.T, mask.T),
        "by_length": compare.by_length(d, mask, batch.lengths),
        "by_row": compare.by_row("row", d, mask),
        "worst": _worst_tokens(programs, batch, rollout, d),
    }


def analyse(
    programs: Programs, note: Callable[[str], None] = lambda text: None, ran: Ran | None = None
) -> dict:
    """Returns the report of `fp8rl drift`, as a dict that `json.dumps` accepts.

    Args:
      programs: sampler and learner.
      note: called with a line for each part.
      ran: the result of `run_both`, if it exists already.
    """
    runtime = programs.runtime
    if ran is None:
        note("sampling, and one train step on the samples")
        ran = run_both(programs)
    rollout, batch, logp = ran
    result: dict[str, Any] = compare_sides(programs, rollout, batch, logp)
    if runtime.mesh.shape["tensor"] > 1:
        note("mesh.tensor is above 1, where intermediate values are sharded: comparing the rest")
        seen = Observed(unobservable=list(tap_names(runtime.resolved.model)))
    else:
        note("comparing intermediate values")
        seen = observe(programs, rollout, batch, logp, note)
    result |= {
        "operations": seen.rows,
        "first": next((row for row in seen.rows if row["differ"]), None),
        "logits": seen.logits,
        "unobservable": seen.unobservable,
        "tapped_programs": seen.pieces,
        "weights": compare_weights(programs.weights, programs.learner_weights()),
    }
    note("multiplying at every size of product that the run's programs have")
    products = try_own_products(runtime)
    result["products"] = {"sentence": products.sentence, "wrong": list(products.wrong)}
    drifts = bool(compare.bits_differ(logp, rollout.logprobs)[np.asarray(rollout.mask)].any())
    if drifts and seen.rollout:
        note("swapping the rollout's values into the learner, one operation at a time")
        result |= _contributions(programs, batch, rollout, seen)
    evidence = Evidence(
        rollout_recipe=runtime.resolved.rollout_recipe,
        learner_recipe=runtime.resolved.learner_recipe,
        drifts=drifts,
        result=result,
        alternatives=_alternatives(programs, rollout, logp, seen) if drifts else {},
    )
    return {"verdict": explain(evidence)} | result


def _worst_tokens(programs: Programs, batch: Host, rollout: Host, d: np.ndarray) -> list[dict]:
    tokenizer = programs.runtime.tokenizer
    special = {tokenizer.bos_id: "", tokenizer.pad_id: "(padding)"}
    special |= dict.fromkeys(tokenizer.eos_ids, "(end)")

    def described(row: int, slot: int) -> dict:
        token = int(rollout.tokens[row, slot])
        position = int(batch.prompt_lengths[row]) + slot
        before = [int(t) for t in batch.tokens[row, :position] if int(t) not in special]
        return {
            "row": row,
            "slot": slot,
            "difference": float(d[row, slot]),
            "rollout_logp": float(rollout.logprobs[row, slot]),
            "token": special.get(token) or tokenizer.decode([token]),
            "before": tokenizer.decode(before)[-40:],
        }

    worst = compare.worst_tokens(d, np.asarray(rollout.mask))
    return [described(row, slot) for row, slot in worst]


def observe(programs, rollout: Host, batch: Host, logp: np.ndarray, note) -> Observed:
    """Compares all intermediate values; taps half of them at a time where tapping all changes the
    log-probabilities."""
    mask = np.asarray(rollout.mask)
    seen = Observed()
    pending: list[Sequence[str]] = [tap_names(programs.runtime.resolved.model)]
    while pending:
        names = pending.pop(0)
        tapped = programs.rollout(names)
        learner_logp, learner_taps = programs.learner(batch, names)
        seen.pieces += 1
        same = np.array_equal(tapped.tokens, rollout.tokens) and not (
            compare.bits_differ(tapped.logprobs, rollout.logprobs).any()
            or compare.bits_differ(learner_logp, logp)[mask].any()
        )
        if not same and len(names) > 1:
            note(f"tapping {len(names)} values changes the log-probabilities: tapping half of them")
            half = len(names) // 2
            pending = [names[:half], names[half:], *pending]
        elif not same:
            seen.unobservable += names
        else:
            _add(seen, tapped.taps, learner_taps, batch, mask)
    order = list(OPERATIONS)
    layers = programs.runtime.resolved.model.num_hidden_layers

    def place(row: dict) -> tuple[int, int]:
        outside = -1 if row["op"] == MODEL_TAPS[0] else layers
        return outside if row["layer"] is None else row["layer"], order.index(row["op"])

    seen.rows.sort(key=place)
    return seen


def _add(seen: Observed, rollout: Taps, learner: Taps, batch: Host, mask: np.ndarray) -> None:
    valid = compare.valid_positions(batch.lengths, batch.tokens.shape[1])
    for name in rollout:
        if name == LOGITS:
            seen.rollout_logits = rollout[name]
            seen.logits = compare.compare_logits(rollout[name], learner[name], mask)
            continue
        seen.rows += compare.compare_taps(name, rollout[name], learner[name], valid)
        if name in LAYER_TAPS:
            seen.rollout[name] = rollout[name]


def _contributions(programs: Programs, batch: Host, rollout: Host, seen: Observed) -> dict:
    """Measures what each operation and each layer adds to mean |dlogp|.

    `local` is the relative difference of an operation's output, the largest of all layers, when the
    learner computes it from the rollout's inputs: 0 unless the operation is at fault. `adds` is the
    drift with the rollout's values swapped in for its inputs, minus the drift with its output
    swapped in, too.
    """
    mask = np.asarray(rollout.mask)
    layers = programs.runtime.resolved.model.num_hidden_layers
    names = [name for name in LAYER_TAPS if name in seen.rollout]
    swapped = programs.swapper(batch, {name: seen.rollout[name] for name in names})
    every = np.ones(layers, bool)

    def left(chosen: dict[str, np.ndarray]) -> float:
        d = swapped(chosen)[0].astype(np.float64) - rollout.logprobs
        return float(np.abs(d[mask]).mean())

    @functools.cache  # operations share inputs
    def left_with(operations: tuple[str, ...]) -> float:
        return left({name: every for name in operations if name in seen.rollout})

    recipe = programs.runtime.resolved.learner_recipe
    noise = _REQUANTISED if recipe.quantized or recipe.kv_quantized else 0.0
    own = jax.device_get(swapped(dict.fromkeys(names, every))[1])
    valid = compare.valid_positions(batch.lengths, batch.tokens.shape[1])
    found = []
    for name in names:
        local = compare.compare_taps(name, seen.rollout[name], own[name], valid)
        sizes = [row.get("relative") or 0.0 for row in local]
        if name in CUTS or max(sizes) <= noise:
            continue
        inputs = OPERATIONS[name].inputs
        found.append(
            {
                "op": name,
                "local": max(sizes),
                "layers": [layer for layer, size in enumerate(sizes) if size > noise],
                "adds": left_with(inputs) - left_with((*inputs, name)),
            }
        )
    free = [name for name in names if name not in CUTS]
    return {
        "drift_without_swaps": left({}),
        "by_operation": sorted(found, key=lambda row: -row["adds"]),
        "by_layer": [
            {"layer": i, "left": left(dict.fromkeys(free, np.arange(layers) == i))}
            for i in range(layers)
        ],
    }


def compare_weights(rollout: dict, learner: dict) -> dict:
    """Compares two trees of weights; returns the number of leaves and the names that differ.

    A leaf that is FP8 on one side and bf16 on the other is compared dequantised. Trees with
    different stacks of layers are not compared (comparable: False).
    """
    one, other = (_leaves(tree) for tree in (rollout, learner))
    if set(one) != set(other):
        return {"comparable": False, "leaves": len(other), "differing": []}
    differing = []
    for name, leaf in one.items():
        pair = (leaf, other[name])
        if all(isinstance(x, QArray) for x in pair):
            mine, theirs = (
                [np.asarray(x.qvalue).view(np.uint8), np.asarray(x.scale)] for x in pair
            )
        else:
            values = (x.dequantize() if isinstance(x, QArray) else x for x in pair)
            mine, theirs = ([np.asarray(x, np.float32)] for x in values)
        if any(compare.bits_differ(a, b).any() for a, b in zip(mine, theirs, strict=True)):
            differing.append(name)
    return {"comparable": True, "leaves": len(other), "differing": differing}


def _leaves(tree: dict) -> dict:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_weight)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path): (
            leaf.value if isinstance(leaf, BoundWeight) else leaf
        )
        for path, leaf in found
    }


def _alternatives(programs, rollout: Host, logp: np.ndarray, seen: Observed) -> dict:
    """Finds which definition of the log-probability each side follows.

    Returns:
      {'rollout' | 'learner': 'full vocabulary', 'without temperature', 'kept tokens' (of top-k and
      top-p) or 'another'; 'expected': the run's definition}; {} if the logits were not observed, or
      differ.
    """
    logits = seen.rollout_logits
    if logits is None or seen.logits is None or seen.logits["differ"]:
        return {}
    mask = np.asarray(rollout.mask)
    config = programs.runtime.config.rollout
    rows = jnp.asarray(logits[mask])
    warm = rows / config.temperature
    definitions = {"full vocabulary": warm, "without temperature": rows}
    if config.top_k or config.top_p < 1:
        cut = Truncation(config.top_k, config.top_p).cut(warm, jnp.ones(len(rows)))
        definitions["kept tokens"] = jnp.where(cut.keeps(warm), warm, -jnp.inf)

    def follows(values: np.ndarray) -> str:
        for name, logits in definitions.items():
            expected = np.asarray(jax.nn.log_softmax(logits))
            expected = np.take_along_axis(expected, rollout.tokens[mask][:, None], 1)[:, 0]
            if np.abs(values[mask] - expected).max() < 1e-4:
                return name
        return "another"

    truncation = programs.runtime.resolved.truncation
    return {
        "rollout": follows(rollout.logprobs),
        "learner": follows(logp),
        "expected": "full vocabulary" if truncation is None else "kept tokens",
    }
