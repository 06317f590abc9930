"""Random steps and batches for the tests of `rl/`.

Log-probabilities lie on a lattice that no clipping bound of a test comes near: next to a bound,
float32 and float64 may rightly disagree. All that is traced has one shape, (B, R).
"""

import functools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

B, R = 6, 8
GARBAGE = [np.inf, -np.inf, np.nan, 3e38, -3e38]

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=30)


def spoiled(mask, *arrays):
    """The arrays with garbage outside the mask, another kind in each."""
    garbage = [np.resize(np.roll(GARBAGE, k), mask.shape) for k in range(len(arrays))]
    return [
        np.where(mask, array, bad.astype(array.dtype))
        for array, bad in zip(arrays, garbage, strict=True)
    ]


def batch_of(seed, lengths, holes, fine=False):
    """(logp, old, advantages, mask, weights) of a loss; advantages are equal along a row."""
    rng = np.random.default_rng(seed)
    old = -rng.integers(0, 256, (B, R)) / 64
    logp = old + rng.integers(-96, 97, (B, R)) * 2.0 ** (-14 if fine else -6)
    of_row = rng.choice([0.0, 0.35, -0.1, *rng.standard_normal(6)], (B, 1))
    mask = (np.arange(R) < np.array(lengths)[:, None]) & (
        rng.random((B, R)) < (0.7 if holes else 1)
    )
    arrays = logp, old, np.broadcast_to(of_row, (B, R)), rng.random((B, R))
    logp, old, of_token, weights = (array.astype(np.float32) for array in arrays)
    return logp, old, of_token, mask, weights


def batches(test):
    """Passes `batch`; the first has no kept token at all."""
    lengths = st.lists(st.integers(0, R), min_size=B, max_size=B)
    drawn = st.builds(batch_of, seeds, lengths, st.booleans(), st.booleans())
    return few(example(batch=batch_of(1, [0] * B, False))(given(batch=drawn)(test)))


def step_of(seed, prompts, group, slots, kept, equal):
    """(rewards (P, G), mask, advantages, log_ratio (B, R)) of one step, float64."""
    rng = np.random.default_rng(seed)
    shape = (prompts * group, slots)
    rewards = rng.choice([0.0, 0.1, 0.35, 1.0, -0.7], (prompts, group))
    alike = rng.random(prompts) < equal
    rewards[alike] = rng.choice([0.1, 0.35, 1.1], (prompts, 1))[alike]
    mask = np.arange(slots) < rng.integers(0, slots + 1, (shape[0], 1))
    mask &= rng.random(shape) < kept
    of_token = rng.choice([0.1, 0.35, -0.1, *rng.standard_normal(4)], shape)
    log_ratio = rng.integers(-96, 97, shape) / 64 * rng.choice([8, 1, 2**-8], (shape[0], 1))
    return rewards, mask, of_token, log_ratio


def steps(test):
    """Passes `step`; some have a lone sample, a group of equal rewards, or no kept token."""
    chances = st.sampled_from([0.0, 0.6, 1.0])
    count = functools.partial(st.integers, 1)
    drawn = st.builds(step_of, seeds, count(3), count(8), count(5), chances, chances)
    return few(example(step=step_of(1, 2, 3, 4, 0.0, 1.0))(given(step=drawn)(test)))
