"""Scores of one set of samples under several views: two layers of width 128, one with experts."""

import dataclasses
import pathlib
import types

import jax
import ml_collections
import numpy as np
import pytest
from marks import slow
from random_model import initial_params

from fp8rl_jax.quant import get_recipe
from fp8rl_jax.quant.kv import scales_in
from studies import scoring, subjects
from studies.scoring import Scorer, View, sample, scaling_of

_GROUP, _PART = 4, 2
_F32, _FP8 = get_recipe("f32"), get_recipe("fp8")
_VIEWS = {
    "fp8": View(_FP8),
    "f32": View(_F32),
    "experts": View(_F32, "experts", "fp8"),
    "own experts": View(_F32, "experts", "f32"),
}
_SAMPLES = ("tokens", "prompt_lengths", "targets", "mask", "temperature", "old_logprobs")


@pytest.fixture(scope="module")
def runtime():
    config = subjects.quick_config()
    config.sft.steps = 0
    config.model.update(family="qwen3_moe", num_experts=8)
    config.model.update(num_experts_per_tok=2, moe_intermediate_size=128)
    config.model.family_options.first_k_dense_replace = 1
    config.rollout.update(max_new_tokens=12, prompts_per_step=_PART)
    config.algo.routing_replay = "experts"  # views say what is replayed: it changes nothing here
    config.precision.rollout = config.precision.learner = "bf16"
    return subjects.of_config(config, pathlib.Path(), print).runtime


@pytest.fixture(scope="module")
def params(runtime):
    """Random weights of a model that ends some answers early."""
    drawn = initial_params(runtime.resolved.model, seed=1)
    head = np.array(drawn["lm_head"])
    head[:, list(runtime.tokenizer.eos_ids)] *= 3
    return drawn | {"lm_head": head}


def _questions(runtime) -> list:
    """Two questions, and the same two in the next part."""
    return 2 * runtime.questions["eval"][:_PART]


@pytest.fixture(scope="module")
def samples(runtime, params):
    return sample(runtime, params, _F32, _questions(runtime), _GROUP)


@pytest.fixture(scope="module")
def scored(runtime, params, samples):
    """Scores of both halves, and what they compared: {(a, b): (logits of a, logits of b)}."""
    compare = scoring._compare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_ROWS", 8)
        parts = list(Scorer(runtime, _VIEWS).score(params, samples))
    seen = []
    for part in parts:
        seen.append({})
        for pair in (("fp8", "f32"), ("f32", "fp8")):

            def watched(one, other, temperature, pair=pair):
                seen[-1][pair] = np.asarray(one), np.asarray(other)
                return compare(one, other, temperature)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scoring, "_compare", watched)
                part.compare(*pair)
    return parts, seen


def _of(batch, rows: slice):
    return jax.tree.map(lambda x: np.asarray(x[rows]), batch)


def test_score_is_what_the_sampler_recorded(scored, samples):
    """float32, bit for bit, in the order of the samples although they are scored in parts."""
    parts, _ = scored
    assert [part.rows for part in parts] == [slice(0, 8), slice(8, 16)]
    _check_decode(np.concatenate([part.logprobs["f32"] for part in parts]), samples)


def _check_decode(found, batch):
    mask = np.asarray(batch.mask) > 0
    assert mask.any(axis=1).all() and not mask.all(), "some answers end early, and not all"
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[mask], batch.old_logprobs[mask])
    assert not found[~mask].any()


@pytest.mark.parametrize("recipe", [slow("bf16"), slow("fp8"), slow("fp8_blockwise_pow2")])
def test_other_recipes(recipe, runtime, params):
    """As the test above."""
    recipe = get_recipe(recipe)
    batch = sample(runtime, params, recipe, _questions(runtime), _GROUP)
    (part,) = Scorer(runtime, {"it": View(recipe)}).score(params, batch)
    _check_decode(part.logprobs["it"], batch)


def test_every_sample_has_its_own_random_bits(samples):
    """The same question in another part gets other answers."""
    half = _PART * _GROUP
    np.testing.assert_array_equal(samples.tokens[:half, :8], samples.tokens[half:, :8])
    long = samples.targets[samples.mask.sum(axis=1) > 3]
    assert len(long) > half and len(np.unique(long, axis=0)) == len(long)


@pytest.mark.slow
def test_samples_do_not_depend_on_the_parts(runtime, params, samples):
    """Questions that are sampled two at a time get the tokens and log-probabilities of four."""
    config = ml_collections.ConfigDict(runtime.config.to_dict())
    config.rollout.prompts_per_step = 2 * _PART
    frozen = ml_collections.FrozenConfigDict(config)
    resolved = dataclasses.replace(runtime.resolved, config=frozen)
    whole = dataclasses.replace(runtime, resolved=resolved)
    found = sample(whole, params, _F32, _questions(runtime), _GROUP)
    for name in _SAMPLES:
        np.testing.assert_array_equal(getattr(found, name), getattr(samples, name))


