"""Checks a configuration before anything compiles. Each error message is one sentence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fp8rl_jax.base.errors import UserError, raised
from fp8rl_jax.base.exact_jit import check_xla_flags, compiler_options
from fp8rl_jax.batch import slots_of
from fp8rl_jax.config.adapters import adapted_shapes
from fp8rl_jax.config.combinations import check_combinations
from fp8rl_jax.config.fields import FIELDS, all_fields
from fp8rl_jax.config.load import flatten
from fp8rl_jax.config.precision import OF_OPERANDS
from fp8rl_jax.config.resolved import Resolved, check_top_k, rl_updates
from fp8rl_jax.envs import is_generated
from fp8rl_jax.kernels import backend, triton_installed
from fp8rl_jax.models import least_pages, proven
from fp8rl_jax.quant import check_scales
from fp8rl_jax.rl import Algorithm


def check_fields(config: ml_collections.ConfigDict) -> None:
    """Raises UserError for the first field whose value is out of bounds, or no choice of it."""
    for path, value in flatten(config).items():
        all_fields()[path].check(path, value)


def check(resolved: Resolved) -> None:
    """Raises UserError for the first fields that contradict each other or the model."""
    config = resolved.config
    check_combinations(resolved)
    _check_experts(config.mesh.expert, resolved.model.num_experts)
    _check_precision(resolved)
    _check_rollout(resolved)
    adapted_shapes(resolved.config, resolved.model)  # refuses modules and a rank that do not fit
    _check_schedules(config)
    _check_batches(config)
    _check_policies(resolved)


def _check_policies(resolved: Resolved) -> None:
    """Tries every scaling policy on numbers: it may be a user's function."""
    for side in ("rollout_recipe", "learner_recipe"):
        for policy in {operand.policy for operand in getattr(resolved, side).operands.values()}:
            check_scales(policy)


def _check_experts(devices: int, experts: int) -> None:
    if devices == -1:
        raise UserError(
            "mesh.expert is -1, which only the other axes may be: write the number of devices "
            "that share the experts"
        )
    if experts % devices:
        raise UserError(
            f"mesh.expert is {devices}, which does not divide model.num_experts = {experts}: write "
            "a number that does"
        )


def _check_precision(resolved: Resolved) -> None:
    recipes = (resolved.rollout_recipe, resolved.learner_recipe)
    for name, operand in OF_OPERANDS.items():
        value = resolved.config.precision[name]
        quantised = any(operand in recipe.operands for recipe in recipes)
        if FIELDS["precision"][name].is_set(value) and not quantised:
            raise UserError(
                f"precision.{name} is {value!r}, and neither recipe "
                f"({', '.join(recipe.name for recipe in recipes)}) quantises its {operand}s: leave "
                "it out, or use fp8"
            )
    if resolved.zero_drift:
        check_xla_flags()


def _check_kernels(resolved: Resolved) -> None:
    kernels = resolved.config.precision.kernels
    platform = backend()
    if resolved.config.precision.cpu_products == "exact" and platform != "cpu":
        raise UserError(
            f"precision.cpu_products is 'exact', and JAX runs on {platform} here: write 'auto', or "
            "start with JAX_PLATFORMS=cpu"
        )
    if kernels in ("triton", "mosaic") and platform != "gpu":
        raise UserError(
            f"precision.kernels is {kernels!r}, and JAX runs on {platform} here: write 'auto' or "
            "'reference'"
        )
    if kernels != "reference" and platform == "gpu" and not triton_installed():
        raise UserError(
            f"precision.kernels is {kernels!r}, which needs Triton and jax-triton 0.4 or later: "
            "pip install 'fp8rl_jax[cuda]' on Python 3.12, or set precision.kernels='reference', "
            "which is slow and drifts"
        )


