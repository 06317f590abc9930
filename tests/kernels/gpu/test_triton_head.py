"""The fused output head in Triton's interpreter: against float64, and variant against variant.

In float32: the interpreter's bf16 product is wrong. Where both variants must agree, operands are
small multiples of 1/8, whose products float32 adds exactly, so that the logits do not depend on how
numpy multiplies; one case has ordinary numbers and the same tile in both.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")


from fp8rl_jax.kernels.gpu import head as api
from fp8rl_jax.kernels.gpu import matmul as kernels
from fp8rl_jax.kernels.gpu.tiles import HEAD_FLOAT32


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, interpreter):
    monkeypatch.setattr(api, "triton_call", interpreter.triton_call)
    monkeypatch.setattr(kernels, "triton_call", interpreter.triton_call)


def _case(rows, columns, depth, exact=False, seed=0):
    """hidden, head, targets, inverse temperatures; logits have a standard deviation of 3."""
    rng = np.random.default_rng(seed)
    if exact:
        hidden, head = (rng.integers(-8, 9, s) / 8 for s in ((rows, depth), (depth, columns)))
    else:
        hidden = rng.standard_normal((rows, depth))
        head = rng.standard_normal((depth, columns)) * 3 / np.sqrt(depth)
    targets = rng.integers(0, columns, rows)
    inverse = rng.choice([1.0, 1 / 0.7, 0.5, 1 / 0.3], rows)
    return (
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(inverse, jnp.float32),
    )


def _float64(logits, targets, inverse):
    """logp, entropy, log-sum-exp and probabilities; -inf is a probability of 0."""
    x = np.asarray(logits, np.float64) * np.asarray(inverse, np.float64)[:, None]
    top = x.max(1)
    below = x - top[:, None]
    log_count = np.log(np.exp(below).sum(1))
    probability = np.exp(below - log_count[:, None])
    entropy = log_count - (probability * np.where(probability > 0, below, 0)).sum(1)
    logp = below[np.arange(len(x)), targets] - log_count
    return logp, entropy, top + log_count, probability


def _check(got, logits, targets, inverse, logp=3e-6, entropy=2e-5):
    want = _float64(logits, np.asarray(targets), inverse)
    assert all(x.dtype == jnp.float32 for x in got)
    np.testing.assert_allclose(np.asarray(got[0]), want[0], rtol=2e-7, atol=logp)
    np.testing.assert_allclose(np.asarray(got[1]), want[1], rtol=0, atol=entropy)
    np.testing.assert_allclose(np.asarray(got[2]), want[2], rtol=2e-7, atol=logp)


def _equal(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


SHAPES = [(1, 128, 32), slow(33, 300, 70), slow(34, 400, 32), (9, 200, 100)]


@pytest.mark.parametrize("rows, columns, depth", SHAPES)
def test_equals_float64(rows, columns, depth):
    hidden, head, targets, inverse = _case(rows, columns, depth)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    _check(api.head_logprobs(hidden, head, targets, inverse), logits, targets, inverse)
    logits = logits.astype(np.float32)
    _check(api.logprobs_of_logits(jnp.asarray(logits), targets, inverse), logits, targets, inverse)


@pytest.mark.parametrize("rows, columns, depth", SHAPES)
def test_logits_in_memory_give_the_same_bits(rows, columns, depth):
    hidden, head, *rest = _case(rows, columns, depth, exact=True)
    logits = kernels.matmul(hidden, head)
    np.testing.assert_array_equal(np.asarray(logits), np.asarray(hidden) @ np.asarray(head))
    _equal(api.head_logprobs(hidden, head, *rest), api.logprobs_of_logits(logits, *rest))
    hidden, head, *rest = _case(rows, columns, depth)
    logits = kernels.matmul(hidden, head, tile=HEAD_FLOAT32)
    _equal(api.head_logprobs(hidden, head, *rest), api.logprobs_of_logits(logits, *rest))


def test_rows_do_not_see_each_other():
    hidden, head, *rest = _case(34, 140, 32, exact=True)
    whole = api.head_logprobs(hidden, head, *rest)
    logits = kernels.matmul(hidden, head)
    for start, stop in ((0, 1), (31, 34)):
        part = slice(start, stop)
        few = [x[part] for x in rest]
        _equal(api.head_logprobs(hidden[part], head, *few), [x[part] for x in whole])
        _equal(api.logprobs_of_logits(logits[part], *few), [x[part] for x in whole])
    order = np.random.default_rng(0).permutation(34)
    moved = api.head_logprobs(hidden[order], head, *[x[order] for x in rest])
    _equal(moved, [x[order] for x in whole])


def test_order_within_a_tile_changes_nothing():
    """Why the two variants agree on a GPU, where their tiles lie differently in registers."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((16, 256)) * rng.choice([0.1, 3, 20], (16, 1))
    logits = logits.astype(np.float32)
    order = np.concatenate([rng.permutation(128), 128 + rng.permutation(128)])
    targets, inverse = np.arange(16), jnp.ones(16)
    moved = np.argsort(order)[targets]
    got = api.logprobs_of_logits(jnp.asarray(logits), jnp.asarray(targets, jnp.int32), inverse)
    other = api.logprobs_of_logits(
        jnp.asarray(logits[:, order]), jnp.asarray(moved, jnp.int32), inverse
    )
    _equal(got, other)


@pytest.mark.parametrize("target", [0, 127, 128, *map(slow, (255, 256)), 299])
def test_targets_at_the_borders_of_tiles(target):
    hidden, head, _, inverse = _case(3, 300, 32, seed=target)
    targets = jnp.full(3, target, jnp.int32)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    _check(api.head_logprobs(hidden, head, targets, inverse), logits, targets, inverse)


