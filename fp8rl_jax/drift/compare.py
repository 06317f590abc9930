"""Compares the results of two programs bit by bit: arrays on the host, Numpy only.

Nothing is rounded or clamped first; two values are equal if their float32 bits are, so NaN equals
NaN and 0.0 differs from -0.0.
"""

from __future__ import annotations

import itertools

import numpy as np

from fp8rl_jax.models.taps import MODEL_TAPS

_WORST = 12


def bits_differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns where two arrays differ: in float32 bits, or as numbers if they are integers."""
    if np.issubdtype(np.asarray(one).dtype, np.integer):
        return one != other
    one, other = (np.ascontiguousarray(x, np.float32).view(np.int32) for x in (one, other))
    return one != other


def by_row(name: str, d: np.ndarray, mask: np.ndarray) -> list[dict]:
    """Returns {name: row, 'tokens', 'mean', 'max'} of |dlogp|, for each row with tokens."""
    rows = (row for row in range(len(mask)) if mask[row].any())
    return [{name: row, **_spread(d[row, mask[row]])} for row in rows]


def by_length(d: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> list[dict]:
    """Groups |dlogp| by `lengths`, of prompt and response together, in up to eight equal ranges."""
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, 9).astype(int))
    found = []
    for low, high in itertools.pairwise(edges):
        rows = (lengths >= low) & (lengths < high)
        if mask[rows].any():
            found.append({"from": int(low), "to": int(high - 1), **_spread(d[rows][mask[rows]])})
    return found


def _spread(d: np.ndarray) -> dict[str, float]:
    d = np.abs(d)
    return {"tokens": int(d.size), "mean": float(d.mean()), "max": float(d.max())}


def worst_tokens(d: np.ndarray, mask: np.ndarray) -> list[tuple[int, int]]:
    """Returns (row, slot) of the largest |dlogp| above 0 and of NaN, largest first."""
    size = np.where(mask, np.abs(d), 0.0)
    order = np.argsort(-size, axis=None, kind="stable")[:_WORST]
    places = [tuple(int(i) for i in np.unravel_index(n, size.shape)) for n in order]
    return [(row, slot) for row, slot in places if size[row, slot] > 0 or np.isnan(d[row, slot])]


def valid_positions(lengths: np.ndarray, slots: int) -> np.ndarray:
    """Returns a mask (B, slots) of the tokens that both programs ran; the sampler never runs the
    last token that it draws."""
    return np.arange(slots) < lengths[:, None] - 1


def compare_taps(
    name: str, rollout: np.ndarray, learner: np.ndarray, valid: np.ndarray
) -> list[dict]:
    """Compares a tapped value of both sides, layer by layer.

    Args:
      name: name in operations.py.
      rollout, learner: (L, B, T, ...), or (B, T, ...) outside the layers.
      valid: mask (B, T), from `valid_positions`.

    Returns:
      A dict for each layer: op; layer (None outside the layers); differ, the share of elements with
      other bits. If any differ, also max, the largest |difference|; relative, its rms over that of
      the learner's values; float32_only, the sides with values that bf16 cannot hold ('rollout',
      'learner', 'both' or None).
    """
    slots = valid.shape[1]
    if name in MODEL_TAPS:
        rollout, learner = rollout[None], learner[None]
    rows = []
    for layer, (one, other) in enumerate(zip(rollout, learner, strict=True)):
        one, other = (np.asarray(x[:, :slots][valid], np.float32) for x in (one, other))
        differ = bits_differ(one, other)
        row: dict = {
            "op": name,
            "layer": None if name in MODEL_TAPS else layer,
            "differ": float(differ.mean()),
        }
        if differ.any():
            gap = np.abs(one.astype(np.float64) - other)
            scale = np.sqrt(np.mean(np.square(other.astype(np.float64))))
            row |= {
                "max": float(gap.max()),
                "relative": float(np.sqrt(np.mean(gap**2)) / scale) if scale else None,
                "float32_only": _float32_only(one, other),
            }
        rows.append(row)
    return rows


def _float32_only(rollout: np.ndarray, learner: np.ndarray) -> str | None:
    beyond = [
        side
        for side, x in (("rollout", rollout), ("learner", learner))
        if (np.ascontiguousarray(x).view(np.uint32) & 0xFFFF).any()
    ]
    return "both" if len(beyond) == 2 else beyond[0] if beyond else None


def compare_logits(rollout: np.ndarray, learner: np.ndarray, mask: np.ndarray) -> dict:
    """Compares full-vocabulary logits (B, R, V) at response tokens; returns the share of elements
    that differ, and the largest difference."""
    one = rollout[mask]
    other = learner[mask]
    gap = np.abs(one.astype(np.float64) - other)
    return {"differ": float(bits_differ(one, other).mean()), "max": float(gap.max())}
