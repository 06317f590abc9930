"""Everything a program needs from a configuration: mesh, model, questions, compiled functions.

`train`, `evaluate`, `sample` and `bench` build one `Runtime` and use its functions; so they all
run the same programs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax.sharding import Mesh

from fp8rl_jax import learner, sharding
from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.base.json_file import plain
from fp8rl_jax.config import checks, flatten
from fp8rl_jax.config.model_source import load_params
from fp8rl_jax.config.precision import without_calibration
from fp8rl_jax.config.resolve import resolve_config, with_vocabulary
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data import ChatFormat, Tokenizer, join, load_tokenizer, pad_prompts, with_turn_end
from fp8rl_jax.envs import Data, Question
from fp8rl_jax.kernels import resolve
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.models import (
    Parallel,
    init_params,
    init_scaling,
    kernel_formats,
    param_shapes,
    param_shardings,
    quantize_params,
    rope_tables,
    weight_specs,
    with_kv_scales,
)
from fp8rl_jax.models.stacks import layer_groups, layer_stacks
from fp8rl_jax.models.taps import ROUTING
from fp8rl_jax.quant import KVScales, Recipe, missing_scales
from fp8rl_jax.rollout import (
    Batching,
    ContinuousSampler,
    HalvedSampler,
    Loop,
    Rollout,
    SamplerConfig,
    Watch,
    make_calibrate,
    make_refit,
    make_sampler,
)
from fp8rl_jax.rollout.memory_plan import device_memory, plan_rollout
from fp8rl_jax.training.environment import begun, check_process, environment
from fp8rl_jax.training.memory import check_rollout_memory
from fp8rl_jax.training.offload import OffloadedStep, init_on_host, with_host_moments
from fp8rl_jax.training.questions import load_data


class Served(NamedTuple):
    """The result of a refit.

    Attributes:
      weights: the tree that the sampler takes.
      checksum: () uint32 over all its bytes.
      health: what quantising the weights lost, by site and layer; {} without `precision.health`.
    """

    weights: Any
    checksum: jax.Array
    health: dict


@dataclasses.dataclass(frozen=True)
class Runtime(Resolved):
    """A checked configuration with what was made from it. See `make_runtime`.

    Attributes:
      mesh: the devices.
      tokenizer: from text to tokens and back.
      chat: how a question becomes a conversation; None without `data.chat`.
      questions: {split: questions of the task}.
      cache_slots: of each sequence in the KV cache; 0 for prompt + response.
      data_note, data_digest: of `Data`.
    """

    mesh: Mesh
    tokenizer: Tokenizer
    chat: ChatFormat | None
    questions: dict[str, list[Question]]
    cache_slots: int = 0
    data_note: str = ""
    data_digest: str = ""

    @functools.cached_property
    def keys(self) -> dict[str, jax.Array]:
        """Independent keys for 'init', 'rollout' and 'eval', from the run's seed."""
        root = jax.random.key(self.config.run.seed, impl="threefry2x32")
        names = ("init", "rollout", "eval")
        return dict(zip(names, jax.random.split(root, len(names)), strict=True))

    @functools.cached_property
    def rope(self) -> tuple[jax.Array, jax.Array]:
        rollout = self.config.rollout
        slots = self.cache_slots or rollout.max_prompt_tokens + rollout.max_new_tokens
        tables = rope_tables(self.model, slots)
        return processes.place(tables, sharding.replicated(self.mesh))

    def with_prompt_slots(self, slots: int) -> Runtime:
        """The same with other `rollout.max_prompt_tokens`, checked again.

        Raises:
          UserError: the configuration cannot work with them.
        """
        config = ml_collections.ConfigDict(self.config.to_dict())
        config.rollout.max_prompt_tokens = slots
        resolved = with_vocabulary(resolve_config(config), self.tokenizer.vocab_size)
        checks.check_mesh(config, sharding.batch_divisor(self.mesh))
        return dataclasses.replace(self, **vars(resolved))

    # Shardings of arguments and results.

    @property
    def parallel(self) -> Parallel:
        return Parallel.on(self.mesh)

    @functools.cached_property
    def param_shapes(self):
        """ShapeDtypeStructs of the parameters."""
        return param_shapes(self.model)

    @functools.cached_property
    def param_shardings(self):
        return param_shardings(self.mesh, self.param_shapes)

    @functools.cached_property
    def weight_shapes(self):
        """ShapeDtypeStructs of what the sampler holds."""

        def weights(params):
            scaling = init_scaling(params, self.learner_recipe)
            weights = quantize_params(params, self.rollout_recipe, scaling)
            return with_kv_scales(weights, self._missing_kv_scales())

        return jax.eval_shape(weights, self.param_shapes)

    @functools.cached_property
    def weight_shardings(self):
        """Of what the sampler holds: experts over `expert`, other weights over `tensor`; on a GPU
        with the layouts that its kernels read."""
        shapes = self.weight_shapes
        specs = weight_specs(shapes, self.model, self.rollout_recipe, self.mesh)
        shardings = sharding.named(self.mesh, specs)
        if resolve(self.rollout_recipe.kernels) == "reference":
            return shardings
        return kernel_formats(shapes, shardings)

    # Compiled functions. Each is made once and compiles once in a run. Their arguments are laid out
    # over the mesh by `processes.place`, and shardings follow the arguments.

    def init_params(self):
        """Random parameters, laid out over the mesh."""
        params = exact_jit(
            functools.partial(init_params, self.model), out_shardings=self.param_shardings
        )
        return params(self.keys["init"])

    def initial_params(self):
        """Parameters that training begins with: of `model.checkpoint`, or random."""
        if not self.config.model.checkpoint:
            return self.init_params()
        return load_params(self.config, self.param_shardings)

    @functools.cached_property
    def refit(self):
        """The compiled refit; call `refit_state`."""
        replicated = sharding.replicated(self.mesh)
        return make_refit(
            self.rollout_recipe,
            health=self.config.precision.health,
            shardings={"out_shardings": (self.weight_shardings, replicated, replicated)},
        )

    def refit_state(self, state: learner.TrainState) -> Served:
        """What the sampler takes of a state."""
        return Served(*self.refit(state.params, state.scaling_state, state.kv_scales))

    @property
    def calibrated(self) -> bool:
        """Whether the KV cache has calibrated scales."""
        return "calibrated" in (self.rollout_recipe.kv, self.learner_recipe.kv)

    @functools.cached_property
    def calibrate(self):
        """The compiled calibration; call `calibrate_state`."""
        margin = self.config.precision.kv_margin
        return make_calibrate(self.model, self.rollout_recipe, self.parallel, margin=margin)

    def calibrate_state(self, state: learner.TrainState, tokens, lengths) -> learner.TrainState:
        """`state` with KV scales calibrated on tokens (B, T) of lengths (B,); unchanged where no
        recipe asks for them."""
        if not self.calibrated:
            return state
        tokens, lengths = processes.place((tokens, lengths), sharding.batch_sharding(self.mesh))
        scales = self.calibrate(
            state.params, state.scaling_state, tokens, lengths, state.step, self.rope
        )
        scales = processes.place(scales, sharding.replicated(self.mesh))
        return dataclasses.replace(state, kv_scales=scales)

    def first_layers(self, recipe: Recipe) -> dict[str, int]:
        """{run of layers under `recipe`: number of its first layer}."""
        runs = layer_groups(layer_stacks(self.model), recipe)
        return {run.name: run.layers.start for run in runs}

    @property
    def sft_recipe(self) -> Recipe:
        """The learner's recipe in supervised fine-tuning, where no rollout calibrates scales."""
        return without_calibration(self.learner_recipe)

    def make_sampler(self, group_size: int, top_k: int, top_p: float, taps: tuple[str, ...] = ()):
        """A compiled sampler with the run's prompt and response slots."""
        rollout = self.config.rollout
        settings = SamplerConfig(
            max_new_tokens=rollout.max_new_tokens, group_size=group_size,
            eos_ids=self.tokenizer.eos_ids, pad_id=self.tokenizer.pad_id,
            top_k=top_k, top_p=top_p, cache_slots=self.cache_slots, taps=taps,
        )  # fmt: skip
        if rollout.slots and not taps:
            return ContinuousSampler(
                self.model, self.rollout_recipe, settings, self.batching(settings), mesh=self.mesh
            )
        on_cpu = Loop(self.model, self.rollout_recipe, settings).on_cpu
        if on_cpu and self.mesh.size == 1 and not taps:
            return HalvedSampler(self.model, self.rollout_recipe, settings)
        return make_sampler(self.model, self.rollout_recipe, settings, self.parallel)

    def batching(self, settings: SamplerConfig) -> Batching:
        """Sizes of continuous batching: `rollout.pages`, or what the plan of memory allows."""
        rollout, devices = self.config.rollout, self.mesh.size
        sizes = Batching(rollout.slots, rollout.pages, prefill_chunk=rollout.prefill_chunk)
        if rollout.pages:
            return sizes
        plan = plan_rollout(
            Loop(self.model, self.rollout_recipe, settings, self.parallel), self.learner_recipe,
            self.mesh,
            prompt_tokens=rollout.max_prompt_tokens, batching=sizes, memory=device_memory(),
            reference=self.algorithm.needs_reference, offload=self.config.learner.offload,
        )  # fmt: skip
        pages = processes.decided(lambda: plan.pages)  # free memory may differ
        return dataclasses.replace(sizes, pages=pages * devices)

    @functools.cached_property
    def sampler(self):
        """The rollout program; see `make_sampler`."""
        rollout = self.config.rollout
        return self.make_sampler(
            rollout.group_size, rollout.top_k, rollout.top_p, self.replayed_taps
        )

    @property
    def replayed_taps(self) -> tuple[str, ...]:
        """What the sampler records of its routing for the learner (`algo.routing_replay`)."""
        count = {"none": 0, "experts": 1, "weights": 2}[self.config.algo.routing_replay]
        return ROUTING[:count]

    @functools.cached_property
    def eval_sampler(self):
        """The evaluation program: a question's greedy answer and `eval.samples` sampled ones."""
        return self.make_sampler(1 + self.config.eval.samples, 0, self.config.eval.top_p)

    @functools.cached_property
    def score(self):
        """The compiled score; call `score_state`."""
        return learner.make_score(self.model, self.learner_recipe, self.parallel)

    @functools.cached_property
    def reference_score(self):
        """The compiled score of the reference policy; call `score_reference`."""
        if self.config.precision.reference == "learner":
            return self.score
        return learner.make_score(self.model, self.reference_recipe, self.parallel)

    def score_reference(self, state: learner.TrainState, batch: learner.Batch) -> np.ndarray:
        """Log-probabilities (B, R) of a batch's responses under the reference policy."""
        batch = to_device(dataclasses.replace(batch, routing={}), self)
        scaling, kv_scales = state.scaling_state, state.kv_scales
        if self.config.precision.reference != "learner":
            scaling, kv_scales = init_scaling(state.params, self.reference_recipe), None
        return processes.fetch(
            self.reference_score(state.params, scaling, kv_scales, batch, self.rope)
        )

    def score_state(self, state: learner.TrainState, batch: learner.Batch) -> np.ndarray:
        """Log-probabilities (B, R) of a batch's responses under a state, on the host."""
        batch = to_device(batch, self)
        return processes.fetch(
            self.score(state.params, state.scaling_state, state.kv_scales, batch, self.rope)
        )

    @property
    def loss(self) -> learner.LossConfig:
        """The loss of the RL phase."""
        algorithm, router = self.algorithm, self.config.algo.router_aux_loss_coef
        return learner.LossConfig(algorithm.loss, algorithm.kl, algorithm.kl_coef, router)

    def train_step(
        self,
        optimizer,
        loss: learner.LossConfig,
        micro_batches: int,
        recipe: Recipe | None = None,
        taps: tuple[str, ...] = (),
        donate: bool = True,
    ):
        """The compiled train step of a phase; `recipe` defaults to the learner's.

        `taps` and `donate` as for `learner.make_train_step`.
        """
        shardings = (
            param_shardings(self.mesh, self.state_shapes(optimizer)),
            sharding.batch_sharding(self.mesh),
            sharding.replicated(self.mesh),
        )
        recipe, learn = recipe or self.learner_recipe, self.config.learner
        settings = {
            "parallel": self.parallel, "micro_batches": micro_batches, "remat": learn.remat,
            "health": self.config.precision.health, "taps": taps,
        }  # fmt: skip
        if self._offloads:
            gradients = learner.make_gradients(self.model, recipe, loss, **settings)
            return OffloadedStep(gradients, optimizer, *shardings, donate)
        return learner.make_train_step(
            self.model, recipe, optimizer, loss, donate=donate,
            shardings={"out_shardings": shardings}, **settings,
        )  # fmt: skip

    @property
    def _offloads(self) -> bool:
        """Whether the optimiser's moments are in host memory."""
        return self.config.learner.offload == "moments"

    def _missing_kv_scales(self) -> KVScales | None:
        """KV scales before the first calibration, if a recipe needs any."""
        return missing_scales(self.model.num_hidden_layers) if self.calibrated else None

    def _rng(self) -> np.ndarray:
        return np.asarray(jax.random.key_data(self.keys["rollout"]))  # a copy: states are donated

    def _state(self, optimizer, scaling_state, rng, params) -> learner.TrainState:
        return learner.new_state(
            params, optimizer, rng, self.learner_recipe, scaling_state, self._missing_kv_scales()
        )

    def state_shapes(self, optimizer) -> learner.TrainState:
        """ShapeDtypeStructs of a phase's state, laid out as by `new_state`."""
        make_state = functools.partial(self._state, optimizer, None, self._rng())
        shapes = jax.eval_shape(make_state, self.param_shapes)
        shardings = param_shardings(self.mesh, shapes)
        if self._offloads:
            shardings = with_host_moments(shapes, shardings)
        return sharding.laid_out(shapes, shardings)

    def new_state(self, params, optimizer, scaling_state: dict | None = None) -> learner.TrainState:
        """The state at the start of a phase, laid out over the mesh: optimiser moments as their
        parameters, or in host memory (`learner.offload`)."""
        away = self._offloads
        state = self._state(
            optax.identity() if away else optimizer, scaling_state, self._rng(), params
        )
        state = processes.place(state, param_shardings(self.mesh, state))
        if not away:
            return state
        opt_state = init_on_host(self.state_shapes(optimizer).opt_state)
        return dataclasses.replace(state, opt_state=opt_state)

    def advance(self, state, step: int, position: int) -> learner.TrainState:
        """`state` after `step` steps of its phase and `position` batches of its stream."""
        counts = np.int32(step), np.int32(position)
        step, position = processes.place(counts, sharding.replicated(self.mesh))
        return dataclasses.replace(state, step=step, data_state=position)

    # Work on text.

    def pad_prompts(self, questions: list[Question]) -> tuple[np.ndarray, np.ndarray]:
        """Prompt tokens (P, Tp) and lengths (P,) of questions."""
        prompts = [question.prompt for question in questions]
        return pad_prompts(
            prompts, self.tokenizer, self.config.rollout.max_prompt_tokens, self.chat
        )

    def generate(
        self,
        sampler,
        weights,
        questions: list[Question],
        key,
        temperature: np.ndarray,
        watch: Watch | None = None,
        first_id: int | np.ndarray = 0,
    ) -> tuple[Rollout, np.ndarray, np.ndarray]:
        """Samples responses: the rollout on the host, its taps where they are, prompt tokens and
        lengths (P, ...).

        `watch` is told what has ended while a `ContinuousSampler` goes on; others end at once.
        Samples are numbered from `first_id` on, or those of each question from its own, (P,); key
        and number decide a sample's random bits.
        """
        prompts, lengths = self.pad_prompts(questions)
        group = len(temperature) // len(questions)
        firsts = first_id if np.ndim(first_id) else first_id + group * np.arange(len(questions))
        sample_ids = np.add.outer(firsts, np.arange(group)).reshape(-1).astype(np.int32)
        limits = np.full_like(sample_ids, self.config.rollout.max_new_tokens)
        tokens, *rows = processes.place(
            (prompts, lengths, sample_ids, temperature, limits), sharding.batch_sharding(self.mesh)
        )
        watching = {"watch": watch} if watch and isinstance(sampler, ContinuousSampler) else {}
        out = sampler(weights, tokens, rows[0], key, *rows[1:], self.rope, **watching)
        rollout = processes.fetch(dataclasses.replace(out, taps={}))
        return dataclasses.replace(rollout, taps=out.taps), prompts, lengths

    def batch(
        self, prompts, lengths, targets, mask, temperature: np.ndarray, **fields
    ) -> learner.Batch:
        """Prompts (B, Tp) of lengths (B,) and responses as a training batch on the host; `fields`
        are those of `learner.make_batch`."""
        tokens = join(prompts, lengths, targets, self.tokenizer.pad_id)
        return learner.make_batch(tokens, lengths, targets, mask, temperature, **fields)

    def rollout_batch(self, rollout: Rollout, prompts, lengths, advantages=None) -> learner.Batch:
        """A rollout as a training batch on the host, its routing on the devices; old
        log-probabilities are the sampler's.

        prompts (P, Tp) and lengths (P,) are those of `generate`; advantages are (B,), or 1.
        """
        group = len(rollout.tokens) // len(lengths)
        temperature = np.full(len(rollout.tokens), self.config.rollout.temperature, np.float32)
        return self.batch(
            np.repeat(prompts, group, axis=0), np.repeat(lengths, group),
            rollout.tokens, rollout.mask, temperature,
            advantages=advantages, old_logprobs=rollout.logprobs,
            routing={n: jnp.moveaxis(rollout.taps[n], 0, 1) for n in self.replayed_taps},
        )  # fmt: skip

    def decode(self, tokens: np.ndarray, mask: np.ndarray) -> list[str]:
        """Text of responses (B, R) with a mask (B, R)."""
        rows = zip(tokens, mask, strict=True)
        return [self.tokenizer.decode(row[keep].tolist()) for row, keep in rows]


