"""How evenly a model's routers use their experts, as metrics."""

from __future__ import annotations

import numpy as np


def load_metrics(expert_tokens: np.ndarray, first_layer: int) -> dict[str, float | str]:
    """Metrics of a step's tokens per expert.

    ``expert_load_max`` is the largest load of an expert over the mean of its layer, in the worst
    layer, which ``expert_load_worst`` names with the expert; ``expert_load_max_mean`` its mean over
    layers; ``expert_load_entropy`` the mean over layers of the load's entropy over ln(E), 1 when
    balanced; ``experts_unused_frac`` the share of experts that got no token.

    Args:
      expert_tokens: (S, E) tokens of each expert, of the S layers that have experts.
      first_layer: number of the first of these layers.
    """
    tokens = np.asarray(expert_tokens, np.float64)
    share = tokens / np.maximum(tokens.sum(1, keepdims=True), 1)
    largest = share.max(1) * tokens.shape[1]
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1) / np.log(tokens.shape[1])
    layer = int(np.argmax(largest))
    return {
        "expert_load_max": float(largest[layer]),
        "expert_load_max_mean": float(largest.mean()),
        "expert_load_entropy": float(entropy.mean()),
        "expert_load_worst": f"layer {first_layer + layer} expert {int(np.argmax(share[layer]))}",
        "experts_unused_frac": float((tokens == 0).mean()),
    }
