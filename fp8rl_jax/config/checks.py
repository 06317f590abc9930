"""Checks of a whole configuration, before anything compiles. Each failure is one sentence."""

from __future__ import annotations

import errno
import math
import os
import pathlib
import shutil
import tempfile

import jax
import ml_collections

from fp8rl_jax.config import AT_LEAST, AT_MOST, CHOICES, flatten
from fp8rl_jax.config.model_source import check_positions, model_shapes
from fp8rl_jax.config.precision import SIDES, same_numerics, side_recipe, zero_drift_required
from fp8rl_jax.envs import check_task, load_reward
from fp8rl_jax.errors import UserError
from fp8rl_jax.exact_jit import check_xla_flags, compiler_options
from fp8rl_jax.kernels import triton_installed
from fp8rl_jax.models import REMAT, ModelConfig, least_pages
from fp8rl_jax.quant import same_forward

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a write may meet that the user can mend; any other OSError is ours.
WRITE_ERRORS = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG)


def check_config(config: ml_collections.ConfigDict, with_task: bool = True) -> None:
    """Raises UserError for the first thing in `config` that cannot work.

    Without `with_task` the task's name and options are not looked at.
    """
    flat = flatten(config)
    for path, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            span = " in (0, 1]" if path == "rollout.top_p" else ""
            raise UserError(f"{path} is {value}; write a finite number{span}")
    for path, least in AT_LEAST.items():
        if flat[path] < least:
            raise UserError(f"{path} is {flat[path]}; write a number of at least {least}")
    for path, most in AT_MOST.items():
        if flat[path] > most:
            raise UserError(f"{path} is {flat[path]}; write a number of at most {most}")
    for path, choices in {**CHOICES, "learner.remat": REMAT}.items():
        if flat[path] not in choices:
            raise UserError(f"{path} is {flat[path]!r}; write one of {', '.join(choices)}")
    for path in ("run.dir", "data.tokenizer"):
        if not flat[path]:
            raise UserError(f"{path} is empty; write a path")
    model = model_config(config, vocab_size=1)
    _check_experts(config, model.num_experts)
    _check_precision(config)
    _check_latent(config, model)
    _check_chat(config)
    _check_rollout(config)
    _check_continuous(config)
    _check_batches(config)
    if with_task:
        check_task(config.env.task, config.env.task_options.to_dict())
    load_reward(config.env.reward)


def _check_experts(config, experts: int) -> None:
    devices, replay = config.mesh.expert, config.algo.routing_replay
    if not experts and replay != "none":
        raise UserError(
            f"algo.routing_replay is {replay!r}, and a dense model has no routers: write 'none'"
        )
    if not experts and config.algo.router_aux_loss_coef:
        raise UserError(
            f"algo.router_aux_loss_coef is {config.algo.router_aux_loss_coef}, and a dense model "
            "has no routers: write 0"
        )
    if replay != "none" and config.mesh.tensor > 1:
        raise UserError(
            f"algo.routing_replay is {replay!r}, which is recorded on whole layers, and "
            f"mesh.tensor is {config.mesh.tensor}: write 1, or set algo.routing_replay='none'"
        )
    if devices == 1:
        return
    if not experts:
        raise UserError(f"mesh.expert is {devices}, and a dense model has no experts: write 1")
    if devices < 1 or experts % devices:
        raise UserError(
            f"mesh.expert is {devices}, which does not divide model.num_experts = {experts}: write "
            "a number that does"
        )


def model_config(config: ml_collections.ConfigDict, vocab_size: int) -> ModelConfig:
    """The model's shapes from `config.model`; its vocabulary holds the tokenizer's `vocab_size`.

    Raises:
      UserError: they contradict each other, or the tokenizer.
    """
    model = model_shapes(config, vocab_size)
    if model.vocab_size < vocab_size:
        raise UserError(
            f"data.tokenizer: {config.data.tokenizer!r} has ids up to {vocab_size - 1}, and the "
            f"model's vocabulary has {model.vocab_size} tokens: take the model's own tokenizer"
        )
    return model


