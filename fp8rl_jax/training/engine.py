"""The programs of RL: sample, score, update, refit.

An engine is made from a configuration and a layout, so one process can have two, on two meshes. Its
methods take a state or rollout weights, and return a new state or weights, and arrays on the host.
Each program is compiled once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from fp8rl_jax import learner
from fp8rl_jax.base import processes
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import Batch, Slots, make_batch, pack
from fp8rl_jax.config.adapters import begun, with_adapters
from fp8rl_jax.config.model_source import load_params
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data import join
from fp8rl_jax.learner import TrainState
from fp8rl_jax.models import init_params, init_scaling, param_shardings, rope_tables
from fp8rl_jax.models.masters import frozen, is_adapted, with_frozen
from fp8rl_jax.models.taps import ROUTING
from fp8rl_jax.plan.bytes import device_memory
from fp8rl_jax.plan.rollout import plan_rollout
from fp8rl_jax.quant import Recipe
from fp8rl_jax.quant.kv import with_scales
from fp8rl_jax.rollout import (
    Answer,
    Batching,
    ContinuousSampler,
    Earlier,
    HalvedSampler,
    Loop,
    Requests,
    Rollout,
    SamplerConfig,
    Watch,
    make_calibrate,
    make_refit,
    make_sampler,
    sampled_bytes,
)
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.frozen_model import FrozenModel
from fp8rl_jax.training.layout import Layout
from fp8rl_jax.training.offload import OffloadedStep, init_on_host
from fp8rl_jax.training.optimizer import Optimizer, optimizer_of_phase


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Served:
    """The result of a refit.

    Attributes:
      weights: the tree that the sampler takes; None after `release`.
      checksum: () uint32 over all its bytes.
      health: counts of quantisation losses by site and layer; {} without `precision.health`.
      version: () int32, the step of the state that the weights were made from.
      sample: some of their FP8 bytes, `sampled_bytes`.
    """

    weights: Any
    checksum: jax.Array
    health: dict
    version: jax.Array
    sample: list[jax.Array]

    def release(self) -> None:
        """Drops the weights for every holder of this object: an update needs their memory."""
        self.weights = None


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of a rollout, on the host: P prompts with G samples each, B = P * G.

    Attributes:
      tokens: (P, Tp) int32, right-padded; lengths: (P,) int32.
      key: random key of the step.
      temperature: (B,) float32, 0 for greedy.
      first_ids: (P,) int32, number of each prompt's first sample. Key, sample number and position
        determine the random bits of a token.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    key: jax.Array
    temperature: np.ndarray
    first_ids: np.ndarray

    @classmethod
    def numbered(cls, tokens, lengths, key, temperature, first: int = 0) -> Prompts:
        """Returns prompts whose samples are numbered from `first` on."""
        group = len(temperature) // len(lengths)
        return cls(tokens, lengths, key, temperature, first + group * np.arange(len(lengths)))

    @property
    def sample_ids(self) -> np.ndarray:
        """(B,) int32, numbers of the samples."""
        group = len(self.temperature) // len(self.lengths)
        return np.add.outer(self.first_ids, np.arange(group)).reshape(-1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class JaxEngine:
    """The programs of a run on one mesh, with one forward function for all of them.

    Attributes:
      resolved: configuration, model, recipes.
      layout: shapes and shardings.
      eos_ids, pad_id: end-of-sequence ids and padding id of the tokenizer.
      cache_slots: slots of each sequence in the KV cache; 0 for prompt + response.
    """

    resolved: Resolved
    layout: Layout
    eos_ids: tuple[int, ...]
    pad_id: int
    cache_slots: int = 0

    @functools.cached_property
    def config(self) -> ml_collections.ConfigDict:
        return self.resolved.config

    @functools.cached_property
    def keys(self) -> dict[str, jax.Array]:
        """Independent keys for 'init', 'rollout' and 'eval', from the run's seed."""
        root = jax.random.key(self.config.run.seed, impl="threefry2x32")
        return dict(zip(("init", "rollout", "eval"), jax.random.split(root, 3), strict=True))

    @functools.cached_property
    def rope(self) -> tuple[jax.Array, jax.Array]:
        """Tables of rotary embeddings for every slot (`rope_tables`)."""
        slots = self.cache_slots or self.resolved.sequence_tokens
        return processes.place(rope_tables(self.resolved.model, slots), self.layout.replicated)

    # States.

    def init_params(self):
        """Returns random parameters, sharded over the mesh."""
        init = functools.partial(init_params, self.resolved.model)
        return exact_jit(init, out_shardings=self.layout.param_shardings)(self.keys["init"])

    def _whole_params(self):
        """Returns the parameters of `model.checkpoint`, or random ones."""
        if not self.config.model.checkpoint:
            return self.init_params()
        return load_params(self.config, functools.partial(param_shardings, self.layout.mesh))

    def initial_params(self):
        """Returns the parameters that training begins with."""
        return begun(self.config, self.resolved.model, self._whole_params())

    def like(self, optimizer) -> TrainState:
        """Returns what a checkpoint of a phase is restored as: shapes with shardings, and the
        frozen base, if there is one, which no checkpoint holds."""
        shapes = self.layout.state_shapes(optimizer)
        if not is_adapted(shapes.params):
            return shapes
        base = frozen(with_adapters(self.config, self._whole_params()))
        return with_frozen(shapes, processes.place(base, param_shardings(self.layout.mesh, base)))

    def new_state(self, params, optimizer, scaling_state: dict | None = None) -> TrainState:
        """Returns the state at the start of a phase, sharded as `Layout.state_shapes`."""
        params = with_adapters(self.config, params)
        rng = np.asarray(jax.random.key_data(self.keys["rollout"]))  # a copy: states are donated
        own = optax.identity() if self.layout.offloads else optimizer
        state = self.layout.new_state(params, own, rng, scaling_state)
        state = processes.place(state, param_shardings(self.layout.mesh, state))
        if not self.layout.offloads:
            return state
        opt_state = init_on_host(self.layout.state_shapes(optimizer).opt_state)
        return dataclasses.replace(state, opt_state=opt_state)

    def advance(self, state: TrainState, position: int) -> TrainState:
        """Returns `state` after one more step; `position`: batches taken from the stream."""
        counts = np.int32(int(state.step) + 1), np.int32(position)
        step, data_state = processes.place(counts, self.layout.replicated)
        return dataclasses.replace(state, step=step, data_state=data_state)

    @functools.cached_property
    def compiled_calibrate(self):
        return make_calibrate(
            self.resolved.model, self.resolved.rollout_recipe, self.layout.parallel
        )

    def calibrate(
        self, state: TrainState, batch: Batch, timed=contextlib.nullcontext
    ) -> TrainState:
        """Returns `state` with KV scales measured on a batch's sequences, in the context
        ``timed('calibrate')``; unchanged if no recipe asks for them."""
        if not self.layout.calibrates:
            return state
        with timed("calibrate"):
            placed, _ = self.on_devices(dataclasses.replace(batch, routing={}))
            scales = self.compiled_calibrate(
                state.params, state.scaling_state, placed, state.step, self.rope
            )
            scales = jax.block_until_ready(processes.place(scales, self.layout.replicated))
        return dataclasses.replace(state, scaling_state=with_scales(state.scaling_state, scales))

    # Rollout.

    @functools.cached_property
    def compiled_refit(self):
        replicated = self.layout.replicated
        return make_refit(
            self.resolved.rollout_recipe,
            health=self.config.precision.health,
            shardings={"out_shardings": (self.layout.weight_shardings, replicated, replicated)},
        )

    def refit(self, state: TrainState) -> Served:
        """Returns the sampler's weights of a state."""
        weights, checksum, health = self.compiled_refit(state.params, state.scaling_state)
        return Served(weights, checksum, health, state.step, sampled_bytes(weights))

    def make_sampler(
        self,
        group_size: int,
        top_k: int,
        top_p: float,
        taps: tuple[str, ...] = (),
        records_kept: bool = False,
    ):
        """Returns a jitted sampler with the run's prompt and response slots; `records_kept` as in
        `SamplerConfig`."""
        rollout = self.config.rollout
        model = self.resolved.model
        recipe = self.resolved.rollout_recipe
        settings = SamplerConfig(
            max_new_tokens=rollout.max_new_tokens,
            group_size=group_size,
            eos_ids=self.eos_ids,
            pad_id=self.pad_id,
            top_k=top_k,
            top_p=top_p,
            whole_logprobs=self.config.algo.truncated_sampling == "whole",
            records_kept=records_kept,
            cache_slots=self.cache_slots,
            max_turns=1 if taps else self.config.env.max_turns,
            max_turn_tokens=rollout.max_turn_tokens,
            taps=taps,
        )
        if rollout.slots and not taps:
            return ContinuousSampler(
                model, recipe, settings, self._batching(), mesh=self.layout.mesh, part=rollout.part
            )
        if Loop(model, recipe, settings).on_cpu and self.layout.mesh.size == 1 and not taps:
            return HalvedSampler(model, recipe, settings)
        return make_sampler(model, recipe, settings, self.layout.parallel)

    def _batching(self) -> Batching:
        """Returns the sizes of continuous batching; pages default to those of the memory plan."""
        rollout = self.config.rollout
        sizes = Batching(rollout.slots, rollout.pages, prefill_chunk=rollout.prefill_chunk)
        if rollout.pages:
            return sizes
        plan = plan_rollout(self.resolved, self.layout.mesh, device_memory(), self.layout.alone)
        pages = processes.decided(lambda: plan.pages)  # free memory may differ
        return dataclasses.replace(sizes, pages=pages * self.layout.mesh.size)

    @functools.cached_property
    def replayed_taps(self) -> tuple[str, ...]:
        """Names of the routers' results that the sampler records (`algo.routing_replay`)."""
        count = {"none": 0, "experts": 1, "weights": 2}[self.config.algo.routing_replay]
        return ROUTING[:count]

    @functools.cached_property
    def sampler(self):
        """The rollout program; see `make_sampler`."""
        rollout = self.config.rollout
        return self.make_sampler(
            rollout.group_size,
            rollout.top_k,
            rollout.top_p,
            self.replayed_taps,
            self.resolved.recorded_numbers > 0,
        )

    @functools.cached_property
    def eval_sampler(self):
        """The evaluation program: one greedy and `eval.samples` sampled answers per question."""
        return self.make_sampler(1 + self.config.eval.samples, 0, self.config.eval.top_p)

    def sample(
        self,
        weights,
        prompts: Prompts,
        watch: Watch | None = None,
        answer: Answer | None = None,
        earlier: Earlier | None = None,
        sampler: Any = None,
    ) -> Rollout:
        """Samples responses to prompts; returns the rollout on the host, its taps on the devices.

        Args:
          weights: weights of a refit (`Served.weights`).
          prompts: prompts, P a multiple of the number of devices that share a batch.
          watch: function called with finished responses during a rollout by continuous batching;
            other samplers never call it.
          answer: function that answers replies, with `env.max_turns` above 1.
          earlier: responses that go on, by continuous batching.
          sampler: a result of `make_sampler`, by default `self.sampler`.
        """
        sampler = sampler or self.sampler
        sample_ids = prompts.sample_ids
        limits = np.full_like(sample_ids, self.config.rollout.max_new_tokens)
        tokens, lengths, sample_ids, temperature, limits = processes.place(
            (prompts.tokens, prompts.lengths, sample_ids, prompts.temperature, limits),
            self.layout.rows,
        )
        requests = Requests(lengths, prompts.key, sample_ids, temperature, limits, self.rope)
        seen = {}
        if isinstance(sampler, ContinuousSampler):
            seen = {"watch": watch, "answer": answer, "earlier": earlier}
        out = sampler(weights, tokens, requests, **seen)
        rollout = processes.fetch(dataclasses.replace(out, taps={}))
        return dataclasses.replace(rollout, taps=out.taps)

    def metrics(self) -> dict[str, float]:
        """Returns how the last rollout used its slots; {} for a sampler without slots."""
        return self.sampler.metrics() if isinstance(self.sampler, ContinuousSampler) else {}

    def batch(self, rollout: Rollout, prompts: Prompts, advantages=None) -> Batch:
        """Returns a rollout as a training batch on the host, its routing on the devices; advantages
        (B,) are 1 by default, old log-probabilities are the sampler's."""
        group = len(rollout.tokens) // len(prompts.lengths)
        tokens, lengths = (np.repeat(x, group, axis=0) for x in (prompts.tokens, prompts.lengths))
        return make_batch(
            join(tokens, lengths, rollout.tokens, self.pad_id),
            lengths,
            rollout.tokens,
            rollout.mask,
            prompts.temperature,
            advantages=advantages,
            old_logprobs=rollout.logprobs,
            truncation=rollout.truncation,
            kept=rollout.kept,
            routing={n: jnp.moveaxis(rollout.taps[n], 0, 1) for n in self.replayed_taps},
            **({} if rollout.lengths is None else {"lengths": lengths + rollout.lengths}),
        )

    # Learner.

    def forward_pass(self, recipe: Recipe, remat: str = "none") -> learner.ForwardPass:
        """Returns how the learner reads batches under a recipe."""
        return learner.ForwardPass(self.resolved.model, recipe, self.layout.parallel, remat)

    @functools.cached_property
    def compiled_score(self):
        return learner.make_score(self.forward_pass(self.resolved.learner_recipe))

    @functools.cached_property
    def compiled_reference_score(self):
        return learner.make_score(self.forward_pass(self.resolved.reference_recipe))

    def packed(self, batch: Batch) -> tuple[Batch, Slots | None]:
        """Returns a batch as the learner takes it, on the host: with `learner.tokens_per_batch`
        packed, and where its sequences are then."""
        capacity = self.config.learner.tokens_per_batch
        if not capacity:
            return batch, None
        return pack(
            batch,
            self.resolved.sequence_tokens,
            capacity,
            batch_divisor(self.layout.mesh),
            self.config.learner.share_prompts,
        )

    def on_devices(self, batch: Batch) -> tuple[Batch, Slots | None]:
        """Returns the result of `packed` with the batch on the devices."""
        batch, slots = self.packed(batch)
        return processes.place(batch, self.layout.rows), slots

    def _scored(self, score, params, scaling_state: dict, batch: Batch) -> np.ndarray:
        placed, slots = self.on_devices(batch)
        found = processes.fetch(score(params, scaling_state, placed, self.rope))
        return slots.unpack(found, batch.targets.shape[1]) if slots else found

    def score(self, state: TrainState, batch: Batch) -> np.ndarray:
        """Returns log-probabilities (B, R) float32 of responses under a state, on the host."""
        return self._scored(self.compiled_score, state.params, state.scaling_state, batch)

    def score_reference(self, state: TrainState, batch: Batch) -> np.ndarray:
        """Returns log-probabilities (B, R) of responses under the reference policy in `state`."""
        batch = dataclasses.replace(batch, routing={})
        if self.config.precision.reference == "learner":
            return self.score(state, batch)
        scaling = init_scaling(state.params, self.resolved.reference_recipe)
        return self._scored(self.compiled_reference_score, state.params, scaling, batch)

    @functools.cached_property
    def loss(self) -> learner.LossConfig:
        """The loss of the RL phase."""
        algorithm = self.resolved.algorithm
        return learner.LossConfig(
            algorithm.loss,
            algorithm.kl,
            algorithm.kl_coef,
            self.config.algo.router_aux_loss_coef,
            self.resolved.frozen_kl_coef,
        )

    @functools.cached_property
    def frozen_model(self) -> FrozenModel | None:
        """The model that the loss has the policy's divergence from, if there is one."""
        if self.resolved.frozen_model is None:
            return None
        return FrozenModel(self.resolved, self.layout)

    def train_step(
        self,
        optimizer,
        loss: learner.LossConfig,
        micro_batches: int,
        recipe: Recipe | None = None,
        taps: tuple[str, ...] = (),
        donate: bool = True,
    ):
        """Returns the jitted train step of a phase; `recipe` defaults to the learner's.

        `taps` and `donate` as for `learner.make_train_step`.
        """
        layout = self.layout
        state = param_shardings(layout.mesh, layout.state_shapes(optimizer))
        recipe = recipe or self.resolved.learner_recipe
        gradients = learner.GradientProgram(
            self.forward_pass(recipe, self.config.learner.remat),
            loss,
            micro_batches,
            self.config.precision.health,
            taps,
        )
        shardings = (with_frozen(state, None), layout.rows, layout.replicated)
        if layout.offloads:
            return OffloadedStep(gradients, optimizer, shardings, donate)
        return learner.make_train_step(
            gradients, optimizer, donate=donate, shardings={"out_shardings": shardings}
        )

    @functools.cached_property
    def rl_optimizer(self) -> Optimizer:
        """The optimiser that `update` applies."""
        return optimizer_of_phase(self.config, "rl")

    @functools.cached_property
    def compiled_update(self):
        parts = self.config.learner.gradient_accumulation_steps
        return self.train_step(self.rl_optimizer, self.loss, parts)

    def update(
        self, state: TrainState, batch: Batch, step: Any = None, distil: bool = True
    ) -> tuple[TrainState, np.ndarray, dict]:
        """Returns the state after one optimiser update of RL, the log-probabilities (B, R) that its
        forward pass computed, and its metrics, both on the host.

        `metrics['computed']` is the number of tokens that the pass computed, `metrics['padding']`
        that of padding among them; `metrics['shared']` (B,) are the first tokens of sequences that
        others computed for them. `state` is donated; if loss or gradients are not finite
        (metrics['good'] is False), the new state equals it.

        Args:
          state, batch: the state before the update, and what it learns from.
          step: a result of `train_step`, by default that of RL.
          distil: whether its loss has the divergence from the frozen model, if there is one.
        """
        placed, slots = self.on_devices(batch)
        if distil and self.frozen_model is not None:
            placed = self.frozen_model.read(placed)
        new, logp, metrics = (step or self.compiled_update)(
            *learner.step_arguments(state, placed, self.rope)
        )
        state = with_frozen(new, frozen(state))
        logp = processes.fetch(logp)
        metrics = jax.device_get(metrics) | {
            "computed": batch.tokens.size,
            "shared": 0 * batch.lengths,
        }
        if slots:
            size = batch.targets.shape[1]
            logp = slots.unpack(logp, size)
            rows = slots.micro_batches * batch_divisor(self.layout.mesh)
            metrics |= {
                "tokens": {n: slots.unpack(x, size) for n, x in metrics["tokens"].items()},
                "computed": rows * placed.tokens.shape[1],
                "shared": slots.shared,
            }
        metrics["padding"] = metrics["computed"] - int(np.sum(batch.lengths - metrics["shared"]))
        return state, logp, metrics
