"""Runs the real sampler and the real train step on the same tokens and compares their bits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from known_families import FAMILIES
from random_model import initial_params

from fp8rl_jax import learner, models, rollout
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import Batch, make_batch, of_sequences, pack
from fp8rl_jax.data import join
from fp8rl_jax.models import masters
from fp8rl_jax.models.taps import ROUTING, Observe
from fp8rl_jax.quant import Recipe, get_recipe
from fp8rl_jax.quant.kv import with_scales


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination. `prompts` are lengths; the response has `new_tokens` slots."""

    recipe: str | Recipe = "fp8"
    family: str = "qwen3"
    prompts: tuple[int, ...] = (1, 7, 20, 40)
    group_size: int = 2
    new_tokens: int = 24
    cache_slots: int = 0
    vocabulary: int = 259  # the last is the end of a sequence, the last but two padding
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    tied: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    records_kept: bool = False
    remat: str = "none"
    micro_batches: int = 1
    extra_slots: int = 0  # learner sequences longer than the sampler's
    eos_share: float = 0.0  # > 0: bias the head so that sequences end early
    outliers: bool = False
    updates: int = 0  # train steps before the comparison
    experts: int = 0
    experts_per_token: int = 2
    expert_width: int = 64
    norm_topk_prob: bool = True
    unroll: bool = False  # the learner's scan over layers, unrolled
    replay: int = 0  # so many of taps.ROUTING are replayed in the learner
    rank: int = 0  # of adapters with random values
    base: str = "f32"  # how their base is kept
    tap_logits: bool = False  # the train step returns its logits too: one program less to compile
    pack: int = 0  # slots of the learner's rows, which then hold several sequences
    share: bool = False  # whose prompts are computed once in a row
    seed: int = 0

    @property
    def eos(self) -> int:
        return self.vocabulary - 1

    @property
    def pad(self) -> int:
        return self.vocabulary - 3

    def model(self) -> models.ModelConfig:
        fields = dict(
            tie_word_embeddings=self.tied,
            embedding_init_std=0.05 if self.tied else 1.0,
            num_experts=self.experts,
            num_experts_per_tok=self.experts_per_token,
            moe_intermediate_size=self.expert_width,
            norm_topk_prob=self.norm_topk_prob,
        )
        return models.ModelConfig(
            self.vocabulary,
            self.hidden,
            3 * self.hidden,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            **{**fields, **FAMILIES[self.family]},
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """Both sides' numbers at the response tokens, (n,) and (n, V); of packed rows no logits."""

    rollout_logp: np.ndarray
    learner_logp: np.ndarray
    rollout_logits: np.ndarray
    learner_logits: np.ndarray
    mask: np.ndarray
    checksum_ok: bool
    params: dict  # after the update

    def differing(self) -> tuple[int, int]:
        """Number of log-probabilities and of logits whose bits differ."""
        pairs = ((self.rollout_logp, self.learner_logp), (self.rollout_logits, self.learner_logits))
        logp, logits = (int((a.view(np.int32) != b.view(np.int32)).sum()) for a, b in pairs)
        return logp, logits


def _with_random_vectors(params, seed: int):
    """Norms' weights, biases, sinks and routers' corrections drawn at random, from all values."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key == "weight":
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)
        if path[-1].key == "e_score_correction_bias":
            return jnp.asarray(rng.uniform(0, 0.5, leaf.shape), jnp.float32)
        if path[-1].key.endswith(("bias", "sinks")):
            return jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)
        return leaf

    return jax.tree_util.tree_map_with_path(draw, params)


def make_params(case: Case):
    params = initial_params(case.model(), case.seed)
    if case.family != "qwen3":
        params = _with_random_vectors(params, case.seed)
    if case.outliers:
        rng = np.random.default_rng(case.seed)
        channels = rng.choice(case.hidden, 4, replace=False)
        table = np.array(params["embed_tokens"])
        table[:, channels] *= 30
        params = {**params, "embed_tokens": jnp.asarray(table)}
    if case.eos_share:
        head = np.array(params["lm_head"])
        head[:, case.eos] = np.abs(head[:, case.eos]) * 2
        params = {**params, "lm_head": jnp.asarray(head)}
    return with_adapters(params, case.rank, case.seed, base=case.base) if case.rank else params


def with_adapters(
    params, rank: int, seed: int = 0, modules=("*",), base: str = "f32"
) -> masters.Adapted:
    """Parameters with adapters of every linear layer, both matrices random."""
    key = jax.random.key(seed, impl="threefry2x32")
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key == masters.FACTORS[0]:
            return leaf
        return jnp.asarray(0.05 * rng.standard_normal(leaf.shape), jnp.float32)

    made = masters.adapted(params, rank, 2.0 * rank, modules, base, key)
    adapters = jax.tree_util.tree_map_with_path(draw, made.adapters)
    return dataclasses.replace(made, adapters=adapters)


def _rows_first(values: np.ndarray, case: Case) -> np.ndarray:
    """(L, B, S, k) of the rollout as the learner's (B, L, T, k)."""
    values = np.moveaxis(values, 0, 1)
    return np.pad(values, ((0, 0), (0, 0), (0, case.extra_slots), (0, 0)))


def _batch(case: Case, prompts, lengths, out, order) -> Batch:
    lengths = np.repeat(lengths, case.group_size)
    tokens = join(np.repeat(prompts, case.group_size, axis=0), lengths, out.tokens, case.pad)
    tokens = np.pad(tokens, ((0, 0), (0, case.extra_slots)), constant_values=case.pad)
    rows = len(lengths)
    rng = np.random.default_rng(case.seed)
    batch = make_batch(
        tokens=tokens,
        prompt_lengths=lengths,
        targets=out.tokens,
        mask=out.mask,
        temperature=np.full(rows, case.temperature, np.float32),
        advantages=rng.standard_normal(rows).astype(np.float32),
        old_logprobs=out.logprobs,
        truncation=out.truncation,
        kept=out.kept,
        routing={name: _rows_first(out.taps[name], case) for name in ROUTING[: case.replay]},
    )
    return jax.tree.map(lambda x: x[order], batch)


def run(case: Case, rollout_recipe: str | None = None, plant=None) -> Result:
    """Samples, trains on the samples, and returns both sides' values.

    Args:
      case: the combination.
      rollout_recipe: another recipe for the sampler, to make drift.
      plant: applied to the rollout weights, to make drift.
    """
    recipe = get_recipe(case.recipe)
    model, params = case.model(), make_params(case)
    slots = max(case.prompts) + case.new_tokens + case.extra_slots
    rope = tuple(jnp.asarray(t) for t in models.rope_tables(model, max(slots, case.cache_slots)))
    optimizer = optax.adam(1e-3)
    gradients = learner.GradientProgram(
        learner.ForwardPass(model, recipe, remat=case.remat),
        micro_batches=case.micro_batches,
        taps=("logits",) if case.tap_logits else (),
    )
    step = learner.make_train_step(gradients, optimizer)
    refit = rollout.make_refit(rollout_recipe or recipe)
    sample = rollout.make_sampler(
        model,
        rollout_recipe or recipe,
        rollout.SamplerConfig(
            case.new_tokens,
            case.group_size,
            (case.eos,),
            case.pad,
            case.top_k,
            case.top_p,
            case.cache_slots,
            taps=("logits", *ROUTING[: case.replay]),
            records_kept=case.records_kept,
        ),
    )
    rng = np.random.default_rng(case.seed)
    lengths = np.asarray(case.prompts, np.int32)
    prompts = rng.integers(0, case.pad, (len(lengths), lengths.max())).astype(np.int32)
    rows = len(lengths) * case.group_size
    ids = np.arange(rows, dtype=np.int32)
    temperature = np.full(rows, case.temperature, np.float32)
    limits = np.full(rows, case.new_tokens, np.int32)
    # The learner sees the rows in another order, and one of them twice.
    order = np.concatenate([rng.permutation(rows), [0] * (-(rows + 1) % case.micro_batches + 1)])
    calibrated = recipe.kv == "calibrated"
    state = learner.new_state(params, optimizer, np.zeros(2, np.uint32), recipe)
    calibrate = rollout.make_calibrate(model, recipe)
    seen = of_sequences(prompts, lengths)
    for update in range(case.updates + 1):
        if calibrated:
            scales = calibrate(state.params, state.scaling_state, seen, np.int32(update), rope)
            scaling = with_scales(state.scaling_state, scales)
            state = dataclasses.replace(state, scaling_state=scaling)
        weights, checksum, _ = refit(state.params, state.scaling_state)
        weights = plant(weights) if plant else weights
        key = jax.random.fold_in(jax.random.key(case.seed + 1, impl="threefry2x32"), update)
        requests = rollout.Requests(lengths, key, ids, temperature, limits, rope)
        out = jax.device_get(sample(weights, prompts, requests))
        batch = _batch(case, prompts, lengths, out, order)
        before = jax.tree.map(jnp.copy, state)
        seen = of_sequences(batch.tokens, batch.lengths)
        given, slots_of = batch, None
        if case.pack:
            longest = max(case.prompts) + case.new_tokens
            given, slots_of = pack(batch, longest, case.pack, 1, case.share)
            assert slots_of.shared.any() == case.share
        with _unrolled(case):
            state, logp, metrics = step(state, given, rope)
    if slots_of:
        logp = slots_of.unpack(np.asarray(logp), case.new_tokens)
    if case.pack:  # the program of the logits knows rows of one sequence alone
        logits = np.zeros((*out.mask.shape, 0), np.float32)
        out = dataclasses.replace(out, taps={**out.taps, "logits": logits})
    elif case.tap_logits:
        logits = np.asarray(metrics["taps"]["logits"])
    else:
        with _unrolled(case):
            logits = _learner_logits(case, before, batch, rope)
    place = np.array([np.flatnonzero(order == row)[0] for row in range(rows)])
    mask = out.mask
    return Result(
        rollout_logp=out.logprobs[mask],
        learner_logp=np.asarray(logp)[place][mask],
        rollout_logits=out.taps["logits"][mask],
        learner_logits=logits[place][mask],
        mask=mask,
        checksum_ok=bool(metrics["checksum"] == checksum),
        params=jax.device_get(state.params),
    )


@contextlib.contextmanager
def _unrolled(case: Case):
    """Programs traced within unroll their scan over layers, if the case asks for it."""
    unrolled = functools.partial(nn.scan, unroll=case.layers)
    with mock.patch.object(nn, "scan", unrolled) if case.unroll else contextlib.nullcontext():
        yield


def _learner_logits(case: Case, state, batch: Batch, rope) -> np.ndarray:
    """Full-vocabulary logits of the response tokens, inside value_and_grad."""
    recipe, model = get_recipe(case.recipe), case.model()

    def objective(params, state, batch, rope):
        frozen = state.scaling_state
        weights = models.quantize_params(jax.lax.stop_gradient(params), recipe, frozen)
        paired = models.trainable_params(params, weights, recipe, frozen)
        out = models.hidden_states(
            paired,
            models.Tokens.of(batch.tokens, rope),
            model,
            recipe,
            observe=Observe(remat=case.remat),
        )
        index = batch.prompt_lengths[:, None] - 1 + jnp.arange(batch.targets.shape[1])
        hidden = jnp.take_along_axis(out.hidden, index[:, :, None], axis=1)
        head = models.output_head(paired, model)
        draws = models.Draws(batch.targets, batch.draws.temperature)
        logp, _ = models.token_logprobs(hidden, head, draws, recipe)
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = models.head_logits(rows, head, recipe).reshape(*batch.targets.shape, -1)
        return -(logp * batch.mask).sum(), logits

    program = exact_jit(lambda *a: jax.value_and_grad(objective, has_aux=True)(*a))
    (_, logits), grads = program(state.params, state, batch, rope)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    return np.asarray(logits)