def check_platform(resolved: Resolved) -> None:
    """Raises UserError if this machine cannot run the configuration: no GPU for its kernels, or no
    zero drift where it is required. Compiles a trivial probe, so call it after every other check.
    """
    _check_kernels(resolved)
    precision = resolved.config.precision
    if precision.zero_drift != "required":
        return
    if backend() == "gpu" and precision.kernels != "reference":
        if not proven.is_proven():
            versions = ", ".join(f"{name} {version}" for name, version in proven.stack().items())
            raise UserError(
                "precision.zero_drift is 'required', and it has not been tested here with "
                f"{versions.removeprefix('device ')}: run `bash launch/gpu_check.sh` of the "
                "repository once, which records that it holds, or set "
                "precision.zero_drift='report'"
            )
    elif not compiler_options():
        raise UserError(
            f"precision.zero_drift is 'required', and on {backend()} with this jaxlib "
            "the promise is not kept yet: set precision.zero_drift='report'"
        )


def _check_rollout(resolved: Resolved) -> None:
    rollout = resolved.config.rollout
    algo = resolved.config.algo
    if resolved.config.model.checkpoint or resolved.config.model.name:
        check_top_k(resolved.config, resolved.model.vocab_size)
    if algo.overlong_buffer > rollout.max_new_tokens:
        raise UserError(
            f"algo.overlong_buffer is {algo.overlong_buffer}, more than rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}: lower it"
        )
    rows = resolved.step_samples * rollout.most_versions
    if rollout.slots > rows:
        sizes = "prompts_per_step x group_size" + " x most_versions" * (rollout.most_versions > 1)
        raise UserError(
            f"rollout.slots is {rollout.slots}, more than the {rows} responses of a step "
            f"({sizes}): write at most {rows}"
        )
    tokens = resolved.sequence_tokens
    if resolved.positions is not None and tokens > resolved.positions:
        raise UserError(
            f"rollout.max_prompt_tokens + max_new_tokens = {tokens} is more than the "
            f"{resolved.positions} positions of model.checkpoint = "
            f"{resolved.config.model.checkpoint!r}: lower them"
        )
    _check_functions(resolved.algorithm, algo, resolved.config.learner.tokens_per_batch > 0)


def _check_functions(algorithm: Algorithm, algo, packed: bool) -> None:
    """Tries the loss and the corrections on small arrays; compiles nothing."""
    shape = (2, 3)
    rows = {"sequences": jax.ShapeDtypeStruct((2, 4, 3), bool)} if packed else {}
    floats = jax.ShapeDtypeStruct(shape, jnp.float32)
    mask = jax.ShapeDtypeStruct(shape, bool)
    try:
        loss, stats = jax.eval_shape(algorithm.loss, floats, floats, floats, mask, **rows)
        returned = {"loss": loss, **stats}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's function raises, SystemExit too
        raise UserError(
            f"algo.loss: {algo.loss!r} fails on arrays of shape {shape} with {raised(error)}; it "
            f"takes (logp, old, advantages, mask{', sequences' * packed}), works under jit, and "
            "returns the loss and a dict of statistics"
            + "; with learner.tokens_per_batch=0 it needs no sequences"
            * packed
        ) from None
    for name, value in returned.items():
        if (value.shape, value.dtype) != (shape, jnp.float32):
            raise UserError(
                f"algo.loss: {algo.loss!r} returns {name} as {value.dtype}{list(value.shape)} for "
                f"arrays of shape {shape}: return float32 of that shape"
            )
    for name, correction in algorithm.corrections.items():
        try:
            weights, keep = map(
                np.asarray, correction(np.zeros(shape), np.ones(shape, bool), np.zeros(shape))
            )
            if not weights.shape == keep.shape == shape or keep.dtype != bool:
                problem = "returns other shapes, or a keep that is not bool"
            elif weights.dtype.kind not in "fiu" or not np.isfinite(weights).all():
                problem = "returns weights that are no finite real numbers where log_ratio is 0"
            else:
                problem = ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a user's function raises, SystemExit too
            problem = f"fails with {raised(error)}"
        if problem:
            raise UserError(
                f"algo.correction: {name!r} {problem}; it takes numpy arrays (log_ratio, mask, "
                "advantages) and returns (weights, keep) of their shape"
            )