def _check_latent(config, model: ModelConfig) -> None:
    """What multi-head latent attention does not have."""
    if not model.latent:
        return
    where = "and the model has multi-head latent attention (kv_lora_rank above 0), which"
    if config.mesh.tensor != 1:
        raise UserError(
            f"mesh.tensor is {config.mesh.tensor}, {where} is not cut by heads: write 1"
        )
    if config.precision.attention == "fp8":
        raise UserError(
            f"precision.attention is 'fp8', {where} keeps its queries in bf16: write 'bf16'"
        )
    for side in SIDES:
        if side_recipe(config, side).kv == "calibrated":
            chosen = config.precision.kv_cache != "recipe"
            field = "kv_cache" if chosen else side
            raise UserError(
                f"precision.{field} is {config.precision[field]!r}, {where} takes one scale per "
                "token and none that is calibrated: set precision.kv_cache='fp8'"
            )


def _check_chat(config) -> None:
    data = config.data
    for name in ("system_prompt", "chat_options"):
        if data[name] and not data.chat:
            raise UserError(
                f"data.{name} is {flatten(config)[f'data.{name}']!r} and data.chat False: set "
                f"data.chat=True, or leave {name} out"
            )
    own = pathlib.Path(config.model.checkpoint, "tokenizer.json")
    if config.model.checkpoint and data.tokenizer == "byte" and own.is_file():
        raise UserError(
            f"data.tokenizer is 'byte', and model.checkpoint = {config.model.checkpoint!r} has a "
            "tokenizer of its own: set data.tokenizer='checkpoint'"
        )


def use_tis(config: ml_collections.ConfigDict) -> bool:
    """Whether importance weights are applied."""
    if config.algo.correction != "auto":
        return config.algo.correction == "tis"
    return not same_numerics(config) and config.algo.old_logprobs != "rollout"


def takes_rollout_logprobs(config: ml_collections.ConfigDict, drifted: bool) -> bool:
    """Whether the sampler's log-probabilities serve as the old ones, which saves a forward pass.

    With 'auto' as long as no first update has shown (`drifted`) that the learner's are others.
    """
    if config.algo.old_logprobs != "auto":
        return config.algo.old_logprobs == "rollout"
    return zero_drift_required(config) and not use_tis(config) and not drifted


def _check_precision(config) -> None:
    rollout, learner = (side_recipe(config, side) for side in SIDES)
    precision = config.precision
    changes = ("weight_policy", "activation_policy", "gradient_policy", "bf16_modules")
    for name in (*changes, "first_layers_bf16", "last_layers_bf16"):
        if precision[name] and not rollout.quantized and not learner.quantized:
            raise UserError(
                f"precision.{name} is {precision[name]!r}, and neither recipe ({rollout.name}, "
                f"{learner.name}) quantises linear layers: leave it out, or use fp8"
            )
    for name in ("weight", "activation", "gradient"):
        policy = precision[f"{name}_policy"]
        if policy and name not in {**rollout.operands, **learner.operands}:
            raise UserError(
                f"precision.{name}_policy is {policy!r}, and neither recipe ({rollout.name}, "
                f"{learner.name}) quantises its {name}s: leave it out"
            )
    stateful = [
        name
        for name, operand in rollout.operands.items()
        if operand.policy.stateful and name != "gradient"
    ]
    if stateful and not same_forward(rollout, learner):
        own = (f"{name}_policy" for name in stateful if precision[f"{name}_policy"])
        raise UserError(
            f"precision.{next(own, 'rollout')}: recipe {rollout.name!r} scales by what the "
            f"learner's steps observed, and the learner ({learner.name!r}) has another forward "
            "pass: use the same recipe on both sides"
        )
    if not zero_drift_required(config):
        return
    if not same_forward(rollout, learner):
        raise UserError(
            f"precision.zero_drift is 'required', but the recipes differ (rollout {rollout.name}, "
            f"learner {learner.name}): make them equal, or set precision.zero_drift='report'"
        )
    if not rollout.row_local:
        policy = precision.activation_policy
        ways = (
            "write a policy that is fixed beforehand (that of fp8_delayed, or static), or take "
            "fp8_blockwise (a scale per token)"
            if policy
            else "use fp8_blockwise (a scale per token) or fp8_delayed (fixed beforehand)"
        )
        raise UserError(
            f"precision.{'activation_policy' if policy else 'rollout'}: recipe {rollout.name!r} "
            f"takes an activation's scale ({rollout.operands['activation'].policy.name}) from all "
            "tokens of a batch, and sampler and learner see different batches, so they cannot "
            f"agree (measured mean drift 0.13 per token): {ways}, or set "
            "precision.zero_drift='report'"
        )
    check_xla_flags()


