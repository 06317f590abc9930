"""Checks a configuration before anything compiles. Each error message is one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

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


def check_fields(config: ml_collections.ConfigDict) -> None:
    """Raises UserError for the first field whose value is out of bounds, or no choice of it."""
    for path, value in flatten(config).items():
        all_fields()[path].check(path, value)


def check(resolved: Resolved) -> None:
    """Raises UserError for the first fields that contradict each other or the model."""
    check_combinations(resolved)
    _refuse(_faults_of_recipes(resolved))
    _refuse(_faults_of_rollouts(resolved))
    _refuse(_faults_of_updates(resolved))
    if resolved.zero_drift:
        check_xla_flags()
    if resolved.config.model.checkpoint or resolved.config.model.name:
        check_top_k(resolved.config, resolved.model.vocab_size)
    _check_functions(resolved)
    adapted_shapes(resolved.config, resolved.model)  # refuses modules and a rank that do not fit
    for recipe in (resolved.rollout_recipe, resolved.learner_recipe):
        for policy in {operand.policy for operand in recipe.operands.values()}:
            check_scales(policy)  # it may be a user's function


def _refuse(faults: Iterable[tuple[bool, str]]) -> None:
    """Raises UserError for the first of (whether it is so, what is wrong) that is so."""
    for is_wrong, sentence in faults:
        if is_wrong:
            raise UserError(sentence)


def _faults_of_recipes(resolved: Resolved) -> Iterator[tuple[bool, str]]:
    """Yields (whether fields contradict each other, what is wrong and what to write instead)."""
    config = resolved.config
    experts = resolved.model.num_experts
    yield (
        config.mesh.expert == -1,
        "mesh.expert is -1, which only the other axes may be: write the number of devices that "
        "share the experts",
    )
    yield (
        experts % config.mesh.expert > 0,
        f"mesh.expert is {config.mesh.expert}, which does not divide model.num_experts = "
        f"{experts}: write a number that does",
    )
    recipes = (resolved.rollout_recipe, resolved.learner_recipe)
    for name, operand in OF_OPERANDS.items():
        value = config.precision[name]
        yield (
            FIELDS["precision"][name].is_set(value)
            and not any(operand in recipe.operands for recipe in recipes),
            f"precision.{name} is {value!r}, and neither recipe "
            f"({', '.join(recipe.name for recipe in recipes)}) quantises its {operand}s: leave it "
            "out, or use fp8",
        )


def _faults_of_rollouts(resolved: Resolved) -> Iterator[tuple[bool, str]]:
    """Yields as `_faults_of_recipes`."""
    algo = resolved.config.algo
    rollout = resolved.config.rollout
    yield (
        algo.overlong_buffer > rollout.max_new_tokens,
        f"algo.overlong_buffer is {algo.overlong_buffer}, more than rollout.max_new_tokens = "
        f"{rollout.max_new_tokens}: lower it",
    )
    most = resolved.step_samples * rollout.most_versions
    versions = " x most_versions" * (rollout.most_versions > 1)
    yield (
        rollout.slots > most,
        f"rollout.slots is {rollout.slots}, more than the {most} responses of a step "
        f"(prompts_per_step x group_size{versions}): write at most {most}",
    )
    yield (
        resolved.positions is not None and resolved.sequence_tokens > resolved.positions,
        f"rollout.max_prompt_tokens + max_new_tokens = {resolved.sequence_tokens} is more than the "
        f"{resolved.positions} positions of model.checkpoint = "
        f"{resolved.config.model.checkpoint!r}: lower them",
    )
    rounds = algo.dynamic_sampling_rounds if algo.dynamic_sampling else 1
    yield (
        resolved.step_samples * rounds >= 2**31,
        f"rollout.prompts_per_step x group_size = {resolved.step_samples:,} responses, in up to "
        f"{rounds:,} rounds (algo.dynamic_sampling_rounds), are more than 2^31, and each has a "
        "number of 32 bits for its random bits: lower one of them",
    )
    yield (
        resolved.config.env.train_questions < rollout.prompts_per_step
        and is_generated(resolved.config.env.task),
        f"rollout.prompts_per_step is {rollout.prompts_per_step}, more than env.train_questions = "
        f"{resolved.config.env.train_questions}",
    )


def _faults_of_updates(resolved: Resolved) -> Iterator[tuple[bool, str]]:
    """Yields as `_faults_of_recipes`."""
    config = resolved.config
    updates = {
        "sft": (config.sft.steps, "sft.steps"),
        "optimizer": (rl_updates(config), "run.steps x algo.epochs x algo.num_minibatches"),
    }
    for section, (count, said) in updates.items():
        rate = config[section]
        yield (
            count > 0 and rate.end_fraction < 1 and rate.warmup_steps >= count,
            f"{section}.warmup_steps is {rate.warmup_steps}, which leaves nothing of {said} = "
            f"{count} updates for the decay to {section}.end_fraction: lower it, or set "
            "end_fraction=1",
        )
    yield (
        config.eval.average_last > config.run.keep_checkpoints,
        f"eval.average_last is {config.eval.average_last}, and run.keep_checkpoints keeps "
        f"{config.run.keep_checkpoints}: raise the latter, and train with it",
    )
    capacity = config.learner.tokens_per_batch
    least = slots_of(max(resolved.sequence_tokens, capacity))
    yield (
        capacity not in (0, least),
        f"learner.tokens_per_batch is {capacity}, and must be a multiple of {slots_of(1)} with "
        f"room for rollout.max_prompt_tokens + max_new_tokens = {resolved.sequence_tokens} tokens: "
        f"write {least}",
    )
    parts = config.algo.num_minibatches * config.learner.gradient_accumulation_steps
    yield (
        resolved.step_samples % parts > 0,
        f"rollout.prompts_per_step x group_size = {resolved.step_samples} responses do not divide "
        f"into algo.num_minibatches x learner.gradient_accumulation_steps = {parts} equal parts",
    )
    yield (
        config.sft.steps > 0 and config.sft.questions < config.sft.batch_size,
        f"sft.batch_size is {config.sft.batch_size}, more than sft.questions = "
        f"{config.sft.questions}: lower the one or raise the other",
    )


def _faults_of_machine(resolved: Resolved) -> Iterator[tuple[bool, str]]:
    """Yields as `_faults_of_recipes`."""
    kernels = resolved.config.precision.kernels
    platform = backend()
    yield (
        resolved.config.precision.cpu_products == "exact" and platform != "cpu",
        f"precision.cpu_products is 'exact', and JAX runs on {platform} here: write 'auto', or "
        "start with JAX_PLATFORMS=cpu",
    )
    yield (
        kernels in ("triton", "mosaic") and platform != "gpu",
        f"precision.kernels is {kernels!r}, and JAX runs on {platform} here: write 'auto' or "
        "'reference'",
    )
    yield (
        kernels != "reference" and platform == "gpu" and not triton_installed(),
        f"precision.kernels is {kernels!r}, which needs Triton and jax-triton 0.4 or later: pip "
        "install 'fp8rl_jax[cuda]' on Python 3.12, or set precision.kernels='reference', which is "
        "slow and drifts",
    )


def check_platform(resolved: Resolved) -> None:
    """Raises UserError if this machine cannot run the configuration: no GPU for its kernels, or no
    zero drift where it is required. Compiles a trivial probe, so call it after every other check.
    """
    _refuse(_faults_of_machine(resolved))
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


def _check_functions(resolved: Resolved) -> None:
    """Tries loss, aggregation and corrections on small arrays; compiles nothing."""
    algo = resolved.config.algo
    algorithm = resolved.algorithm
    packed = resolved.config.learner.tokens_per_batch > 0
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
    zeros = np.zeros(shape)
    counted = np.ones(shape, bool)
    tried: dict[str, Callable] = {
        f"algo.correction: {name!r}": functools.partial(correction, zeros, counted, zeros)
        for name, correction in algorithm.corrections.items()
    }
    tried[f"algo.loss_aggregation: {algo.loss_aggregation!r}"] = lambda: (
        algorithm.aggregation(counted),
        counted,
    )
    for said, call in tried.items():
        try:
            weights, keep = map(np.asarray, call())
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
                f"{said} {problem}; a correction takes numpy arrays (log_ratio, mask, advantages) "
                "and returns (weights, keep) of their shape, an aggregation takes mask and returns "
                "weights"
            )


def check_mesh(config: ml_collections.ConfigDict, learners: int, samplers: int) -> None:
    """Raises UserError if a batch does not divide over the devices that share it, or a device's
    share of `rollout.pages` cannot hold one sequence.

    Args:
      config: the configuration.
      learners, samplers: numbers of devices that share a batch in the learner and in the sampler.
    """
    _refuse(_faults_of_mesh(config, learners, samplers))


def _faults_of_mesh(config, learners: int, samplers: int) -> Iterator[tuple[bool, str]]:
    """Yields as `_faults_of_recipes`."""
    rollout = config.rollout
    axes = "mesh.data x mesh.fsdp" + (" x mesh.expert" if config.mesh.expert > 1 else "")
    sampling = "the devices of mesh.rollout that share a batch" if config.mesh.rollout else axes
    rows = rollout.prompts_per_step * rollout.group_size
    parts = config.algo.num_minibatches * config.learner.gradient_accumulation_steps
    sampled = {
        "rollout.prompts_per_step": rollout.prompts_per_step,
        "eval.batch_size": config.eval.batch_size,
        "rollout.slots": rollout.slots,
        "rollout.pages": rollout.pages if rollout.slots else 0,
    }
    learnt = {
        "the rows of a micro-batch (prompts_per_step x group_size / parts)": rows // parts,
        "sft.batch_size": config.sft.batch_size if config.sft.steps else 0,
    }
    for sizes, devices, where in ((sampled, samplers, sampling), (learnt, learners, axes)):
        for name, size in sizes.items():
            yield (
                size % devices > 0,
                f"{name} = {size} does not divide over {where} = {devices} devices; choose a "
                "multiple",
            )
    least = samplers * least_pages(rollout.max_prompt_tokens + rollout.max_new_tokens)
    each = f" on each of {samplers} devices" if samplers > 1 else ""
    yield (
        rollout.slots > 0 and 0 < rollout.pages < least,
        f"rollout.pages is {rollout.pages}, too few for one sequence of max_prompt_tokens + "
        f"max_new_tokens{each}: write at least {least}, or 0",
    )