def test_comparison(scored, samples):
    """D is the second view less the first, and KL that of the first's logits from the second's."""
    for part, seen in zip(*scored, strict=True):
        batch = _of(samples, part.rows)
        mask = batch.mask > 0
        found, back = part.compare("fp8", "f32"), part.compare("f32", "fp8")
        d = part.logprobs["f32"].astype(np.float64) - part.logprobs["fp8"]
        np.testing.assert_array_equal(found.difference, np.where(mask, d, 0))
        np.testing.assert_array_equal(found.difference, -back.difference)
        for pair, kl in ((("fp8", "f32"), found.divergence), (("f32", "fp8"), back.divergence)):
            logs = [x.astype(np.float64) for x in seen[pair]]
            logp, logq = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in logs)
            for name, log in zip(pair, (logp, logq), strict=True):
                chosen = np.take_along_axis(log, batch.targets[..., None], -1)[..., 0]
                np.testing.assert_allclose(chosen[mask], part.logprobs[name][mask], atol=1e-5)
                entropy = -(np.exp(log) * log).sum(-1)
                np.testing.assert_allclose(entropy[mask], part.entropy[name][mask], atol=1e-5)
            theirs = (np.exp(logp) * (logp - logq)).sum(-1)
            np.testing.assert_allclose(kl[mask], theirs[mask], rtol=5e-3, atol=1e-8)
            assert theirs[mask].min() > 0
        assert (found.divergence != back.divergence)[mask].any()
        for name in ("divergence", "square"):
            assert not getattr(found, name)[~mask].any()
        same = part.compare("f32", "f32")
        assert same.size[mask].min() > 0 and not same.size[~mask].any()
        differences = same._replace(size=0)
        assert not any(np.any(x) for x in differences), "a view differs from itself in nothing"


def _read(batch) -> tuple[np.ndarray, np.ndarray]:
    """(rows, places) of the tokens whose output is the logits of a response's token."""
    rows, slots = np.nonzero(batch.mask)
    return rows, batch.prompt_lengths[rows] - 1 + slots


def test_replayed_experts(scored, samples):
    """Experts of another view change the tokens that had others, and those alone: the layer with
    experts is the last one, and a dense one gives no flips."""
    flipped, changed = [], []
    for part in scored[0]:
        batch = _of(samples, part.rows)
        rows, places = _read(batch)
        flips = part.compare("f32", "fp8").flips
        assert flips.shape == (1, *batch.tokens.shape)
        flipped.append(flips[0, rows, places])
        changed.append((part.logprobs["experts"] != part.logprobs["f32"])[batch.mask > 0])
        np.testing.assert_array_equal(part.logprobs["own experts"], part.logprobs["f32"])
        np.testing.assert_array_equal(part.compare("f32", "experts").flips, False)
    np.testing.assert_array_equal(np.concatenate(changed), np.concatenate(flipped))
    assert 0 < np.concatenate(flipped).sum() < np.concatenate(flipped).size


@pytest.mark.slow
def test_replayed_weights(runtime, params, samples):
    """Weights of another view change nearly all tokens, its own none."""
    replays = {"weights": View(_F32, "weights", "fp8"), "own": View(_F32, "weights", "f32")}
    (part,) = Scorer(runtime, _VIEWS | replays).score(params, samples)
    mask = samples.mask > 0
    np.testing.assert_array_equal(part.logprobs["own"], part.logprobs["f32"])
    assert (part.logprobs["weights"] != part.logprobs["f32"])[mask].mean() > 0.9
    assert (part.logprobs["weights"] != part.logprobs["experts"])[mask].mean() > 0.9


def test_margins(scored, samples):
    """Of the layer with experts alone. Tokens whose choice is narrow are those that flip."""
    found = []
    for part in scored[0]:
        margins, flips = part.margins["f32"], part.compare("f32", "fp8").flips
        assert margins.shape == flips.shape
        real = np.arange(flips.shape[2]) < samples.lengths[part.rows, None]
        found.append((margins[:, real], flips[:, real]))
    margins, flips = (np.concatenate(x, axis=1) for x in zip(*found, strict=True))
    assert margins.min() >= 0 and np.median(margins) > 0
    assert margins[flips].mean() < 0.5 * margins[~flips].mean()


def test_scale_of_parts_is_the_largest(runtime, monkeypatch):
    """Calibration of some rows at a time: every row is seen once, and the largest scale is kept."""
    rows, seen = 12, []
    tokens = np.random.default_rng(0).permutation(rows * 3).reshape(rows, 3)

    def calibrate(params, scaling, batch, step, rope):
        tokens = batch.tokens
        seen.append((tokens, batch.lengths))
        return {"k": np.float32(tokens.max()), "v": np.float32(tokens[:, 0].max())}

    monkeypatch.setattr(scoring, "make_calibrate", lambda *_: calibrate)
    monkeypatch.setattr(scoring, "_ROWS", 5)
    recipe = dataclasses.replace(get_recipe("bf16"), kv="calibrated")
    found = scaling_of(runtime, {}, recipe, tokens, np.arange(rows))
    assert scales_in(found) == {"k": tokens.max(), "v": tokens[:, 0].max()}
    assert [len(part) for part, _ in seen] == [4, 4, 4]
    np.testing.assert_array_equal(np.concatenate([part for part, _ in seen]), tokens)
    np.testing.assert_array_equal(np.concatenate([n for _, n in seen]), np.arange(rows))
    assert scaling_of(types.SimpleNamespace(), {}, _FP8, tokens, np.arange(rows)) == {}


@pytest.mark.slow
def test_calibrated_scales_over_parts_are_those_of_all(runtime, params, samples, monkeypatch):
    recipe = dataclasses.replace(get_recipe("bf16"), kv="calibrated")
    tokens, lengths = np.asarray(samples.tokens), np.asarray(samples.lengths)
    whole = scaling_of(runtime, params, recipe, tokens, lengths)
    monkeypatch.setattr(scoring, "_ROWS", 4)
    parts = scaling_of(runtime, params, recipe, tokens, lengths)
    first = scaling_of(runtime, params, recipe, tokens[:4], lengths[:4])
    leaves = [[np.asarray(x) for x in jax.tree.leaves(found)] for found in (whole, parts, first)]
    for one, other, _ in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((x != z).any() for x, _, z in zip(*leaves, strict=True)), "the first rows decide"