def _check_kernels(config) -> None:
    kernels, backend = config.precision.kernels, jax.default_backend()
    if kernels in ("triton", "mosaic") and backend != "gpu":
        raise UserError(
            f"precision.kernels is {kernels!r}, and JAX runs on {backend} here: write 'auto' or "
            "'reference'"
        )
    if kernels != "reference" and backend == "gpu" and not triton_installed():
        raise UserError(
            f"precision.kernels is {kernels!r}, and jax-triton is not installed: install it with "
            "pip install 'fp8rl_jax[cuda]', or set precision.kernels='reference', which is slow "
            "and drifts"
        )
    if kernels == "mosaic" and zero_drift_required(config):
        raise UserError(
            "precision.kernels is 'mosaic', which decodes by one kernel and learns by another, and "
            "their bits have not been compared: write 'triton', or set "
            "precision.zero_drift='report'"
        )


def check_platform(config: ml_collections.ConfigDict) -> None:
    """Raises UserError where this machine cannot do what is asked: kernels without a GPU, zero
    drift where it is not kept. Compiles a trivial probe, so it comes after every other check."""
    _check_kernels(config)
    if config.precision.zero_drift == "required" and not compiler_options():
        raise UserError(
            f"precision.zero_drift is 'required', and on {jax.default_backend()} with this jaxlib "
            "the promise is not kept yet: set precision.zero_drift='report'"
        )


def _check_rollout(config) -> None:
    rollout, algo = config.rollout, config.algo
    if rollout.group_size == 1:
        raise UserError(
            "rollout.group_size is 1, so every advantage (reward minus group mean) is 0, and its "
            "standard deviation too: write a group of at least 2"
        )
    need = rollout.max_prompt_tokens + rollout.max_new_tokens
    if rollout.cache_slots and rollout.cache_slots < need:
        raise UserError(
            f"rollout.max_prompt_tokens + max_new_tokens = {need} is longer than the cache of "
            f"rollout.cache_slots = {rollout.cache_slots}: raise it to {need}, or write 0"
        )
    check_positions(config, rollout.cache_slots or need)
    if rollout.temperature <= 0:
        raise UserError(
            f"rollout.temperature is {rollout.temperature}; write a number above 0 (evaluation "
            "decodes greedily by itself)"
        )
    if not 0 < rollout.top_p <= 1:
        raise UserError(f"rollout.top_p is {rollout.top_p}; write a number in (0, 1]")
    if algo.correction == "tis" and algo.old_logprobs == "rollout":
        raise UserError(
            "algo.correction='tis' needs the learner's own log-probabilities: set "
            "algo.old_logprobs='auto' or 'learner'"
        )


def _check_continuous(config) -> None:
    """What continuous batching asks for, but for what the number of devices decides."""
    rollout = config.rollout
    if not rollout.slots:
        if rollout.pages:
            raise UserError(
                f"rollout.pages is {rollout.pages}, and pages are used by continuous batching: set "
                "rollout.slots to the sequences that decode at a time, or pages to 0"
            )
        return
    rows = rollout.prompts_per_step * rollout.group_size
    if rollout.slots > rows:
        raise UserError(
            f"rollout.slots is {rollout.slots}, more than the {rows} responses of a step "
            f"(prompts_per_step x group_size): write at most {rows}"
        )
    if rollout.cache_slots:
        raise UserError(
            f"rollout.cache_slots is {rollout.cache_slots}, and with rollout.slots the cache is in "
            "pages: write 0, and set rollout.pages to size it"
        )
    if config.mesh.tensor != 1:
        raise UserError(
            f"rollout.slots is {rollout.slots} and mesh.tensor {config.mesh.tensor}: continuous "
            "batching does not cut layers by columns; set mesh.tensor to 1, or rollout.slots to 0"
        )
    recipe = side_recipe(config, "rollout")
    if not recipe.row_local:
        raise UserError(
            f"rollout.slots is {rollout.slots}, and recipe {recipe.name!r} (precision.rollout) "
            "takes an activation's scale from all that share a batch: set rollout.slots to 0, or a "
            "recipe that scales by rows, such as fp8"
        )
    if config.algo.routing_replay != "none":
        raise UserError(
            f"algo.routing_replay is {config.algo.routing_replay!r}, and continuous batching does "
            "not record routing: set it to 'none', or rollout.slots to 0"
        )