def _check_schedules(config) -> None:
    updates = {
        "sft": (config.sft.steps, "sft.steps"),
        "optimizer": (rl_updates(config), "run.steps x algo.epochs x algo.num_minibatches"),
    }
    for section, (count, said) in updates.items():
        rate = config[section]
        if count and rate.end_fraction < 1 and rate.warmup_steps >= count:
            raise UserError(
                f"{section}.warmup_steps is {rate.warmup_steps}, which leaves nothing of {said} = "
                f"{count} updates for the decay to {section}.end_fraction: lower it, or set "
                "end_fraction=1"
            )
    if config.eval.average_last > config.run.keep_checkpoints:
        raise UserError(
            f"eval.average_last is {config.eval.average_last}, and run.keep_checkpoints keeps "
            f"{config.run.keep_checkpoints}: raise the latter, and train with it"
        )


def _check_batches(config) -> None:
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    rounds = config.algo.dynamic_sampling_rounds if config.algo.dynamic_sampling else 1
    if rows * rounds >= 2**31:
        raise UserError(
            f"rollout.prompts_per_step x group_size = {rows:,} responses, in up to {rounds:,} "
            "rounds (algo.dynamic_sampling_rounds), are more than 2^31, and each has a number of "
            "32 bits for its random bits: lower one of them"
        )
    _check_packing(config)
    parts = config.algo.num_minibatches * config.learner.gradient_accumulation_steps
    if rows % parts:
        raise UserError(
            f"rollout.prompts_per_step x group_size = {rows} responses do not divide into "
            f"algo.num_minibatches x learner.gradient_accumulation_steps = {parts} equal parts"
        )
    if config.sft.steps and config.sft.questions < config.sft.batch_size:
        raise UserError(
            f"sft.batch_size is {config.sft.batch_size}, more than sft.questions = "
            f"{config.sft.questions}: lower the one or raise the other"
        )
    few = config.env.train_questions < config.rollout.prompts_per_step
    if few and is_generated(config.env.task):
        raise UserError(
            f"rollout.prompts_per_step is {config.rollout.prompts_per_step}, more than "
            f"env.train_questions = {config.env.train_questions}"
        )


def _check_packing(config) -> None:
    capacity = config.learner.tokens_per_batch
    if not capacity:
        return
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    least = slots_of(max(longest, capacity))
    if capacity != least:
        raise UserError(
            f"learner.tokens_per_batch is {capacity}, and must be a multiple of {slots_of(1)} with "
            f"room for rollout.max_prompt_tokens + max_new_tokens = {longest} tokens: write {least}"
        )


def check_mesh(config: ml_collections.ConfigDict, learners: int, samplers: int) -> None:
    """Raises UserError if a batch does not divide over the devices that share it, or a device's
    share of `rollout.pages` cannot hold one sequence.

    Args:
      config: the configuration.
      learners, samplers: numbers of devices that share a batch in the learner and in the sampler.
    """
    axes = "mesh.data x mesh.fsdp" + (" x mesh.expert" if config.mesh.expert > 1 else "")
    sampling = "the devices of mesh.rollout that share a batch" if config.mesh.rollout else axes
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    parts = config.algo.num_minibatches * config.learner.gradient_accumulation_steps
    learnt = {"the rows of a micro-batch (prompts_per_step x group_size / parts)": rows // parts}
    sampled = {
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "eval.batch_size": config.eval.batch_size,
    }
    if config.sft.steps:
        learnt["sft.batch_size"] = config.sft.batch_size
    if config.rollout.slots:
        sampled["rollout.slots"] = config.rollout.slots
        sampled["rollout.pages"] = config.rollout.pages
    for sizes, devices, where in ((sampled, samplers, sampling), (learnt, learners, axes)):
        for name, size in sizes.items():
            if size % devices:
                raise UserError(
                    f"{name} = {size} does not divide over {where} = {devices} devices; choose a "
                    "multiple"
                )
    rollout = config.rollout
    least = samplers * least_pages(rollout.max_prompt_tokens + rollout.max_new_tokens)
    if rollout.slots and rollout.pages and rollout.pages < least:
        each = f" on each of {samplers} devices" if samplers > 1 else ""
        raise UserError(
            f"rollout.pages is {rollout.pages}, too few for one sequence of max_prompt_tokens + "
            f"max_new_tokens{each}: write at least {least}, or 0"
        )
