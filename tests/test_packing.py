"""Rows of several sequences: the log-probabilities of a row of its own, bit for bit, and the same
gradients; no token is lost, and hardly any is padding."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from devices import run_script
from drift_harness import Case, run
from hypothesis import given
from hypothesis import strategies as st
from kind_of_cpu import kind_of_cpu
from marks import slow
from random_model import initial_params
from small_models import NARROW

from fp8rl_jax import learner, models
from fp8rl_jax.batch import Batch, SharedPrompts, assign, make_batch, pack
from fp8rl_jax.models import Draws, token_logprobs
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rl import losses

_PROMPT, _RESPONSE = 150, 500
_LONGEST, _CAPACITY = 650, 704
_LENGTHS = [(1, 1), (62, 1), (1, 62), (60, 4), (20, 44), (5, 60), (64, 1), (80, 433), (3, 500)]
# Three responses to a prompt with two whole pages, two of one page, a response that is shorter than
# the prompt's rest, prompts without a whole page before their last token, and one alone.
_SHARED = [(150, 1), (150, 300), (150, 41), (65, 63), (65, 64), (140, 2), (140, 90)]
_SHARED += [(64, 70), (64, 3), (9, 20), (9, 8), (129, 200)]


def _batch(lengths=_LENGTHS, seed=0) -> Batch:
    """Sequences of (prompt, response) tokens, with all that a loss reads drawn at random; prompts
    of one length are equal."""
    rng = np.random.default_rng(seed)
    prompts, counts = np.array(lengths, np.int32).T
    shape = len(lengths), _RESPONSE
    mask = np.arange(_RESPONSE) < counts[:, None]
    tokens = rng.integers(0, 64, (len(lengths), _PROMPT + _RESPONSE)).astype(np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, :prompt] = tokens[list(prompts).index(prompt), :prompt]
    index = prompts[:, None] + np.arange(_RESPONSE)
    targets = np.where(mask, np.take_along_axis(tokens, index, axis=1), 0)
    noise = rng.standard_normal((4, *shape)).astype(np.float32)
    return make_batch(
        tokens,
        prompts,
        targets,
        mask,
        rng.uniform(0.5, 1.5, len(lengths)).astype(np.float32),
        noise[0] * mask,
        weights=np.abs(noise[1]) * mask / mask.sum(),
        rollout_weights=1 + 0.1 * noise[2] * mask,
        old_logprobs=(-4 + 0.2 * noise[3]) * mask,
        ref_logprobs=(-4 - 0.1 * noise[3]) * mask,
    )


@functools.cache
def _rope():
    tables = models.rope_tables(NARROW, _PROMPT + _RESPONSE)
    return tuple(jnp.asarray(table) for table in tables)


def _score(batch: Batch, recipe: str, params) -> np.ndarray:
    score = learner.make_score(learner.ForwardPass(NARROW, get_recipe(recipe)))
    return np.asarray(score(params, {}, batch, _rope()))


def _bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).view(np.int32)


@pytest.mark.parametrize("recipe", ["f32", slow("fp8")])
def test_rows_of_several_sequences_have_the_bits_of_rows(recipe):
    """Sequences of 2, 63, 64, 65 and 513 tokens, in any order, and what a neighbour holds changes
    nothing."""
    params, batch = initial_params(NARROW), _batch()
    mask = batch.mask > 0
    want = _score(batch, recipe, params)[mask]
    assert np.isfinite(want).all()
    order = np.random.default_rng(1).permutation(len(mask))
    for rows in (np.arange(len(mask)), order):
        packed, slots = pack(jax.tree.map(lambda x, r=rows: x[r], batch), _LONGEST, _CAPACITY, 1)
        found = np.empty_like(batch.mask)
        found[rows] = slots.unpack(_score(packed, recipe, params), _RESPONSE)
        np.testing.assert_array_equal(_bits(found[mask]), _bits(want), kind_of_cpu())
    assert len(packed.tokens) > slots.micro_batches, "some rows are empty"

    # A token whose embedding is NaN, in one sequence; one with such a token shares its row.
    table = np.array(params["embed_tokens"])
    table[63] = np.nan
    clean = np.where(batch.tokens == 63, 0, batch.tokens)
    targets = np.where(batch.targets == 63, 0, batch.targets)
    batch = dataclasses.replace(batch, tokens=clean, targets=targets)
    want = _score(batch, recipe, params)
    spoilt = clean.copy()
    spoilt[1, :5] = 63
    packed, slots = pack(dataclasses.replace(batch, tokens=spoilt), _LONGEST, _CAPACITY, 1)
    beside = np.flatnonzero(slots.rows == slots.rows[1])
    assert len(beside) > 1
    params = {**params, "embed_tokens": jnp.asarray(table)}
    found = slots.unpack(_score(packed, recipe, params), _RESPONSE)
    assert np.isnan(found[1, 0])
    others = mask & (np.arange(len(mask)) != 1)[:, None]
    np.testing.assert_array_equal(_bits(found[others]), _bits(want[others]))


@pytest.mark.parametrize("recipe", ["f32", slow("fp8")])
def test_shared_prompts_have_the_bits_of_rows(recipe):
    """In any order, and with groups that one row cannot hold."""
    params, batch = initial_params(NARROW), _batch(_SHARED)
    mask = batch.mask > 0
    want = _score(batch, recipe, params)[mask]
    order = np.random.default_rng(1).permutation(len(mask))
    for rows, capacity in ((np.arange(len(mask)), 1408), (order, _CAPACITY)):
        given = jax.tree.map(lambda x, r=rows: x[r], batch)
        packed, slots = pack(given, _LONGEST, capacity, 1, share_prompts=True)
        assert np.unique(slots.shared).tolist() == [0, 64, 128]
        found = np.empty_like(batch.mask)
        found[rows] = slots.unpack(_score(packed, recipe, params), _RESPONSE)
        np.testing.assert_array_equal(_bits(found[mask]), _bits(want), kind_of_cpu())
    apart = pack(batch, _LONGEST, 1408, 1)[0]
    shared = pack(batch, _LONGEST, 1408, 1, share_prompts=True)[0]
    assert (apart.valid.sum() - shared.valid.sum()) == 2 * 128 + 64 + 128


@pytest.mark.parametrize("share", [False, True])
def test_sequences_of_no_tokens_take_no_place(share):
    """Neither a row, nor a slot of one: the rows of others are as without them."""
    batch = _batch(_SHARED)
    nothing = jax.tree.map(lambda x: np.zeros_like(x[:5]), batch)
    padded = jax.tree.map(lambda *x: np.concatenate(x), batch, nothing)
    right, right_slots = pack(batch, _LONGEST, _CAPACITY, 1, share)
    packed, slots = pack(padded, _LONGEST, _CAPACITY, 1, share)
    assert slots.micro_batches == right_slots.micro_batches
    rows = len(right.tokens)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:rows], y), packed, right)
    assert not packed.valid[rows:].any()
    ones = slots.unpack(np.ones(packed.mask.shape), _RESPONSE)
    np.testing.assert_array_equal(ones, padded.mask)


_LOSSES = {
    "ppo, KL": (losses.ppo(), 0.1),
    "gspo": (losses.gspo(0.2, 0.2), None),
    "gmpo": (losses.gmpo(), None),
}
_SGD = optax.sgd(1e4)  # for changes far above the parameters' own rounding


@pytest.mark.parametrize("name", [slow("ppo, KL"), "gspo", slow("gmpo")])
def test_gradients_are_those_of_rows(name):
    """Of losses by token and by response, and their statistics; the number of micro-batches that
    hold anything changes no program."""
    loss, kl = _LOSSES[name]
    config = learner.LossConfig(loss)
    if kl:
        config = learner.LossConfig(loss, lambda logp, ref: (logp - ref) ** 2, kl)
    forward_pass = learner.ForwardPass(NARROW, get_recipe("f32"))
    gradients = learner.GradientProgram(forward_pass, config)
    step = learner.make_train_step(gradients, _SGD, donate=False)
    params = initial_params(NARROW)
    state = learner.new_state(params, _SGD, np.zeros(2, np.uint32), "f32")
    for lengths in (_LENGTHS, [(1, 2), *_LENGTHS[:8]], [(2, 2)] * 9, _SHARED[:9]):
        batch = _batch(lengths)
        packed, slots = pack(batch, _LONGEST, _CAPACITY, 1, share_prompts=lengths == _SHARED[:9])
        rows, logp, metrics = jax.device_get(step(state, batch, _rope()))
        other, packed_logp, found = jax.device_get(step(state, packed, _rope()))
        mask = batch.mask > 0
        np.testing.assert_array_equal(
            _bits(slots.unpack(packed_logp, _RESPONSE)[mask]), _bits(logp[mask])
        )
        np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=2e-5)
        for stat, values in metrics["tokens"].items():
            got = slots.unpack(found["tokens"][stat], _RESPONSE)
            np.testing.assert_allclose(got[mask], values[mask], rtol=1e-5, err_msg=stat)
        trees = params, rows.params, other.params
        for start, one, two in zip(*map(jax.tree.leaves, trees), strict=True):
            largest = np.abs(one - start).max()
            assert largest > 1e-6
            np.testing.assert_allclose(two - start, one - start, atol=1e-5 * largest)
    assert step._cache_size() == 3  # rows, packed rows, and those with shared prompts


def test_the_head_is_kept_once():
    """The backward pass of many chunks, of which some are left out, has no copies of the head."""
    tokens, width, words = 2048, 64, 1008
    shapes = ((1, tokens, width), (width, words), (1, tokens), (1, tokens), (1, tokens))
    kinds = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32, bool)
    arrays = [jax.ShapeDtypeStruct(*both) for both in zip(shapes, kinds, strict=True)]

    def loss(hidden, head, targets, temperature, counts):
        draws = Draws(targets, temperature, counts=counts)
        return token_logprobs(hidden, head, draws, get_recipe("bf16"))[0].sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays))
    assert "cond" in text and f"[{tokens // 256},256,{width}]" in text
    assert f"[{tokens // 256},{width},{words}]" not in text


@given(
    st.lists(st.integers(2, 700), min_size=1, max_size=60),
    st.sampled_from([704, 768, 2048]),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 60),
)
def test_every_sequence_has_a_place(lengths, capacity, devices, prompts):
    """No two sequences have a page but those of a shared prompt, none leaves its row, the first
    micro-batches are filled."""
    lengths, given = np.array(lengths), None
    whole = 0 * lengths
    if prompts:  # so many, which all sequences have that are long enough for them
        numbers = np.arange(len(lengths)) % prompts
        whole = 64 * (numbers % 5)
        numbers = np.where(lengths > whole, numbers, prompts + np.arange(len(lengths)))
        whole = np.where(lengths > whole, whole, 0)
        given = SharedPrompts(numbers, whole)
    rows, starts, begins, filled, count = assign(lengths, 700, capacity, devices, given)
    assert rows.max() < devices * count and (starts % 64 == 0).all()
    taken = np.zeros((devices * count, capacity), int)
    for index, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
        own = length
        if begins[index] != start:
            own -= whole[index]
            same = (rows == row) & (starts == begins[index]) & (numbers == numbers[index])
            assert same.sum() == 1 and begins[index] < start
        assert start + own <= capacity
        taken[row, start : start + -(-own // 64) * 64] += 1
    assert taken.max() == 1
    for row, number in {*zip(rows, numbers, strict=True)} if prompts else ():
        of_prompt = (rows == row) & (numbers == number) & (whole > 0)
        assert len(set(begins[of_prompt])) <= 1, "a prompt is computed twice in a row"
    used = taken.any(1).reshape(devices, count).any(0)
    np.testing.assert_array_equal(used, np.arange(count) < filled)


def test_hardly_any_token_is_padding():
    """512 responses of 5,000 tokens on average, at most 20,480, on 16 devices; rows of their own
    have 3.5 tokens for one."""
    ratios, of_rows = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.exponential(5000, 512), 1, 20480) + rng.integers(100, 1025, 512)
        filled = assign(lengths.astype(int), 21504, 21504, 16)[3]
        ratios.append(filled * 16 * 21504 / lengths.sum())
        of_rows.append(512 * 21504 / lengths.sum())
    assert np.mean(ratios) < 1.1 and np.mean(of_rows) > 3


# Case and whether prompts are shared. Every family in float32; every recipe, every kind of layer
# (windows, sinks, latents, experts) and whatever is counted or replayed by tokens in both layouts.
_ZERO_DRIFT = [
    (Case("f32", "qwen3"), True),
    (Case("fp8", "qwen3"), False),
    (Case("f32", "qwen2"), True),
    (Case("f32", "mistral"), False),
    (Case("f32", "gemma3"), True),
    (Case("fp8", "gemma3"), False),
    (Case("f32", "llama"), False),
    (Case("f32", "glm", experts=8), False),
    (Case("fp8", "glm", experts=8), True),
    (Case("f32", "gpt-oss", experts=8), True),
    (Case("fp8", "gpt-oss", experts=8), False),
    (Case("f32", "deepseek", layers=3), False),
    (Case("fp8", "deepseek", layers=3), True),
    (Case("f32", "wide deepseek", layers=3, hidden=256), True),
    (Case("f32", "moonlight", layers=3), True),
    (Case("bf16", remat="full"), True),
    (Case("fp8_delayed"), True),
    (Case("mxfp8"), False),
    (Case("fp8", experts=8, replay=2), False),
    (Case("fp8", experts=8, replay=2), True),
    (Case("fp8", rank=8), True),
    (Case("f32", experts=8), False),
    (Case("f32", experts=8), True),
]


def _name(value: Case | bool) -> str:
    if isinstance(value, bool):
        return "shared prompts" if value else "apart"
    more = {"experts": value.experts, "replay": value.replay, "adapters": value.rank}
    return " ".join((str(value.recipe), value.family, *(name for name in more if more[name])))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "share"), _ZERO_DRIFT, ids=_name)
def test_no_drift(case, share):
    fields = {"pack": 256, "prompts": (1, 7, 63, 90), "new_tokens": 60, "updates": 1}
    if share:
        fields |= {"pack": 448, "prompts": (1, 63, 90, 140), "share": True}
    result = run(dataclasses.replace(case, **fields))
    assert result.rollout_logp.size > 200 and result.checksum_ok
    assert result.differing() == (0, 0), kind_of_cpu()


_LONG_PROMPTS = (
    f"env.prompt_template={'Add these numbers. ' * 4}{{question}}",
    "rollout.max_prompt_tokens=104",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "packed"),
    [
        ((), ("learner.tokens_per_batch=128",)),
        (_LONG_PROMPTS, ("learner.tokens_per_batch=320", "learner.share_prompts=True")),
    ],
    ids=["apart", "shared prompts"],
)
def test_on_a_mesh(asked, packed):
    """Each of eight devices packs its rows; columns over `tensor` run within a shard_map."""
    shape = {"data": 1, "fsdp": 1, "tensor": 1}

    def on(devices: int, mesh: dict, *fields: str) -> dict:
        given = json.dumps(mesh), "fp8", "1", *asked, *fields
        return run_script(devices, "sharded_steps.py", *given)

    one = on(1, shape)
    for mesh in (shape | {"fsdp": 8}, shape | {"data": 2, "tensor": 2}):
        many = on(int(np.prod(list(mesh.values()))), mesh, *packed)
        assert many["drift"] == 0.0 and many["tokens"] == one["tokens"]
        assert many["logp"] == one["logp"]
        np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6, atol=1e-6)
        # Blocks of tokens, by which FP8 quantises the operands of dW, are others.
        np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-3)