def _check_batches(config) -> None:
    warmup = config.warmup
    if warmup.steps and warmup.end_fraction < 1 and warmup.warmup_steps >= warmup.steps:
        raise UserError(
            f"warmup.warmup_steps is {warmup.warmup_steps}, which leaves nothing of warmup.steps = "
            f"{warmup.steps} for the decay to warmup.end_fraction: lower it, or set end_fraction=1"
        )
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    parts = config.algo.updates_per_rollout * config.learner.micro_batches
    if rows % parts:
        raise UserError(
            f"rollout.prompts_per_step x group_size = {rows} responses do not divide into "
            f"algo.updates_per_rollout x learner.micro_batches = {parts} equal parts"
        )
    if config.warmup.steps and config.warmup.questions < config.warmup.batch_size:
        raise UserError(
            f"warmup.batch_size is {config.warmup.batch_size}, more than warmup.questions = "
            f"{config.warmup.questions}: lower the one or raise the other"
        )
    if config.env.train_questions < config.rollout.prompts_per_step:
        raise UserError(
            f"rollout.prompts_per_step is {config.rollout.prompts_per_step}, more than "
            f"env.train_questions = {config.env.train_questions}"
        )


def check_mesh(config: ml_collections.ConfigDict, rows_at_once: int) -> None:
    """Raises UserError if a batch does not divide over the devices that share it."""
    axes = "mesh.data x mesh.fsdp" + (" x mesh.expert" if config.mesh.expert > 1 else "")
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    parts = config.algo.updates_per_rollout * config.learner.micro_batches
    sizes = {
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "the rows of a micro-batch (prompts_per_step x group_size / parts)": rows // parts,
        "eval.batch_size": config.eval.batch_size,
    }
    if config.warmup.steps:
        sizes["warmup.batch_size"] = config.warmup.batch_size
    if config.rollout.slots:
        sizes["rollout.slots"] = config.rollout.slots
        sizes["rollout.pages"] = config.rollout.pages
    for name, size in sizes.items():
        if size % rows_at_once:
            raise UserError(
                f"{name} = {size} does not divide over {axes} = {rows_at_once} devices; choose a "
                "multiple"
            )

    _check_pages(config, rows_at_once)


def _check_pages(config: ml_collections.ConfigDict, devices: int) -> None:
    """Raises UserError if a device's share of `rollout.pages` cannot hold one sequence."""
    rollout = config.rollout
    least = devices * least_pages(rollout.max_prompt_tokens + rollout.max_new_tokens)
    if rollout.slots and rollout.pages and rollout.pages < least:
        each = f" on each of {devices} devices" if devices > 1 else ""
        raise UserError(
            f"rollout.pages is {rollout.pages}, too few for one sequence of max_prompt_tokens + "
            f"max_new_tokens{each}: write at least {least}, or 0"
        )


def check_room(directory: pathlib.Path, bytes_needed: int, field: str = "run.dir") -> None:
    """Raises UserError if `directory` cannot be made, written, or has too little room."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise no_room(directory, error, field) from None
    free = shutil.disk_usage(directory).free
    if free < bytes_needed:
        raise UserError(
            f"{field}: {directory} has {free / 1e6:.0f} MB of room and the checkpoints need "
            f"{bytes_needed / 1e6:.0f} MB; free some, or set {field} elsewhere"
        )


def no_room(directory: pathlib.Path, error: OSError, field: str = "run.dir") -> UserError:
    """The sentence for a write that failed."""
    full = error.errno in _FULL
    reason = "no room is left" if full else error.strerror or str(error)
    return UserError(
        f"{field}: cannot write in {directory}: {reason}; free some room, or set {field} elsewhere"
    )