def make_runtime(config: ml_collections.ConfigDict, with_questions: bool = True) -> Runtime:
    """Checks `config` and makes what follows from it; compiles nothing.

    Args:
      config: of `load_config`.
      with_questions: make the task's questions, too; without them the splits are empty.

    Raises:
      UserError: something in the configuration cannot work.
    """
    check_process()
    if processes.count() > 1:
        same = "start all of them with the same software and options"
        processes.check_equal(_identity(config), same)
        if config.precision.cpu_products == "auto":
            one_kind = "run on CPUs of one kind, or set precision.cpu_products='exact'"
            processes.check_equal({"the way of multiplying": cpu_way().name}, one_kind)
    config = config.copy_and_resolve_references()
    for name in ("dir", "cache_dir"):  # wherever the user's functions go from here
        config.run[name] = config.run[name] and os.path.abspath(config.run[name])
    resolved = resolve_config(config)
    mesh = sharding.make_mesh(config.mesh.to_dict())
    checks.check_mesh(config, sharding.batch_divisor(mesh))
    if with_questions:
        check_rollout_memory(resolved, mesh)
        resolved = resolved.with_tasks()
    tokenizer = load_tokenizer(config.data, config.model.checkpoint)
    chat = _chat_format(config, tokenizer)
    if chat is not None:
        tokenizer = with_turn_end(tokenizer, chat)
    resolved = with_vocabulary(resolved, tokenizer.vocab_size)
    data = load_data(config, tokenizer, chat) if with_questions else Data({})
    checks.check_platform(resolved)
    hold_settings()  # modules of the user's are imported by now
    return Runtime(
        **vars(resolved), mesh=mesh, tokenizer=tokenizer, chat=chat, questions=data.questions,
        data_note=data.note, data_digest=data.digest,
    )  # fmt: skip


def _identity(config: ml_collections.ConfigDict) -> dict[str, str]:
    """What must be the same in all processes, by name."""
    found = environment(config)
    fields = {f"config.{name}": repr(value) for name, value in flatten(config).items()}
    return {k: v for part in found.values() for k, v in part.items()} | fields


def _chat_format(config, tokenizer: Tokenizer) -> ChatFormat | None:
    data = config.data
    if not data.chat:
        return None
    if tokenizer.chat_template is None:
        raise UserError(
            f"data.chat is True, and the tokenizer {data.tokenizer!r} has no chat template: set "
            "data.chat=False, or name the directory of a model that has one"
        )
    return ChatFormat(
        tokenizer.chat_template, data.system_prompt, plain(data.chat_options.to_dict()),
        begun(pathlib.Path(config.run.dir)),
    )  # fmt: skip


def to_device(batch: learner.Batch, runtime: Runtime) -> learner.Batch:
    """A batch, laid out over the mesh by rows."""
    return processes.place(batch, sharding.batch_sharding(runtime.mesh))