def test_a_target_that_does_not_exist_is_nan():
    hidden, head, _, inverse = _case(3, 300, 32)
    targets = jnp.asarray([-1, 300, 2**31 - 1], jnp.int32)
    logp, entropy, logsumexp = api.head_logprobs(hidden, head, targets, inverse)
    assert np.isnan(logp).all() and np.isfinite(entropy).all() and np.isfinite(logsumexp).all()


def _rows_of_extremes():
    rng = np.random.default_rng(0)
    rows = np.asarray(rng.standard_normal((10, 300)), np.float32)
    rows[0] = 7.25  # all equal
    rows[1] = -1e30
    rows[1, 200] = 3.0  # one dominates
    rows[2] = -1e30  # all equal and far away
    rows[3] *= 1e4
    rows[4, :256] = -np.inf  # tiles of nothing
    rows[5, 1:] = -np.inf
    rows[6] = -17.0  # one dominates its tile, the others are below coarse steps
    rows[6, [5, 130, 290]] = 0.0
    rows[7] = 1e-30
    rows[8, ::2] = -1e30
    rows[9, :128] = -1e37  # 128 times as much is not a float32
    targets = jnp.asarray([299, 200, 0, int(rows[3].argmax()), 256, 0, 5, 1, 1, 140], jnp.int32)
    return rows, targets


def test_extreme_logits():
    rows, targets = _rows_of_extremes()
    got = api.logprobs_of_logits(jnp.asarray(rows), targets, jnp.ones(len(rows)))
    _check(got, rows, targets, np.ones(len(rows)), logp=1e-6)
    np.testing.assert_array_equal(np.asarray(got[0])[[1, 5]], 0)
    np.testing.assert_array_equal(np.asarray(got[1])[[1, 5]], 0)


@pytest.mark.parametrize(
    ("bad", "column"),
    [(np.nan, 130), (np.inf, 299), *(slow(np.nan, n) for n in (0, 299)), slow(np.inf, 0)],
)
def test_bad_logits_stay_in_their_row(bad, column):
    rows, targets = _rows_of_extremes()
    good = api.logprobs_of_logits(jnp.asarray(rows), targets, jnp.ones(len(rows)))
    rows[3, column] = bad
    got = api.logprobs_of_logits(jnp.asarray(rows), targets, jnp.ones(len(rows)))
    others = np.arange(len(rows)) != 3
    for x, y in zip(got, good, strict=True):
        assert np.isnan(np.asarray(x)[3])
        np.testing.assert_array_equal(np.asarray(x)[others], np.asarray(y)[others])


def test_a_masked_logit_has_no_probability():
    rows, targets = _rows_of_extremes()
    targets = targets.at[4].set(3)
    logp = api.logprobs_of_logits(jnp.asarray(rows), targets, jnp.ones(len(rows)))[0]
    assert logp[4] == -np.inf


@pytest.mark.parametrize("rows, columns, depth, chunk", [slow(5, 130, 36, 1024), (19, 150, 40, 16)])
def test_gradients_equal_float64(monkeypatch, rows, columns, depth, chunk):
    monkeypatch.setattr(api, "CHUNK", chunk)
    hidden, head, targets, inverse = _case(rows, columns, depth)
    dlogp = np.random.default_rng(1).standard_normal(rows).astype(np.float32)
    dlogp[2] = 0
    logsumexp = api.head_logprobs(hidden, head, targets, inverse)[2]
    dhidden, dhead = api.head_logprobs_vjp(
        hidden, head, targets, inverse, logsumexp, jnp.asarray(dlogp)
    )
    x, w = (np.asarray(v, np.float64) for v in (hidden, head))
    probability = _float64(x @ w, np.asarray(targets), inverse)[3]
    dlogits = np.eye(columns)[np.asarray(targets)] - probability
    dlogits *= (dlogp * np.asarray(inverse, np.float64))[:, None]
    assert dhidden.dtype == dhead.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(dhidden), dlogits @ w.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(dhead), x.T @ dlogits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(dhidden)[2], 0)


@pytest.mark.parametrize("count", [16, *map(slow, (0, 17))])
def test_chunks_without_a_row_that_counts_are_left_out(monkeypatch, count):
    """Their hidden states are NaN here; results of rows that count, and gradients, are the same."""
    monkeypatch.setattr(api, "CHUNK", 16)
    computed = -(-count // 16) * 16
    hidden, head, targets, inverse = _case(40, 130, 36)
    dlogp = jnp.where(jnp.arange(40) < count, 0.5, 0.0)

    def both(hidden, count=None):
        found = api.head_logprobs(hidden, head, targets, inverse, count)
        rest = targets, inverse, found[2], dlogp
        return *found, *api.head_logprobs_vjp(hidden, head, *rest, count)

    *rows, dhead = jax.jit(both)(hidden.at[computed:].set(jnp.nan), count)
    *want, dhead_of_all = jax.jit(both)(hidden)
    np.testing.assert_array_equal(dhead, dhead_of_all)
    for got, all_rows in zip(rows, want, strict=True):
        np.testing.assert_array_equal(got[:computed], all_rows[:computed])
        assert (np.asarray(got)[computed:] == 0).all()


def test_errors_name_the_types():
    hidden, head, *rest = _case(2, 128, 32)
    with pytest.raises(ValueError, match="both be bf16 or both float32, got bfloat16 and float32"):
        api.head_logprobs(hidden.astype(jnp.bfloat16), head, *rest)
    with pytest.raises(ValueError, match="logits must be float32, got bfloat16"):
        api.logprobs_of_logits((hidden @ head).astype(jnp.bfloat16), *rest)
