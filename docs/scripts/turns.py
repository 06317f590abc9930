"""Counts what conversations cost beyond the tokens that are drawn: prompts and what the environment
says are prefilled, and a conversation that lost its pages while it waited is prefilled anew.
Responses of 256 tokens of which the environment says an eighth, in 2 to 32 replies.

    JAX_PLATFORMS=cpu python docs/scripts/turns.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax import models, rollout

_MODEL = models.ModelConfig(61, 32, 32, 1, 2, 1, 16)
_PROMPT, _NEW, _ROWS, _SLOTS = 64, 256, 64, 16


def _prefilled(turns: int, rows: int) -> tuple[int, int, float]:
    """Returns the tokens drawn, those prefilled, and the share of slots that drew a token, with
    pages for so many whole sequences."""
    said, reply = _NEW // 8 // turns, 7 * _NEW // 8 // turns
    settings = rollout.SamplerConfig(_NEW, 1, (), 0, max_turns=turns, max_turn_tokens=reply)
    sizes = rollout.Batching(_SLOTS, 1 + rows * models.pages_of(_PROMPT + _NEW))
    sample = rollout.ContinuousSampler(_MODEL, "f32", settings, sizes, part=8)
    answered = np.zeros(_ROWS, int)

    def answer(progress: rollout.Progress) -> rollout.Extension:
        ready = np.asarray(progress.paused) & (progress.replies.counts > answered)
        answered[ready] = progress.replies.counts[ready]
        tokens = np.ones((_ROWS, said), np.int32)
        return rollout.Extension(tokens, np.int32(ready * said), np.zeros(_ROWS, bool))

    params = models.init_params(_MODEL, jax.random.key(0, impl="threefry2x32"))
    weights, *_ = rollout.make_refit("f32")(params)
    rng = np.random.default_rng(0)
    sample(
        weights,
        rng.integers(1, 60, (_ROWS, _PROMPT)).astype(np.int32),
        rollout.Requests(
            np.full(_ROWS, _PROMPT, np.int32),
            jax.random.key(1, impl="threefry2x32"),
            np.arange(_ROWS, dtype=np.int32),
            np.ones(_ROWS, np.float32),
            np.full(_ROWS, _NEW, np.int32),
            tuple(map(jnp.asarray, models.rope_tables(_MODEL, _PROMPT + _NEW))),
        ),
        answer=answer,
    )
    drawn, metrics = int(sample.progress.drawn.sum()), sample.metrics()
    return drawn, metrics["rollout_prefilled"], metrics["rollout_slots_used"]


def main() -> None:
    print(f"{_ROWS} responses through {_SLOTS} slots")
    print("| replies | pages for sequences | prefilled for each token drawn | slots used |")
    print("|---|---|---|---|")
    for turns in (2, 8, 32):
        for rows in (_SLOTS, 2 * _SLOTS, _ROWS):
            drawn, prefilled, used = _prefilled(turns, rows)
            print(f"| {turns} | {rows} | {prefilled / drawn:.2f} | {used:.2f} |")


if __name__ == "__main__":
    main()
